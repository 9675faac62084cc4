"""Request bodies: their fields, types and plain bounds, decoded strictly (true, 1.0 and "5" are no integers).

Every field may be null, which equals absent. So every default here is None, and the real default stands where the field
is used. A field that is known but not implemented is refused by its type (`Only`), and never ignored.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from neper.errors import InvalidRequestError, UnsupportedError
from neper.server.bodies.strict import Only, RequestBody, Strict
from neper.server.bodies.structured import ResponseFormat, StructuredOutputs
from neper.types import LogprobsMode, SamplingParams

_bounds = SamplingParams.bounds()
# OpenAI's bounds; the engine would take more.
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
# JSON's integers have no largest. Counts are bounded where their limit is known.
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Alternatives = Annotated[int, Meta(ge=-1)]  # -1 = all ids
SomeIds = Annotated[list[int], Meta(min_length=1)]
# Each is encoded twice, and compared at every token.
BadWords = Annotated[list[Annotated[str, Meta(min_length=1, max_length=100)]], Meta(max_length=128)]


class TextPart(Strict):
    """A part of a message's content: a text, or the text of a refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def told(self) -> str | None:
        """The text, from the field that the part's type has for it."""
        return self.refusal if self.type == "refusal" else self.text

    def check(self, where: str, param: str, types: tuple[str, ...]) -> None:
        """Check the part; `types` are those that may stand here."""
        if self.type not in types:
            raise UnsupportedError(
                f"{where}: parts of type {self.type!r} are not supported, only {' and '.join(map(repr, types))}",
                param=param,
            )
        self.check_unsupported(param)
        name, other = ("refusal", "text") if self.type == "refusal" else ("text", "refusal")
        if getattr(self, name) is None or getattr(self, other) is not None:
            raise InvalidRequestError(f"{where}: a {self.type} part has a {name}, and no {other}", param=param)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[bool | None, Only(False)] = None


class GenerationBody(RequestBody):
    """The fields that chat and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Positive | None = None
    temperature: Annotated[float, _bounds["temperature"].of_api] | None = None
    top_p: Annotated[float, _bounds["top_p"].of_api] | None = None
    top_k: Annotated[int, _bounds["top_k"].of_api] | None = None
    min_p: Annotated[float, _bounds["min_p"].of_api] | None = None
    top_n_sigma: Annotated[float, _bounds["top_n_sigma"].of_api] | None = None
    presence_penalty: Annotated[float, _bounds["presence_penalty"].of_api] | None = None
    frequency_penalty: Annotated[float, _bounds["frequency_penalty"].of_api] | None = None
    repetition_penalty: Annotated[float, _bounds["repetition_penalty"].of_api] | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: Annotated[int, _bounds["seed"].of_api] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, _bounds["min_tokens"].of_api] | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: SomeIds | None = None
    bad_words: BadWords | None = None
    logprob_token_ids: SomeIds | None = None
    logprobs_mode: LogprobsMode | None = None
    prompt_logprobs: Alternatives | None = None
    prompt_logprobs_start: NotNegative | None = None
    prompt_logprob_token_ids: SomeIds | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Hints: the answer does not depend on them, so they have no effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Annotated[bool | None, Only(False)] = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    client_metadata: Any = None
    cache_control: Any = None
    # Other servers'.
    priority: Annotated[Any, Only(0)] = None
    spaces_between_special_tokens: Annotated[Any, Only(True)] = None
    use_beam_search: Annotated[Any, Only(False)] = None
    length_penalty: Annotated[Any, Only(1)] = None
    early_stopping: Annotated[Any, Only(False)] = None
    typical_p: Annotated[Any, Only(1)] = None
    include_reasoning: Annotated[Any, Only(True)] = None

    def check(self) -> None:
        """Refuse known fields that are not implemented, and fields that contradict each other."""
        self.check_unsupported()
        if self.allowed_token_ids is not None and self.logprob_token_ids is not None:
            raise InvalidRequestError(
                "logprob_token_ids and allowed_token_ids exclude each other: allowed ids are listed anyway",
                param="logprob_token_ids",
            )
        if self.stream_options is not None:
            self.stream_options.check_unsupported("stream_options")
            if not self.stream:
                raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        given = {
            "prompt_logprobs_start": self.prompt_start > 1,
            "prompt_logprob_token_ids": self.prompt_logprob_token_ids is not None,
        }
        for name, is_given in given.items():
            if is_given and not self.scores_prompt:
                raise InvalidRequestError(
                    f"{name} needs scores of the prompt: prompt_logprobs, or echo with logprobs", param=name
                )

    @property
    def scores_prompt(self) -> bool:
        """True where scores of the prompt are asked for."""
        return self.prompt_logprobs is not None

    @property
    def prompt_start(self) -> int:
        """The first prompt position to score. The one before it, 0, has no context to be scored in."""
        return max(1, self.prompt_logprobs_start or 0)

    @property
    def constrained_by(self) -> str:
        """The field that constrains the reply, if there is one."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    @property
    def include_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage or options.continuous_usage_stats)

    @property
    def continuous_usage(self) -> bool:
        """True where every chunk of a stream has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: NotNegative | None = None
    logprobs: Alternatives | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    suffix: Annotated[str | None, Only("")] = None
    add_special_tokens: Annotated[Any, Only(True)] = None

    def check(self) -> None:
        super().check()
        if self.prompt is None:
            raise InvalidRequestError("prompt is missing", param="prompt")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise UnsupportedError("best_of is not supported unless it equals n", param="best_of")

    @property
    def scores_prompt(self) -> bool:
        return super().scores_prompt or bool(self.echo and self.logprobs is not None)
