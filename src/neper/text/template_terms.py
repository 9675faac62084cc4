"""A template's terms: the form in which a chat template takes the API's messages.

They are found by rendering small conversations with unique words, not by the name of a family: templates of one family
differ, and are edited.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

Absent = Literal["null", "empty", "missing"]
Render = Callable[[Sequence[Mapping[str, Any]]], "str | None"]
"""Renders a conversation; None where the template refuses it."""

LONG_ID = "call_0123456789abcdef01234567"
"""A call's id in OpenAI's form."""

_USER = {"role": "user", "content": "neperquestion"}
_ANSWER = {"role": "assistant", "content": "neperanswer"}
PROBE_TOOLS = [{"type": "function", "function": {"name": "neperfunction", "description": "x", "parameters": {}}}]
"""A function for templates that must have one."""
_VALUES = ("nepervalue", "neperother")
_PROPER = re.compile(r'"neperkey":\s*"nepervalue"')
# The results of str() and of a second tojson for an object.
_IMPROPER = re.compile(r"""'neperkey'|\\"neperkey""")


@dataclass(frozen=True)
class TemplateTerms:
    """The forms that a template takes.

    Attributes:
        parts: contents are lists of text parts; a plain string is lost.
        absent: the content of a message that has only calls.
        text_arguments: a call's arguments are JSON text; otherwise the object.
        short_ids: ids of calls are 9 letters and digits; otherwise any text.
        calls: messages of the assistant show their calls.
        text_with_calls: they also show them beside a text.
        parallel: a message may have several calls.
        results: messages of role tool are shown.
        named_results: those need the function's name.
        end: the text after an assistant's last message.
    """

    parts: bool = False
    absent: Absent = "null"
    text_arguments: bool = False
    short_ids: bool = False
    calls: bool = True
    text_with_calls: bool = True
    parallel: bool = True
    results: bool = True
    named_results: bool = False
    end: str = ""


def call(call_id: str, arguments: Any, name: str = "neperfunction") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def probe(render: Render, render_with_tools: Render) -> TemplateTerms:
    """The terms of a template, from some twenty renders of it."""
    terms = _probe(render)
    # A template that is only for conversations with tools fails without them.
    return terms if terms.calls else max(terms, _probe(render_with_tools), key=lambda found: found.calls)


def _probe(render: Render) -> TemplateTerms:
    terms = TemplateTerms(parts=_takes_parts(render))
    if terms.parts:
        whole = render
        render = lambda messages: whole(in_parts(messages))  # noqa: E731
    terms = replace(terms, end=_end(render))
    found = _calls(render, terms)
    if found is None:
        terms = replace(terms, calls=False)
    else:
        terms = replace(found, text_with_calls=_shows_text_with_calls(render, found), parallel=_parallel(render, found))
    return _results(render, terms)


def in_parts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with contents that are texts as a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def without_text(message: Mapping[str, Any], absent: Absent) -> dict[str, Any]:
    """A message without text, in the form that a template takes."""
    others = {name: value for name, value in message.items() if name != "content"}
    return others if absent == "missing" else {**others, "content": None if absent == "null" else ""}


def _takes_parts(render: Render) -> bool:
    plain = render([_USER])
    if plain is not None and "neperquestion" in plain:
        return False
    text = render(in_parts([_USER]))
    return text is not None and "neperquestion" in text


def _end(render: Render) -> str:
    # The question before the answer is there since some templates demand one.
    text = render([_USER, _ANSWER])
    return "" if text is None else text.rpartition("neperanswer")[2] if "neperanswer" in text else ""


def _conversation(terms: TemplateTerms, *values: str, text: str | None = None) -> list[dict[str, Any]]:
    """A question, the calls with these values, their results, and an answer."""
    ids = ["neperid00", "neperid11"] if terms.short_ids else [LONG_ID, LONG_ID[:-1]]
    calls, results = [], []
    for call_id, value in zip(ids, values, strict=False):
        arguments = f'{{"neperkey": "{value}"}}' if terms.text_arguments else {"neperkey": value}
        calls.append(call(call_id, arguments))
        result = {"role": "tool", "tool_call_id": call_id, "content": f"result of {value}"}
        results.append({**result, "name": "neperfunction"} if terms.named_results else result)
    message: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
    message = without_text(message, terms.absent) if text is None else {**message, "content": text}
    return [_USER, message, *results, _ANSWER, _USER]


def _calls(render: Render, terms: TemplateTerms) -> TemplateTerms | None:
    """The terms that show calls best; None where no terms show them."""
    best: tuple[bool, bool, int] | None = None
    found = None
    absents: tuple[Absent, ...] = ("null", "empty", "missing")
    for short_ids, text_arguments, absent in product((False, True), (False, True), absents):
        tried = replace(terms, short_ids=short_ids, text_arguments=text_arguments, absent=absent)
        whole = _conversation(tried, _VALUES[0])
        # A template may take the call and refuse the result.
        for conversation in (whole, whole[:2]):
            text = render(conversation)
            if text is None or not _occurs(text, _VALUES[0]):
                continue
            # A form of the template's own, in which the object was taken apart, is as right as JSON.
            right = bool(_PROPER.search(text)) or not _IMPROPER.search(text)
            score = (conversation is whole, right, -text.count("None"))
            if best is None or score > best:
                best, found = score, tried
            break
    return found


def _occurs(text: str, value: str) -> bool:
    """True where an argument's value is in the text, besides its place in a result."""
    return text.replace(f"result of {value}", "").find(value) >= 0


def _shows_text_with_calls(render: Render, terms: TemplateTerms) -> bool:
    text = render(_conversation(terms, _VALUES[0], text="nepertext"))
    return text is not None and _occurs(text, _VALUES[0])


def _parallel(render: Render, terms: TemplateTerms) -> bool:
    text = render(_conversation(terms, *_VALUES))
    return text is not None and all(_occurs(text, value) for value in _VALUES)


def _results(render: Render, terms: TemplateTerms) -> TemplateTerms:
    for named in (False, True):
        tried = replace(terms, named_results=named)
        conversation = _conversation(tried, _VALUES[0])
        if not terms.calls:
            conversation[1] = {"role": "assistant", "content": "nepertext"}
        text = render(conversation)
        if text is not None and f"result of {_VALUES[0]}" in text:
            return tried
    return replace(terms, results=False)
