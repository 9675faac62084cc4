"""The body of a request for a response: input items, tools, the form of the text, and fields to include."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from neper.errors import InvalidRequestError, UnsupportedError
from neper.server.bodies.chat import ReasoningEffort, TopLogprobs
from neper.server.bodies.completion import Alternatives, GenerationBody, NotNegative, Positive, SomeIds, StreamOptions
from neper.server.bodies.response_items import ITEMS, InputItem, InputMessage, RawItem, read_item
from neper.server.bodies.response_tools import (
    MAX_TOOLS,
    AllowedTools,
    Choice,
    FunctionChoice,
    FunctionTool,
    RawChoice,
    RawTool,
    read_choice,
    read_tool,
)
from neper.server.bodies.strict import Name, Only, Refused, Strict
from neper.server.bodies.structured import NamedSchema, ResponseFormat

LOGPROBS = "message.output_text.logprobs"
"""The name in `include` for entries of the text."""

INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""Values of `include`. Reasoning comes as text, so the second has no effect."""

Summary = Literal["auto", "concise", "detailed"]


class TextFormat(Strict):
    """Chat's `response_format`, with the schema's fields beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None

    def check(self) -> None:
        for field in ("name", "schema"):
            if (self.type == "json_schema") != (getattr(self, field) is not None):
                raise InvalidRequestError(
                    f"text.format: type json_schema and the field {field} go together", param="text"
                )
        if self.type != "json_schema" and (self.strict is not None or self.description is not None):
            raise InvalidRequestError("text.format: only a schema is strict or has a description", param="text")

    def response_format(self) -> ResponseFormat:
        if self.name is None:
            return ResponseFormat(type=self.type)
        named = NamedSchema(name=self.name, schema=self.schema, strict=self.strict, description=self.description)
        return ResponseFormat(type=self.type, json_schema=named)


class TextConfig(Strict):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint to models that were trained for it


class ReasoningConfig(Strict):
    effort: ReasoningEffort | None = None
    # Reasoning comes whole, as text, so there is no summary.
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Refused = None
    mode: Refused = None


class ResponseStreamOptions(StreamOptions):
    include_usage: Annotated[bool | None, Only()] = None  # the last event has it anyway


PARTS: tuple[type[Strict], ...] = (*ITEMS.values(), FunctionTool, FunctionChoice, AllowedTools)
"""Structs in a body that are decoded by their type."""


class ResponsesBody(GenerationBody, dict=True):
    input: str | list[RawItem] | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    include: list[str] | None = None
    top_logprobs: TopLogprobs | None = None
    field_logprobs: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    tools: Annotated[list[RawTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: RawChoice = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    parallel_tool_calls: bool | None = None
    max_tool_calls: Positive | None = None  # it bounds calls of tools that run on the server, which has none
    prompt_cache_options: Any = None  # a hint
    previous_response_id: Refused = None
    conversation: Refused = None
    prompt: Refused = None
    context_management: Refused = None
    moderation: Refused = None
    # The other endpoints'.
    n: Annotated[Positive | None, Only()] = None
    response_format: Annotated[ResponseFormat | None, Only()] = None
    prompt_logprobs: Annotated[Alternatives | None, Only()] = None
    prompt_logprobs_start: Annotated[NotNegative | None, Only()] = None
    prompt_logprob_token_ids: Annotated[SomeIds | None, Only()] = None
    return_token_ids: Annotated[bool | None, Only()] = None

    @property
    def includes_logprobs(self) -> bool:
        return self.include is not None and LOGPROBS in self.include

    @cached_property
    def items(self) -> list[InputItem]:
        """The conversation. A text is the user's."""
        if not self.input:
            raise InvalidRequestError("input must be a text or a list of at least one item", param="input")
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return [read_item(raw, f"input[{place}]") for place, raw in enumerate(self.input)]

    @cached_property
    def functions(self) -> list[FunctionTool]:
        functions = [read_tool(raw, f"tools[{place}]") for place, raw in enumerate(self.tools or ())]
        seen = set()
        for place, function in enumerate(functions):
            if function.name in seen:
                raise InvalidRequestError(f"tools[{place}]: there is another {function.name!r}", param="tools")
            seen.add(function.name)
        return functions

    @cached_property
    def choice(self) -> Choice:
        """The functions that may be called, or must be."""
        choice = read_choice(self.tool_choice)
        names = {function.name for function in self.functions}
        named = () if isinstance(choice, str) else choice.tools if isinstance(choice, AllowedTools) else (choice,)
        for function in named:
            if function.name not in names:
                raise InvalidRequestError(
                    f"tool_choice: there is no function {function.name!r} in tools", param="tool_choice"
                )
        if choice == "required" and not names:
            raise InvalidRequestError("tool_choice 'required' needs tools", param="tool_choice")
        return choice

    def check(self) -> None:
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise UnsupportedError(
                    f"{name} is not supported: no response is kept here, so input must have all of the conversation",
                    param=name,
                )
        super().check()
        for place, item in enumerate(self.items):
            item.check(f"input[{place}]")
        for function in self.functions:
            function.check_unsupported("tools")
        assert self.choice is not None
        self._check_include()
        if self.background:
            raise UnsupportedError(
                "background: true is not supported: this server keeps no responses", param="background"
            )
        if self.text is not None and self.text.format is not None:
            self.text.format.check()
        if self.reasoning is not None:
            self.reasoning.check_unsupported("reasoning")
        if any(not isinstance(value, str) for value in (self.metadata or {}).values()):
            raise InvalidRequestError("metadata: values must be strings", param="metadata")

    def _check_include(self) -> None:
        for name in self.include or ():
            if name not in INCLUDABLE:
                raise UnsupportedError(
                    f"include: {name!r} is not supported, only {' and '.join(map(repr, INCLUDABLE))}", param="include"
                )
        for field in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, field) is not None and not self.includes_logprobs:
                raise _needs_logprobs(field)
        if self.field_logprobs and not self.includes_logprobs:
            raise _needs_logprobs("field_logprobs")


def _needs_logprobs(field: str) -> InvalidRequestError:
    return InvalidRequestError(f'{field} needs include: ["{LOGPROBS}"]', param=field)
