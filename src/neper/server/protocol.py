"""Request bodies: their fields, types and plain bounds, decoded strictly (true, 1.0 and "5" are no integers).

Every field may be null, which equals absent, so every default here is None and the real default is chosen where the
field is used. Fields listed as `later` are known but not implemented: anything but null is refused, never ignored.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from neper.errors import InvalidRequestError, UnsupportedError

# The API's own bounds, as OpenAI's reference gives them; the engine would take more.
Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
# Logits are divided by it in float32: far outside these bounds they would overflow.
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100.0)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
# JSON's integers have no largest. What counts something is bounded where that is known; top_k never is, and the
# engine's messages hold 64 bits.
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
TopK = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]

Body = TypeVar("Body", bound="Strict")


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object without unknown fields; `later` names the known ones that are refused unless null."""

    later: ClassVar[tuple[str, ...]] = ()

    def refuse_later_fields(self, param: str | None = None) -> None:
        for name in self.later:
            if getattr(self, name) is not None:
                raise UnsupportedError(f"{name} is not supported by this server", param=param or name)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None

    later: ClassVar[tuple[str, ...]] = ("include_obfuscation",)


class ResponseFormat(msgspec.Struct):
    """Open to other fields: those of the formats that come later."""

    type: str


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


class GenerationBody(Strict):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: NotNegative | None = None
    skip_special_tokens: bool | None = None
    logprobs_mode: str | None = None
    prompt_logprobs: NotNegative | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # These cannot change the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Known, for later.
    response_format: ResponseFormat | None = None
    structured_outputs: Any = None
    allowed_token_ids: Any = None
    logprob_token_ids: Any = None
    bad_words: Any = None

    later: ClassVar[tuple[str, ...]] = ("structured_outputs", "allowed_token_ids", "logprob_token_ids", "bad_words")

    def check(self) -> None:
        """Refuse what is known but not implemented, and fields that contradict each other."""
        self.refuse_later_fields()
        if self.store:
            raise UnsupportedError("store: true is not supported: this server keeps nothing", param="store")
        if self.response_format is not None and self.response_format.type != "text":
            raise UnsupportedError(
                f"response_format {self.response_format.type!r} is not supported, only 'text'", param="response_format"
            )
        if self.stream_options is not None:
            self.stream_options.refuse_later_fields("stream_options")
            if not self.stream:
                raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


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


class CompletionBody(GenerationBody):
    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: NotNegative | None = None
    logprobs: NotNegative | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    # Known, for later.
    suffix: Any = None

    later: ClassVar[tuple[str, ...]] = (*GenerationBody.later, "suffix")

    def check(self) -> None:
        super().check()
        if self.prompt is None:
            raise InvalidRequestError("prompt is missing", param="prompt")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise UnsupportedError("best_of is not supported unless it equals n", param="best_of")


class TokenizeBody(Strict):
    prompt: str
    add_special_tokens: bool | None = None
    model: str | None = None


class DetokenizeBody(Strict):
    tokens: list[NotNegative]
    model: str | None = None


_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_NAMED = re.compile(r"(?:unknown|missing required) field `([^`]*)`")


def decode_body(data: bytes, kind: type[Body]) -> Body:
    """The body as a `kind`; anything wrong is an InvalidRequestError that names the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


def _invalid(message: str) -> InvalidRequestError:
    """An error of ours from one of msgspec's, whose message ends in a path such as `$.messages[0].role`."""
    path = _PATH.search(message)
    named = _NAMED.search(message)
    where = path.group(1) if path else ""
    if where:
        param: str | None = re.split(r"[.\[]", where, maxsplit=1)[0]
    else:
        param = named.group(1) if named else None
    text = message[: path.start()] if path else message
    return InvalidRequestError(f"{where}: {text}" if where else text, param=param)
