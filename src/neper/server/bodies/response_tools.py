"""Tools of a response, which are functions, and the choice among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from neper.errors import InvalidRequestError, UnsupportedError
from neper.server.bodies.strict import Name, Refused, Strict
from neper.server.bodies.typed import decode_object, one_of, type_of

MAX_TOOLS = 128


class FunctionTool(Strict):
    """A function that the model may call; `parameters` is the JSON schema of its arguments, null = any object.

    `strict` is false unless it says true: OpenAI's default rewrites the schema, which this server does not.
    """

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: Any = None  # a hint
    async_: Refused = msgspec.field(default=None, name="async")
    allowed_callers: Refused = None
    defer_loading: Refused = None
    output_schema: Refused = None


class FunctionChoice(Strict):
    """The function that must be called, or one of those that may be."""

    type: Literal["function"]
    name: str


class AllowedTools(Strict):
    """The functions among `tools` that the model gets in this request."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Meta(min_length=1)]


CHOICES: dict[str, type[FunctionChoice | AllowedTools]] = {"function": FunctionChoice, "allowed_tools": AllowedTools}

Word = Literal["auto", "none", "required"]
Choice = Word | FunctionChoice | AllowedTools

RawTool = Annotated[msgspec.Raw, Meta(extra_json_schema=one_of(FunctionTool))]
RawChoice = Annotated[
    msgspec.Raw, Meta(extra_json_schema=one_of(*CHOICES.values(), words=("auto", "none", "required", None)))
]


def read_tool(raw: msgspec.Raw, where: str) -> FunctionTool:
    kind = type_of(raw, where, "tools")
    if kind is None:
        raise InvalidRequestError(f"{where}: type is missing", param="tools")
    if kind != "function":
        raise UnsupportedError(
            f"{where}: tools of type {kind!r} are not supported, only 'function': nothing runs on this server",
            param="tools",
        )
    return decode_object(raw, FunctionTool, where, "tools")


def read_choice(raw: msgspec.Raw) -> Choice:
    param = "tool_choice"
    if not bytes(raw).startswith(b"{"):
        try:
            return msgspec.json.decode(raw, type=Word | None) or "auto"
        except (msgspec.ValidationError, RecursionError):
            raise InvalidRequestError(
                "tool_choice: expected 'auto', 'none', 'required' or an object with a type", param=param
            ) from None
    kind = type_of(raw, param, param)
    if kind not in CHOICES:
        raise UnsupportedError(
            f"tool_choice: type {kind!r} is not supported, only {' and '.join(map(repr, CHOICES))}", param=param
        )
    return decode_object(raw, CHOICES[kind], param, param)
