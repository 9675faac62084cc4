"""What a step leaves for the host: packed words, their layout, and rows that are scored there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from neper.engine.plan.scheduler import ScheduledChunk
from neper.engine.step.host_scoring import HostRows
from neper.engine.step.sampling_metadata import SamplingMetadata
from neper.types import PackedRows, packed_width


@dataclass(frozen=True)
class Segment:
    """Consecutive packed rows with the same top_k: sampled tokens of several chunks, or prompt scores of one.

    Attributes:
        chunks: sampled tokens: the chunk of each row. Prompt scores: the one chunk that all rows belong to.
        num_rows: packed rows.
        top_k: listed alternatives of each row; None = rows without scores.
        is_prompt: prompt scores, not sampled tokens.
    """

    chunks: tuple[ScheduledChunk, ...]
    num_rows: int
    top_k: int | None
    is_prompt: bool

    @property
    def num_words(self) -> int:
        return self.num_rows * packed_width(self.top_k)


@dataclass
class Packed:
    """What a step leaves: packed words on the device and their layout, and what is scored on the host.

    Attributes:
        words: flat int32, at least as long as the segments say; None when there are none.
        host_rows: logits of sampled tokens that the host scores.
        prompt: prompt scores that the host has made already.
    """

    words: Tensor | None = None
    segments: list[Segment] = field(default_factory=list)
    host_rows: HostRows | None = None
    prompt: dict[ScheduledChunk, PackedRows] = field(default_factory=dict)

    @property
    def num_words(self) -> int:
        return sum(segment.num_words for segment in self.segments)

    @property
    def num_scored(self) -> int:
        """Rows that have scores, wherever those are made."""
        rows = sum(segment.num_rows for segment in self.segments if segment.top_k is not None)
        rows += sum(len(prompt) for prompt in self.prompt.values())
        return rows + (len(self.host_rows.chunks) if self.host_rows is not None else 0)


def token_segments(inputs: SamplingMetadata, *, scored: bool) -> Iterator[Segment]:
    """The layout of a step's next tokens; where `scored` is False only rows with a way of their own have scores."""
    runs: list[tuple[int | None, int]] = [(None, inputs.num_unscored)]
    runs += [run for view in inputs.views for run in view.listed]
    runs += inputs.scored if scored else [(None, inputs.num_scored)]
    start = 0
    for top_k, count in runs:
        if count:
            yield Segment(inputs.chunks[start : start + count], count, top_k, False)
            start += count


def host_rows(inputs: SamplingMetadata, logits: Tensor) -> HostRows | None:
    """The rows of `logits`, one a row of `inputs`, that are to be scored; None when nobody asked."""
    if not inputs.scored:
        return None
    top_k = tuple(top_k for top_k, count in inputs.scored for _ in range(count))
    begin, end = inputs.num_plain, len(inputs.chunks)
    return HostRows(logits[begin:end], inputs.chunks[begin:end], top_k)
