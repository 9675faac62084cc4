"""Brings a step's results to the host: the one place where device memory is read.

The runner packs everything into one int32 tensor (layout: neper.types.PackedRows), so a step costs one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from neper.engine.scheduler import ScheduledChunk, StepPlan
from neper.types import PackedRows


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


@dataclass(frozen=True)
class StepOutput:
    """What the runner leaves on the device: flat int32 words [n], and their layout, known on the host."""

    plan: StepPlan
    words: Tensor | None
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class StepResult:
    """A step's results on the host, by chunk. Chunks that yielded nothing are absent."""

    plan: StepPlan
    tokens: dict[ScheduledChunk, PackedRows]
    prompt: dict[ScheduledChunk, PackedRows]


def read(output: StepOutput) -> StepResult:
    """Copy the words to the host and cut them by chunk."""
    tokens: dict[ScheduledChunk, PackedRows] = {}
    prompt: dict[ScheduledChunk, PackedRows] = {}
    if output.words is not None:
        data = output.words.cpu().numpy().tobytes()
        offset = 0
        for segment in output.segments:
            row_bytes = 4 * PackedRows(segment.top_k, b"").width
            if segment.is_prompt:
                prompt[segment.chunks[0]] = PackedRows(
                    segment.top_k, data[offset : offset + row_bytes * segment.num_rows]
                )
            else:
                for i, chunk in enumerate(segment.chunks):
                    begin = offset + i * row_bytes
                    tokens[chunk] = PackedRows(segment.top_k, data[begin : begin + row_bytes])
            offset += row_bytes * segment.num_rows
    return StepResult(output.plan, tokens, prompt)
