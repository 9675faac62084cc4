"""The results of a step for the host: packed words and their layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from neper.engine.plan.scheduler import SampledRow, ScheduledChunk
from neper.engine.step.prompt_scores import PromptScoreInputs
from neper.engine.step.sampling_metadata import SamplingMetadata
from neper.types import PackedRows, packed_width

TokenRows = dict[SampledRow, PackedRows]
"""The next token of each row that got one, perhaps with its scores."""

PromptRows = dict[ScheduledChunk, PackedRows]
"""The scores of each chunk's prompt positions."""


@dataclass(frozen=True)
class Segment:
    """Consecutive packed rows with the same top_k: sampled tokens, or prompt scores of one chunk.

    Attributes:
        num_rows: packed rows.
        top_k: listed alternatives of each row; None = rows without scores.
        sampled: the rows whose tokens were sampled, one each; empty for prompt scores.
        prompt: the chunk whose prompt scores they are; None for sampled tokens.
    """

    num_rows: int
    top_k: int | None
    sampled: tuple[SampledRow, ...] = ()
    prompt: ScheduledChunk | None = None

    @property
    def num_words(self) -> int:
        return self.num_rows * packed_width(self.top_k)


@dataclass
class Packed:
    """The results of a step: packed words on the device and their layout.

    Attributes:
        words: flat int32, at least as long as the segments say; None when there are none.
        complete: what the host adds to the rows of tokens and of prompts, once all copies have arrived; None = nothing.
    """

    words: Tensor | None = None
    segments: list[Segment] = field(default_factory=list)
    complete: Callable[[TokenRows, PromptRows], None] | None = None

    @property
    def num_words(self) -> int:
        return sum(segment.num_words for segment in self.segments)

    @property
    def num_scored(self) -> int:
        """Rows that have scores."""
        return sum(segment.num_rows for segment in self.segments if segment.top_k is not None)


def token_segments(inputs: SamplingMetadata) -> Iterator[Segment]:
    """The layout of a step's next tokens."""
    runs: list[tuple[int | None, int]] = [(None, inputs.num_unscored)]
    runs += [run for view in inputs.views for run in view.listed]
    runs += inputs.scored
    start = 0
    for top_k, count in runs:
        if count:
            yield Segment(count, top_k, sampled=inputs.rows[start : start + count])
            start += count


def prompt_segments(inputs: PromptScoreInputs) -> Iterator[Segment]:
    """The layout of the scores of prompts."""
    for scored in inputs.chunks:
        yield Segment(len(scored), scored.places, prompt=scored.chunk)
