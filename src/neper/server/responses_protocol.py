"""The body of a request for a response: input items, the form of the text, and what is to be included."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from neper.errors import InvalidRequestError, UnsupportedError
from neper.server.chat_protocol import ReasoningEffort, TopLogprobs
from neper.server.protocol import GenerationBody, Positive, StreamOptions
from neper.server.strict import Name, Strict
from neper.server.structured import NamedSchema, ResponseFormat

LOGPROBS = "message.output_text.logprobs"
"""What `include` names for entries of the text; the only thing that can be included here."""


class InputPart(Strict):
    type: str
    text: str | None = None
    # A part of an earlier response comes back with them.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    refusal: Any = None
    image_url: Any = None
    file_id: Any = None
    file_url: Any = None
    file_data: Any = None
    filename: Any = None
    detail: Any = None
    input_audio: Any = None
    prompt_cache_breakpoint: Any = None

    later: ClassVar[tuple[str, ...]] = (
        "refusal",
        "image_url",
        "file_id",
        "file_url",
        "file_data",
        "filename",
        "detail",
        "input_audio",
        "prompt_cache_breakpoint",
    )

    def check(self, where: str, types: tuple[str, ...]) -> None:
        if self.type not in types:
            raise UnsupportedError(
                f"{where}: parts of type {self.type!r} are not supported, only {' and '.join(map(repr, types))}",
                param="input",
            )
        self.refuse_later_fields("input")
        if self.text is None:
            raise InvalidRequestError(f"{where}: a part has no text", param="input")


class InputItem(Strict):
    """A message, or the reasoning before one; also those of an earlier response, as they came."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Any = None
    encrypted_content: Any = None
    call_id: Any = None
    name: Any = None
    arguments: Any = None
    output: Any = None

    later: ClassVar[tuple[str, ...]] = (
        "phase",
        "encrypted_content",
        "call_id",
        "name",
        "arguments",
        "output",
    )

    @property
    def is_reasoning(self) -> bool:
        return self.type == "reasoning"

    @property
    def text(self) -> str:
        """All of its text. Of reasoning, the summary stands in where that is missing."""
        parts = self.content or self.summary or ()
        return parts if isinstance(parts, str) else "".join(part.text or "" for part in parts)

    def check(self, where: str) -> None:
        if self.type not in (None, "message", "reasoning"):
            raise UnsupportedError(
                f"{where}: items of type {self.type!r} are not supported, only 'message' and 'reasoning'",
                param="input",
            )
        self.refuse_later_fields("input")
        if self.is_reasoning:
            if self.role is not None or isinstance(self.content, str):
                raise InvalidRequestError(f"{where}: reasoning has no role, and a list as its content", param="input")
            for part in self.content or ():
                part.check(where, ("reasoning_text",))
            for part in self.summary or ():
                part.check(where, ("summary_text",))
            return
        if self.role is None or self.content is None:
            raise InvalidRequestError(f"{where}: a message has a role and a content", param="input")
        if self.summary is not None:
            raise InvalidRequestError(f"{where}: only reasoning has a summary", param="input")
        for part in self.content if isinstance(self.content, list) else ():
            part.check(where, ("input_text", "output_text"))


class TextFormat(Strict):
    """As chat's `response_format`, with the schema's fields beside the type."""

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
    verbosity: Any = None

    later: ClassVar[tuple[str, ...]] = ("verbosity",)


class ReasoningConfig(Strict):
    effort: ReasoningEffort | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None
    mode: Any = None

    later: ClassVar[tuple[str, ...]] = ("summary", "generate_summary", "context", "mode")


class ResponseStreamOptions(StreamOptions):
    later: ClassVar[tuple[str, ...]] = ("include_usage",)  # the last event has it anyway


class ResponsesBody(GenerationBody):
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    include: list[str] | None = None
    top_logprobs: TopLogprobs | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # Known, for later.
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    context_management: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None

    later: ClassVar[tuple[str, ...]] = (
        *GenerationBody.later,
        "previous_response_id",
        "conversation",
        "prompt",
        "max_tool_calls",
        "context_management",
        "moderation",
        "prompt_cache_options",
        "prompt_cache_retention",
        # The other endpoints'.
        "n",
        "response_format",
        "prompt_logprobs",
        "return_token_ids",
    )

    @property
    def includes_logprobs(self) -> bool:
        return self.include is not None and LOGPROBS in self.include

    def check(self) -> None:
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise UnsupportedError(
                    f"{name} is not supported: this server keeps nothing, so input must have all of the conversation",
                    param=name,
                )
        super().check()
        if self.input is None or self.input == []:
            raise InvalidRequestError("input must be a text or a list of at least one item", param="input")
        for place, item in enumerate(self.input if isinstance(self.input, list) else ()):
            item.check(f"input[{place}]")
        self._check_include()
        self._check_unsupported_values()
        if self.text is not None:
            self.text.refuse_later_fields("text")
            if self.text.format is not None:
                self.text.format.check()
        if self.reasoning is not None:
            self.reasoning.refuse_later_fields("reasoning")
        if any(not isinstance(value, str) for value in (self.metadata or {}).values()):
            raise InvalidRequestError("metadata: values must be strings", param="metadata")

    def _check_include(self) -> None:
        for name in self.include or ():
            if name != LOGPROBS:
                raise UnsupportedError(f"include: {name!r} is not supported, only {LOGPROBS!r}", param="include")
        for field in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, field) is not None and not self.includes_logprobs:
                raise InvalidRequestError(f'{field} needs include: ["{LOGPROBS}"]', param=field)

    def _check_unsupported_values(self) -> None:
        if self.background:
            raise UnsupportedError("background: true is not supported: this server keeps nothing", param="background")
        if self.truncation == "auto":
            raise UnsupportedError("truncation 'auto' is not supported: nothing is cut here", param="truncation")
        if self.tools:
            raise UnsupportedError("tools are not supported here, only in chat completions", param="tools")
        if self.tool_choice not in (None, "auto", "none"):
            raise UnsupportedError("tool_choice must be 'auto' or 'none': there are no tools here", param="tool_choice")
