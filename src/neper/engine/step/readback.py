"""Brings a step's results to the host: the one place where device memory is read.

The runner packs everything into one int32 tensor (layout: neper.types.PackedRows), so a step costs one copy. It is
started on a stream of its own when the step is launched, and waited for when its results are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from neper.engine import memory
from neper.engine.plan.scheduler import ScheduledChunk, StepPlan
from neper.engine.step.packed import Packed, PromptRows, Segment, TokenRows
from neper.types import PackedRows, packed_width


@dataclass(frozen=True)
class StepOutput:
    """A launched step: flat int32 words [n] on their way to the host, and their layout, known there already.

    Attributes:
        complete: see `Packed`.
        arrived: set when the copies are done; None where there is nothing to wait for.
    """

    plan: StepPlan
    segments: tuple[Segment, ...]
    words: Tensor | None
    complete: Callable[[TokenRows, PromptRows], None] | None
    arrived: torch.cuda.Event | None


@dataclass(frozen=True)
class StepResult:
    """A step's results on the host, by chunk. Chunks that yielded nothing are absent.

    Attributes:
        tokens: the rows of a chunk in order: more than one where it has drafts, of which some may not be accepted.
    """

    plan: StepPlan
    tokens: dict[ScheduledChunk, PackedRows]
    prompt: PromptRows


@dataclass
class Counters:
    """What has crossed to the host since start; none of it on a CPU. See EngineStats."""

    d2h_copies: int = 0
    d2h_bytes: int = 0
    d2h_waits: int = 0
    scored_rows: int = 0


class Readback:
    """Starts and awaits the copies of a step, and counts them.

    Args:
        max_words: most packed words of a step.
    """

    def __init__(self, device: torch.device, *, max_words: int) -> None:
        self.counters = Counters()
        self._device = device
        self._turn = 0
        # Two of each: a step's results are still being read when the next one's are on their way.
        self._words: list[Tensor] = []
        self._started: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(2):
                self._words.append(
                    memory.allocate(
                        "results on the host", "max_logprobs or max_num_batched_tokens", max_words, dtype=torch.int32,
                        pinned=True,
                    )
                )  # fmt: skip

    def start(self, plan: StepPlan, packed: Packed) -> StepOutput:
        """Start the copies of what a step has packed: see `hold`."""
        segments, words = tuple(packed.segments), packed.words
        self.counters.scored_rows += packed.num_scored
        if words is None or not segments:
            return StepOutput(plan, segments, None, packed.complete, None)
        words = words[: packed.num_words]
        if self._stream is None:
            return StepOutput(plan, segments, words.clone(), packed.complete, None)
        self._turn = 1 - self._turn
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            words = self.copy(words, self._words[self._turn])
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        self._started = arrived
        return StepOutput(plan, segments, words, packed.complete, arrived)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched inside comes after all that was launched so far, and runs beside what is launched later.

        It is done when the copies that `start` starts next are.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def hold(self) -> None:
        """Have the device wait for the started copies: what it does from here on may overwrite what they read."""
        if self._started is not None:
            torch.cuda.current_stream(self._device).wait_event(self._started)
            self._started = None

    def read(self, output: StepOutput) -> StepResult:
        """Wait for a step's copies and cut them by chunk."""
        if output.arrived is not None:
            output.arrived.synchronize()
            self.counters.d2h_waits += 1
        rows: TokenRows = {}
        prompt: PromptRows = {}
        if output.words is not None:
            data = output.words.numpy().tobytes()
            begin = 0
            for segment in output.segments:
                end = begin + 4 * segment.num_words
                if segment.prompt is not None:
                    prompt[segment.prompt] = PackedRows(segment.top_k, data[begin:end])
                else:
                    row_bytes = 4 * packed_width(segment.top_k)
                    for i, row in enumerate(segment.sampled):
                        first = begin + i * row_bytes
                        rows[row] = PackedRows(segment.top_k, data[first : first + row_bytes])
                begin = end
        if output.complete is not None:
            output.complete(rows, prompt)
        return StepResult(output.plan, dict(_by_chunk(output.plan, rows)), prompt)

    def fetch(self, source: Tensor, target: Tensor) -> Tensor:
        """Copy to the first rows of a host buffer, and wait for it; returns them."""
        copied = self.copy(source, target)
        torch.cuda.current_stream(self._device).synchronize()
        self.counters.d2h_waits += 1
        return copied

    def copy(self, source: Tensor, target: Tensor) -> Tensor:
        """Start a copy to the first rows of a host buffer, on the current stream; returns them."""
        target = target[: len(source)]
        target.copy_(source, non_blocking=True)
        self.counters.d2h_copies += 1
        self.counters.d2h_bytes += source.nbytes
        return target


def _by_chunk(plan: StepPlan, rows: TokenRows) -> Iterator[tuple[ScheduledChunk, PackedRows]]:
    for chunk in plan.chunks:
        if not chunk.samples:
            continue
        first, *others = (rows[row] for row in chunk.rows())
        yield chunk, PackedRows(first.top_k, b"".join([first.data, *(row.data for row in others)])) if others else first
