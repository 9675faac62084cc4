"""Mode candidates: the answers to a prompt, each scored, and their shares."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from neper.candidates import Normalize
from neper.config import ScoreConfig
from neper.errors import ConfigError, InvalidRequestError, NeperError
from neper.score.mode import Field, described, messages_of

if TYPE_CHECKING:
    from neper.engine.candidates import CandidatesRequest, ScoredCandidate
    from neper.engine.llm import LLM


class CandidatesMode:
    """Scores candidates after a prompt, as LLM.score_candidates does: a text, ids, or messages.

    The rows of a window are computed together, and each prompt once for all its candidates.
    """

    def __init__(self, llm: LLM, config: ScoreConfig) -> None:
        if config.top:
            raise ConfigError("mode candidates lists no alternatives; top must be 0, which lists the tokens")
        self._llm = llm
        self._prompt, self._candidates = self.columns(config)
        self._lists = config.top is not None
        self._normalize = cast("Normalize", config.normalize)
        self._numbers = itertools.count()

    @staticmethod
    def columns(config: ScoreConfig) -> tuple[str, ...]:
        return config.prompt_column, config.candidates_column

    @staticmethod
    def fields(config: ScoreConfig) -> dict[str, Field]:
        fields = {
            "best": Field("int64"),
            "logprobs": Field("float64", 1),
            "num_tokens": Field("int64", 1),
            "probabilities": Field("float64", 1),
        }
        lists = {"token_ids": Field("int32", 2), "token_logprobs": Field("float32", 2)}
        return fields if config.top is None else fields | lists

    def prepare(self, values: Mapping[str, Any]) -> CandidatesRequest:
        from neper.engine.candidates import cut_candidates

        prompt = values.get(self._prompt)
        is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
        tokenizer = self._llm.tokenizer
        if is_chat:
            ids = tokenizer.apply_chat_template(messages_of(values, self._prompt))
        elif isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
        elif isinstance(prompt, list) and all(type(token_id) is int for token_id in prompt):
            ids = prompt
        else:
            raise InvalidRequestError(f"{self._prompt} is {described(prompt)}, not a text, ids or messages")
        name = f"candidates-{next(self._numbers)}"
        return cut_candidates(
            self._llm.core, tokenizer, name, ids, self._candidates_of(values), special_tokens=not is_chat
        )

    def compute(self, prepared: list[CandidatesRequest]) -> list[dict[str, Any] | NeperError]:
        from neper.engine.candidates import score_candidates

        found = score_candidates(self._llm.core, self._llm.tokenizer, prepared, self._normalize)
        return [scores if isinstance(scores, NeperError) else self._columns(scores) for scores in found]

    def _candidates_of(self, values: Mapping[str, Any]) -> Any:
        """The candidates of a row: a list, or the JSON of one."""
        value = values.get(self._candidates)
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError) as error:
                raise InvalidRequestError(f"{self._candidates} is a text that is no JSON: {error}") from None
        if not isinstance(value, list):
            raise InvalidRequestError(f"{self._candidates} is {described(value)}, not a list")
        return value

    def _columns(self, scores: list[ScoredCandidate]) -> dict[str, Any]:
        columns = {
            "best": [candidate.rank for candidate in scores].index(1),
            "logprobs": [candidate.logprob for candidate in scores],
            "num_tokens": [len(candidate.token_ids) for candidate in scores],
            "probabilities": [candidate.probability for candidate in scores],
        }
        if self._lists:
            columns["token_ids"] = [np.array(candidate.token_ids, np.int32) for candidate in scores]
            columns["token_logprobs"] = [candidate.logprobs for candidate in scores]
        return columns
