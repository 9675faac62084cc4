"""The body of a chat request, and the messages in it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from neper.errors import InvalidRequestError, UnsupportedError
from neper.server.protocol import GenerationBody, Positive
from neper.server.strict import Strict

TopLogprobs = Annotated[int, Meta(ge=0, le=20)]


class ContentPart(Strict):
    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None

    later: ClassVar[tuple[str, ...]] = ("image_url", "input_audio", "file", "refusal")


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Any = None
    audio: Any = None
    annotations: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    reasoning_content: Any = None

    later: ClassVar[tuple[str, ...]] = (
        "refusal",
        "audio",
        "annotations",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "reasoning_content",
    )


class ChatBody(GenerationBody):
    messages: list[Message] | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | int | None = None
    top_logprobs: TopLogprobs | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Known, for later.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None

    later: ClassVar[tuple[str, ...]] = (
        *GenerationBody.later,
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "functions",
        "function_call",
        "reasoning_effort",
        "verbosity",
        "modalities",
        "audio",
        "prediction",
        "web_search_options",
    )

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise InvalidRequestError("messages must be a list of at least one message", param="messages")
        for message in self.messages:
            message.refuse_later_fields("messages")
            if message.role in ("tool", "function"):
                raise UnsupportedError(f"messages of role {message.role!r} are not supported", param="messages")
        if self.echo:
            raise UnsupportedError("echo is not supported in chat", param="echo")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError("max_tokens and max_completion_tokens differ; give one", param="max_tokens")
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
            )
        self.num_top_logprobs()

    def num_top_logprobs(self) -> int | None:
        """Alternatives per token, or None when no logprobs are wanted. The integer form N means true + N."""
        if self.logprobs is None or self.logprobs is False:
            if self.top_logprobs is not None:
                raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
            return None
        if self.logprobs is True:
            return self.top_logprobs or 0
        if not 0 <= self.logprobs <= 20:
            raise InvalidRequestError(f"logprobs must be between 0 and 20, got {self.logprobs}", param="logprobs")
        if self.top_logprobs is not None and self.top_logprobs != self.logprobs:
            raise InvalidRequestError(
                f"logprobs {self.logprobs} and top_logprobs {self.top_logprobs} differ; give one", param="top_logprobs"
            )
        return self.logprobs
