"""A conversation in the API's form, and the same in a template's terms.

    plain      one form for all clients: text parts joined, nulls left out, arguments as objects
    in_terms   the form that the template takes: contents, arguments, ids and order as it shows them

A template that shows no calls gets them as text in the form of Hermes: `<tool_call>` in the assistant's message, and
results as `<tool_response>` in a message of the user. So the model sees everything that is in a conversation.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from neper.errors import InvalidRequestError
from neper.text.template_terms import TemplateTerms, in_parts, without_text

Message = dict[str, Any]

_LETTERS = string.ascii_letters + string.digits
_SHORT = 9


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages in one form: text parts joined, nulls and empty lists of calls left out, arguments as objects.

    Raises:
        InvalidRequestError: there are none, or one has no role, no content or content that is not text.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    return [_plain_message(place, message) for place, message in enumerate(messages)]


def in_terms(messages: Sequence[Message], terms: TemplateTerms) -> list[Message]:
    """Plain messages, in the form that a template with these terms takes."""
    found: list[Message] = []
    names: dict[Any, str] = {}
    for message in messages:
        calls = _calls_of(message)
        names |= {call.get("id"): call["function"].get("name", "") for call in calls}
        if message["role"] == "tool":
            found += _result(message, terms, names, found)
        elif calls:
            found += _with_calls(message, calls, terms)
        else:
            found.append(message)
    if not terms.parallel:
        found = _one_call_each(found)
    return list(map(dict, in_parts(found))) if terms.parts else found


def new_call_id(terms: TemplateTerms) -> str:
    """An id for a call, in the form that the model's template accepts when it comes back."""
    if terms.short_ids:
        return "".join(secrets.choice(_LETTERS) for _ in range(_SHORT))
    return f"call_{secrets.token_hex(12)}"


def short_id(call_id: Any) -> str:
    """The id itself if it is 9 letters and digits, else 9 that are made from it: the same for a call and its result."""
    text = str(call_id)
    if len(text) == _SHORT and text.isascii() and text.isalnum():
        return text
    number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), "big")
    letters = []
    for _ in range(_SHORT):
        number, place = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[place])
    return "".join(letters)


def _plain_message(place: int, message: Any) -> Message:
    where = f"messages[{place}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where} must be an object with a role", param="messages")
    plain = {name: value for name, value in message.items() if value is not None}
    if plain.get("tool_calls") == []:
        del plain["tool_calls"]
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = content = "".join(_part_text(where, part) for part in content)
    if content is None:
        if message["role"] != "assistant" or "tool_calls" not in plain:
            raise InvalidRequestError(f"{where} has no content", param="messages")
    elif not isinstance(content, str):
        raise InvalidRequestError(f"{where}.content must be a string or a list of text parts", param="messages")
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
        if not content:
            plain.pop("content", None)
    if isinstance(plain.get("reasoning_content"), str):
        # Some templates know it by another name.
        plain.setdefault("thinking", plain["reasoning_content"])
    return plain


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(f"{where}.content: a part of type {kind!r} is not supported, only text", param="messages")


def _plain_call(call: Any) -> Any:
    """A call with the object in its arguments, which the API has as a JSON string. An empty string is no arguments."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        if not arguments.strip():
            arguments = {}
        else:
            try:
                value = json.loads(arguments)
            except (ValueError, RecursionError):
                return call
            if not isinstance(value, dict):
                return call
            arguments = value
    elif arguments is None:
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _calls_of(message: Message) -> list[Mapping[str, Any]]:
    """The calls of a message, if all have the right form. A template gets others as they are."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    good = [call for call in calls if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)]
    return good if len(good) == len(calls) else []


def _with_calls(message: Message, calls: Sequence[Mapping[str, Any]], terms: TemplateTerms) -> list[Message]:
    if not terms.calls:
        written = [f"<tool_call>\n{_as_json(_written(call))}\n</tool_call>" for call in calls]
        others = {name: value for name, value in message.items() if name != "tool_calls"}
        return [{**others, "content": "\n".join([*([message["content"]] if "content" in message else []), *written])}]
    shown = {**message, "tool_calls": [_call(call, terms) for call in calls]}
    if "content" not in message:
        return [without_text(shown, terms.absent)]
    if terms.text_with_calls:
        return [shown]
    text = {name: value for name, value in message.items() if name != "tool_calls"}
    return [text, without_text(shown, terms.absent)]


def _call(call: Mapping[str, Any], terms: TemplateTerms) -> Message:
    function = call["function"]
    arguments = function.get("arguments")
    if terms.text_arguments and not isinstance(arguments, str):
        arguments = _as_json(arguments)
    shown = {**call, "function": {**function, "arguments": arguments}}
    if terms.short_ids:
        shown["id"] = short_id(call.get("id"))
    return shown


def _written(call: Mapping[str, Any]) -> Message:
    return {"name": call["function"].get("name"), "arguments": call["function"].get("arguments")}


def _result(message: Message, terms: TemplateTerms, names: Mapping[Any, str], before: list[Message]) -> list[Message]:
    if not terms.results:
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        last = before[-1] if before else {}
        if last.get("role") == "user" and last["content"].startswith("<tool_response>"):
            before[-1] = {**last, "content": f"{last['content']}\n{text}"}
            return []
        return [{"role": "user", "content": text}]
    shown = dict(message)
    if terms.short_ids:
        shown["tool_call_id"] = short_id(message.get("tool_call_id"))
    if terms.named_results:
        shown.setdefault("name", names.get(message.get("tool_call_id"), "unknown"))
    return [shown]


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Messages of several calls as messages of one call, each before its result, for templates that need this."""
    found: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or len(calls) < 2:
            found.append(message)
            continue
        results = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        for number, call in enumerate(calls):
            own = [result for result in results if result.get("tool_call_id") == call.get("id")]
            results = [result for result in results if result not in own]
            single = {**message, "tool_calls": [call]}
            if number and single.get("content"):
                single["content"] = ""
            found += [single, *own]
        found += results
    return found


def _as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
