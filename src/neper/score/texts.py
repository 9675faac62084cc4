"""Mode text: the log-likelihood of a text, its perplexity and its bits per byte."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neper.config import ScoreConfig
from neper.errors import ConfigError, ContextLengthError, InvalidRequestError, NeperError
from neper.score.mode import Field, list_fields, lists, text_of
from neper.score.passages import Passage, Scores, score_passages

if TYPE_CHECKING:
    from neper.engine.llm import LLM


@dataclass(frozen=True)
class _Text:
    passage: Passage
    num_bytes: int


class TextMode:
    """Scores the tokens of a text, each after all before it.

    The ids are BOS, where there is one (`config.bos`), and those of the text; no other special tokens are added. All
    but the first id are scored: with BOS all of the text, without it all but its first token.
    """

    def __init__(self, llm: LLM, config: ScoreConfig) -> None:
        self._llm = llm
        self._config = config
        self._context = llm.core.capabilities.max_model_len
        if config.stride is not None and config.stride >= self._context:
            raise ConfigError(f"stride must be below the context of {self._context} tokens, got {config.stride}")
        self._before = _bos(llm, config.bos)

    @staticmethod
    def columns(config: ScoreConfig) -> tuple[str, ...]:
        return (config.text_column,)

    @staticmethod
    def fields(config: ScoreConfig) -> dict[str, Field]:
        fields = {
            "logprob": Field("float64"),
            "num_tokens": Field("int64"),
            "perplexity": Field("float64"),
            "bits_per_byte": Field("float64"),
        }
        return fields if config.top is None else fields | list_fields(config.top)

    def prepare(self, values: Mapping[str, Any]) -> _Text:
        text = text_of(values, self._config.text_column)
        if not text:
            raise InvalidRequestError(f"{self._config.text_column} is empty")
        ids = self._before + self._llm.tokenizer.encode(text, add_special_tokens=False, progress=self._check_length)
        self._check_length(len(ids))
        if len(ids) < 2:
            raise InvalidRequestError("the text is a single token, with nothing before it to score it by (see bos)")
        return _Text(Passage(ids), len(text.encode()))

    def compute(self, prepared: list[_Text]) -> list[dict[str, Any] | NeperError]:
        found = score_passages(
            self._llm, [text.passage for text in prepared], top=self._config.top or 0, stride=self._config.stride
        )
        return [
            scores if isinstance(scores, NeperError) else self._columns(text, scores)
            for text, scores in zip(prepared, found, strict=True)
        ]

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self._context and self._config.stride is None:
            raise ContextLengthError(
                f"the text has {num_tokens} tokens or more, the context {self._context}; a stride scores it by windows"
            )

    def _columns(self, text: _Text, scores: Scores) -> dict[str, Any]:
        total, count = scores.total, len(scores.logprobs)
        nats = -total / count
        columns = {
            "logprob": total,
            "num_tokens": count,
            "perplexity": math.exp(nats) if nats < 700 else math.inf,
            "bits_per_byte": -total / (math.log(2) * text.num_bytes),
        }
        return columns if self._config.top is None else columns | lists(scores, self._config.top)


def _bos(llm: LLM, rule: str) -> list[int]:
    """The ids before a text."""
    tokenizer = llm.tokenizer
    if rule == "never" or (rule == "auto" and not tokenizer.adds_bos):
        return []
    token_id = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if token_id is None:
        raise ConfigError("the tokenizer has neither a BOS nor an end-of-sequence token; bos must be auto or never")
    return [token_id]
