"""Scoring: the candidates of one prompt while the engine scores them, as the one choice of a generation."""

from __future__ import annotations

import numpy as np

from neper.engine.interface import failure
from neper.errors import EngineError, UnsupportedError
from neper.server.choice import Choice, Delta, Prompt
from neper.server.entries.score_texts import ScoreBatch
from neper.text.boundary import Boundary
from neper.text.tokenizer import Tokenizer
from neper.types import FinishReason, Float32Array, PackedRows, Request, TokenChunk


class Scoring(Choice):
    """Collects the scores of candidates. Its only delta is the one that ends it.

    Args:
        request: it has candidates; or, for an engine that takes none, it samples one token among their first ones.

    Attributes:
        boundary: the cut between prompt and candidates.
        logprobs: of each candidate's tokens, complete once it has finished.
    """

    def __init__(
        self, prompt: Prompt, request: Request, tokenizer: Tokenizer, scores: ScoreBatch, boundary: Boundary
    ) -> None:
        super().__init__(0, prompt, request, tokenizer, scores)
        self.boundary = boundary
        self.logprobs: list[Float32Array] = []
        self._found: dict[int, Float32Array] = {}

    def step(self, chunk: TokenChunk) -> Delta | None:
        """None until the last chunk. Raises the errors of `Choice.step`, and UnsupportedError for missing scores."""
        end = chunk.finish_reason
        if end is FinishReason.ERROR or end is FinishReason.ABORT:
            raise failure(chunk)
        self.num_cached_tokens = max(self.num_cached_tokens, chunk.num_cached_tokens)
        self._found |= {scores.place: scores.logprobs for scores in chunk.candidates}
        if chunk.tokens is not None:
            self._take_set(chunk.tokens)
        if end is None:
            return None
        places = range(len(self.boundary.token_ids))
        if len(self._found) != len(places):
            raise EngineError("the engine did not score all candidates")
        self.logprobs = [self._found[place] for place in places]
        self.finished = True
        return Delta(self.index, True, [], None, None, -1, end.value, None)

    def _take_set(self, rows: PackedRows) -> None:
        """The scores of candidates of one token each, of a token that was sampled among them."""
        if rows.top_k is None:
            raise UnsupportedError("candidates cannot be scored: this engine sends no logprobs", param="candidates")
        scores = dict(zip(rows.top_ids[0].tolist(), rows.top_logprobs[0].tolist(), strict=True))
        if not scores.keys() >= {token_id for [token_id] in self.boundary.token_ids}:
            raise EngineError("the engine did not score all candidates")
        for place, [token_id] in enumerate(self.boundary.token_ids):
            self._found[place] = np.array([scores[token_id]], dtype=np.float32)
