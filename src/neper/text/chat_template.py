"""A model's chat template: messages in, the prompt's text out, rendered in Jinja's sandbox.

The environment offers what Hugging Face templates rely on: trimmed blocks, loop controls, `tojson`, `strftime_now`,
`raise_exception` and the `generation` tag (which marks text for training, and is plain text here).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from neper.errors import InvalidRequestError

_RESERVED = ("messages", "add_generation_prompt")
# Ends in a space, so that a template that trims its messages shows itself.
_CONTINUE_MARK = "\ue000neper continues here\ue000 "


class ChatTemplate:
    """Renders conversations.

    Args:
        source: the Jinja source, or several by name; of those, "tool_use" serves requests with tools where it exists,
            and "default" all others.
        special_tokens: names the template may use, as `bos_token`.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = dict(special_tokens or {})
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. With `continue_final_message` it ends where the last message's content ends.

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt: false", param="continue_final_message"
            )
        conversation = plain_messages(messages)
        extra = dict(template_kwargs or {})
        for name in _RESERVED:
            if name in extra:
                raise InvalidRequestError(f"{name} cannot be set here", param="chat_template_kwargs")
        final = ""
        if continue_final_message:
            final = conversation[-1].get("content") or ""
            conversation[-1] = {**conversation[-1], "content": final + _CONTINUE_MARK}
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **extra}
        template = self._template(bool(variables["tools"]))
        try:
            text = template.render(variables, messages=conversation, add_generation_prompt=add_generation_prompt)
        except Exception as error:
            # Templates run on whatever the client sent; each kind of failure in one is about those messages.
            raise InvalidRequestError(f"the model's chat template failed: {error}", param="messages") from error
        return _cut_at_mark(text, final) if continue_final_message else text

    def _template(self, has_tools: bool) -> jinja2.Template:
        name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name not in self._compiled:
            if name not in self._sources:
                raise InvalidRequestError("the model has no default chat template", param="messages")
            try:
                self._compiled[name] = _environment().from_string(self._sources[name])
            except jinja2.TemplateSyntaxError as error:
                message = f"the model's chat template does not compile: line {error.lineno}: {error}"
                raise InvalidRequestError(message, param="messages") from error
        return self._compiled[name]


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text parts joined, nulls left out, tool-call arguments as objects.

    Raises:
        InvalidRequestError: there are none, or one has no role, no content or content that is not text.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    return [_plain_message(place, message) for place, message in enumerate(messages)]


def _plain_message(place: int, message: Any) -> dict[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where} must be an object with a role", param="messages")
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "".join(_part_text(where, part) for part in content)
    elif content is None:
        if message["role"] != "assistant" or "tool_calls" not in plain:
            raise InvalidRequestError(f"{where} has no content", param="messages")
    elif not isinstance(content, str):
        raise InvalidRequestError(f"{where}.content must be a string or a list of text parts", param="messages")
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_plain_tool_call(call) for call in plain["tool_calls"]]
    return plain


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(f"{where}.content: a part of type {kind!r} is not supported, only text", param="messages")


def _plain_tool_call(call: Any) -> Any:
    """The API carries arguments as a JSON string; templates expect the object in it."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _cut_at_mark(text: str, final: str) -> str:
    mark = _CONTINUE_MARK.rstrip()
    place = text.rfind(mark)
    if place < 0:
        raise InvalidRequestError(
            "continue_final_message: the model's chat template does not show the last message", param="messages"
        )
    if text.startswith(_CONTINUE_MARK, place) or not final:
        return text[:place]
    # The template trims messages: the content that is continued must be trimmed too.
    return text[:place].rstrip()


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which prompts must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
