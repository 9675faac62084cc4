"""Passages: token ids of which the last ones are scored, by windows where they are longer than the model's context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from neper.errors import NeperError
from neper.score.isolation import isolated
from neper.types import Float32Array, Int32Array, LogprobParams, PackedRows, SamplingParams

if TYPE_CHECKING:
    from neper.engine.llm import LLM

STEPS = 32
"""Steps of the engine whose tokens are computed together. The last one of them may be small."""


class Passage(NamedTuple):
    """Token ids, of which those from `start` (1 or more) on are scored."""

    token_ids: Sequence[int]
    start: int = 1


@dataclass(frozen=True)
class Scores:
    """Scores of a passage's tokens from `start` on, n of them.

    Attributes:
        token_ids: [n] int32.
        logprobs: [n] float32, natural log.
        top_ids, top_logprobs: [n, top] int32 and float32, best first.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    top_ids: Int32Array
    top_logprobs: Float32Array

    @staticmethod
    def joined(parts: list[PackedRows]) -> Scores:
        return Scores(*(np.concatenate(arrays) for arrays in zip(*map(_arrays, parts), strict=True)))

    @property
    def total(self) -> float:
        """The logprob of all of them, summed in float64."""
        return float(self.logprobs.sum(dtype=np.float64))


def windows(passage: Passage, context: int, stride: int) -> Iterator[Passage]:
    """The passage in windows of up to `context` tokens, which begin every `stride` tokens.

    Each token is scored once, in the first window that holds it: a window scores its last `stride` tokens, the first
    one all. So a token is scored after at least context - stride others, but for those of the first window.
    """
    ids, start = passage
    begin, scored = 0, start
    while True:
        end = min(begin + context, len(ids))
        if end > scored:
            yield Passage(ids[begin:end], scored - begin)
            scored = end
        if end == len(ids):
            return
        begin += stride


def score_passages(
    llm: LLM, passages: Sequence[Passage], *, top: int, stride: int | None = None
) -> list[Scores | NeperError]:
    """The scores of each passage, or why it has none, in order.

    Long ones are computed first, so that those of a step are about as long.

    Args:
        top: alternatives per token.
        stride: of the windows of passages beyond the model's context. None: those passages fail.
    """
    context = llm.core.capabilities.max_model_len
    order = sorted(range(len(passages)), key=lambda place: -len(passages[place].token_ids))
    pieces = (
        (place, piece)
        for place in order
        for piece in ([passages[place]] if stride is None else windows(passages[place], context, stride))
    )

    def compute(batch: list[tuple[int, Passage]]) -> list[PackedRows]:
        scores = [LogprobParams(prompt_top_k=top, prompt_start=piece.start) for _, piece in batch]
        done = llm.generate([list(piece.token_ids) for _, piece in batch], SamplingParams(max_tokens=0), scores)
        return [reply.prompt_logprobs for reply in done if reply.prompt_logprobs is not None]

    parts: dict[int, list[PackedRows]] = {place: [] for place in order}
    failed: dict[int, NeperError] = {}
    for batch in _batches(pieces, STEPS * llm.core.settings.max_num_batched_tokens):
        for (place, _), result in zip(batch, isolated(compute, batch, NeperError), strict=True):
            if isinstance(result, NeperError):
                failed[place] = result
            else:
                parts[place].append(result)
    return [failed.get(place) or Scores.joined(parts[place]) for place in range(len(passages))]


def _batches(pieces: Iterable[tuple[int, Passage]], limit: int) -> Iterator[list[tuple[int, Passage]]]:
    """Consecutive pieces of up to `limit` tokens together, or a single one."""
    batch: list[tuple[int, Passage]] = []
    tokens = 0
    for place, piece in pieces:
        if batch and tokens + len(piece.token_ids) > limit:
            yield batch
            batch, tokens = [], 0
        batch.append((place, piece))
        tokens += len(piece.token_ids)
    if batch:
        yield batch


def _arrays(rows: PackedRows) -> tuple[Int32Array, Float32Array, Int32Array, Float32Array]:
    return rows.token_ids, rows.logprob, rows.top_ids, rows.top_logprobs
