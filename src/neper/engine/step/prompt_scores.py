"""Prompt positions of a step that are scored together, whatever each lists."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from neper.engine.plan.scheduler import ScheduledChunk
from neper.engine.step.inputs import to_device
from neper.ops import TokenSets


@dataclass(frozen=True)
class ScoredChunk:
    """A chunk of which prompt positions are scored.

    Attributes:
        places: places of the list of each position.
        first_row: the row before the first of them in the step's hidden states.
    """

    places: int
    first_row: int
    chunk: ScheduledChunk

    def __len__(self) -> int:
        """The number of positions."""
        return self.chunk.score_end - self.chunk.score_start

    @property
    def rows(self) -> slice:
        """For each position the row before it in the step's hidden states."""
        return slice(self.first_row, self.first_row + len(self))

    @property
    def token_ids(self) -> list[int]:
        """The prompt tokens at those positions."""
        return self.chunk.seq.token_ids[self.chunk.score_start : self.chunk.score_end]

    @property
    def named(self) -> tuple[int, ...]:
        """The ids that each position lists in place of its best; empty = those."""
        return self.chunk.seq.request.logprobs.prompt_logprob_token_ids

    @property
    def top_k(self) -> int:
        """The number of the best ids that each position lists."""
        return 0 if self.named else self.places


@dataclass(frozen=True)
class PromptScoreInputs:
    """P prompt positions that are scored in one set of calls.

    Attributes:
        chunks: theirs, the ones with the longest lists last.
        token_ids: [P] int32, the prompt tokens at those positions.
    """

    chunks: tuple[ScoredChunk, ...]
    token_ids: Tensor

    @property
    def top_k(self) -> int:
        """The most of the best ids that a position lists."""
        return max(chunk.top_k for chunk in self.chunks)

    @property
    def listed(self) -> list[tuple[int, int]]:
        """[(places, number of positions)], runs of positions with lists of the same length."""
        runs = groupby(self.chunks, key=lambda chunk: chunk.places)
        return [(places, sum(map(len, run))) for places, run in runs]

    def parts(self) -> Iterator[tuple[ScoredChunk, slice]]:
        """Each chunk with the places of its positions among these."""
        begin = 0
        for chunk in self.chunks:
            yield chunk, slice(begin, begin + len(chunk))
            begin += len(chunk)

    def hidden(self, hidden: Tensor) -> Tensor:
        """[P, D]: the rows before these positions, of the hidden states of the whole step."""
        return torch.cat([hidden[chunk.rows] for chunk in self.chunks])

    def row_top_k(self, device: torch.device) -> Tensor | None:
        """[P] int32: how many of the best ids each position lists; None where all list `top_k`."""
        top_ks = [chunk.top_k for chunk in self.chunks]
        if len(set(top_ks)) == 1:
            return None
        return to_device(np.repeat(np.array(top_ks, dtype=np.int32), list(map(len, self.chunks))), device)

    def named(self, device: torch.device) -> TokenSets | None:
        """The ids that are named for each position; None where none are."""
        sets = [chunk.named for chunk in self.chunks]
        return TokenSets.of(sets, device, repeats=list(map(len, self.chunks))) if any(sets) else None


def scored_chunks(chunks: Items[ScheduledChunk], vocab_size: int) -> list[ScoredChunk]:
    """Those of a step's chunks that have prompt positions to score, the ones with short lists first.

    Args:
        chunks: in the order of the step's tokens.
    """
    begins = accumulate((chunk.length for chunk in chunks), initial=0)
    scored = (
        ScoredChunk(
            chunk.seq.request.num_prompt_listed(vocab_size) or 0, begin + chunk.score_start - 1 - chunk.start, chunk
        )
        for chunk, begin in zip(chunks, begins, strict=False)
        if chunk.score_end > chunk.score_start
    )
    return sorted(scored, key=lambda chunk: chunk.places)


def prompt_score_inputs(chunks: Items[ScoredChunk], token_ids: Tensor, max_listed: int) -> Iterator[PromptScoreInputs]:
    """Groups of chunks: as many as there are places for in lists as long as the longest of them.

    Args:
        token_ids: int32, the prompt tokens at all of their positions.
        max_listed: places. A chunk alone has no more.
    """
    begin = 0
    while chunks:
        count, end = 0, begin
        for chunk in chunks:
            if count and (end + len(chunk) - begin) * chunk.places > max_listed:
                break
            count, end = count + 1, end + len(chunk)
        yield PromptScoreInputs(tuple(chunks[:count]), token_ids[begin:end])
        chunks, begin = chunks[count:], end
