"""Plain tools: functions, calls and results in words, for chat templates that show none.

The functions stand at the end of the system's message (at the beginning of the user's, where a template has no other):

    You can call these functions:
    {"name": "clock", "description": "The time", "parameters": {…}}

    To call one, write its name and its arguments between tags:
    <tool_call>
    {"name": <name>, "arguments": <JSON object>}
    </tool_call>

A call that was made is text of that form, after the assistant's other text. Results are messages of the user:

    <tool_response>
    noon
    </tool_response>
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from neper.errors import InvalidRequestError
from neper.text.tokenizer import Tokenizer
from neper.types import JsonObject

_BEFORE = "You can call these functions:\n"
_AFTER = (
    "\n\nTo call one, write its name and its arguments between tags:\n"
    '<tool_call>\n{"name": <name>, "arguments": <JSON object>}\n</tool_call>'
)
_PROBE = "neper looks for this text"


def shows_system_message(tokenizer: Tokenizer) -> bool:
    """True where the model's template writes the content of a system message."""
    probe = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hello"}]
    try:
        token_ids = tokenizer.apply_chat_template(probe)
    except InvalidRequestError:
        return False
    return _PROBE in tokenizer.decode_bytes(token_ids).decode("utf-8", "replace")


def with_plain_tools(
    messages: Sequence[JsonObject], functions: Sequence[JsonObject], *, system: bool
) -> list[JsonObject]:
    """The conversation with its functions, calls and results as text.

    Args:
        messages: OpenAI's message objects, their content text or text parts.
        functions: OpenAI's function objects, for the model to call.
        system: the template shows a system's message.
    """
    plain: list[JsonObject] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{_text(message)}\n</tool_response>")
            continue
        if results:
            plain.append({"role": "user", "content": "\n".join(results)})
            results = []
        plain.append(_with_calls(message) if message.get("tool_calls") else message)
    if results:
        plain.append({"role": "user", "content": "\n".join(results)})
    return _described(plain, functions, "system" if system else "user") if functions else plain


def _described(messages: list[JsonObject], functions: Sequence[JsonObject], role: str) -> list[JsonObject]:
    """The messages with a description of the functions: in the first one if it has that role, else before it."""
    lines = [json.dumps(function, ensure_ascii=False) for function in functions]
    description = f"{_BEFORE}{chr(10).join(lines)}{_AFTER}"
    first, *rest = messages
    if first["role"] != role:
        return [{"role": role, "content": description}, *messages]
    texts = [_text(first), description] if role == "system" else [description, _text(first)]
    return [{**first, "content": "\n\n".join(filter(None, texts))}, *rest]


def _with_calls(message: JsonObject) -> JsonObject:
    texts = [_text(message), *[_call(call["function"]) for call in message["tool_calls"]]]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, texts))}


def _call(function: JsonObject) -> str:
    arguments: Any = function["arguments"] or {}
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {written}}}\n</tool_call>'


def _text(message: JsonObject) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join([part["text"] or "" for part in content])
