"""Drafts of the model's own prediction layer, which reads the hidden states of the model's steps."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neper.engine.draft.twin import Twin, draft, plan_of
from neper.engine.plan.scheduler import ScheduledChunk
from neper.engine.plan.sequence import Sequence
from neper.engine.step.batch import BatchInputs
from neper.engine.step.inputs import to_device
from neper.engine.step.runner import BegunStep, ModelRunner

Rows = npt.NDArray[np.int64]


class MtpDrafter:
    """Runs a prediction layer. It satisfies `neper.engine.draft.drafter.Drafter`.

    At position i the layer reads the model's hidden state there and the token at position i + 1. So a sequence's twin
    is that sequence without its first token. The layer reads each step of the model, prompts too, since its cache must
    hold all positions: of every chunk what the chunk's own tokens are enough for. The hidden states behind that are
    kept, up to those of all drafts: which of them follow accepted drafts is known when the step is read.

    The layer's cache has a place for each block of the model's. Where the model finds a block in its prefix cache, the
    layer finds what it wrote there when the block was computed. The last position of such a block was computed with the
    token that followed then, or not at all. Drafts may be worse for it, no token is another.

    Args:
        runner: of the layer.
        residual: of the model, see `Decoder.residual`; of its rows those from `num_step_rows` on are for `window`
            hidden states of each slot.
    """

    writes = True

    def __init__(
        self, runner: ModelRunner, residual: Tensor, *, num_step_rows: int, window: int, max_model_len: int
    ) -> None:
        assert runner.decoder.residual is not None
        self._runner = runner
        self._residual = residual
        self._own_residual = runner.decoder.residual
        self._num_step_rows = num_step_rows
        self._window = window
        self._max_model_len = max_model_len
        self._twins: dict[Sequence, Twin] = {}
        self._kept: dict[Sequence, int] = {}  # the position of the first hidden state that is kept

    def ready(self, seq: Sequence) -> bool:
        return True

    @torch.inference_mode()
    def observe(self, step: BegunStep) -> None:
        reads: dict[ScheduledChunk, Rows] = {}
        kept_from: list[Rows] = []
        kept_to: list[Rows] = []
        first = 0
        for chunk in step.inputs.chunks:
            twin = self._observed(chunk)
            seq, end = chunk.seq, chunk.end_of_own - 1
            if end > twin.computed:
                positions = np.arange(twin.computed, end)
                kept = self._kept_rows(chunk.slot, positions - self._kept.get(seq, chunk.start))
                part = twin.chunk(chunk.slot, twin.computed, end - twin.computed, samples=False, pending=chunk.pending)
                reads[part] = np.where(positions < chunk.start, kept, first + positions - chunk.start)
            left = np.arange(chunk.end - end)
            kept_from.append(first + end - chunk.start + left)
            kept_to.append(self._kept_rows(chunk.slot, left))
            twin.computed = self._kept[seq] = end
            first += chunk.length
        if reads:
            self._runner.begin(plan_of(reads), lambda inputs: self._give(inputs, self._residual, reads))
        with self._runner.on_device():
            hidden = _rows(self._residual, np.concatenate(kept_from))
            self._residual.index_copy_(0, to_device(np.concatenate(kept_to), self._residual.device), hidden)

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Items[int]]:
        twins = {}
        for seq in wanted:
            twin = self._twins.get(seq)
            if twin is not None and twin.num_preemptions == seq.num_preemptions:
                twin.follow(seq)
                twin.computed = self._kept[seq]
                twins[seq] = twin
        firsts = {twin.seq: self._kept_rows(seq.slot, np.arange(twin.backlog)) for seq, twin in twins.items()}
        before: list[BatchInputs] = []

        def fill(depth: int, inputs: BatchInputs) -> None:
            if depth == 0:
                self._give(inputs, self._residual, {chunk: firsts[chunk.seq] for chunk in inputs.chunks})
            else:
                self._give(inputs, self._own_residual, _last_rows(inputs, before[-1]))
            before.append(inputs)

        return draft(self._runner, twins, {seq: wanted[seq] for seq in twins}, fill)

    def accepted(self, seq: Sequence, num_accepted: int) -> None:
        """The sequence's tokens say the same."""

    def forget(self, seq: Sequence) -> None:
        self._twins.pop(seq, None)
        self._kept.pop(seq, None)

    def _observed(self, chunk: ScheduledChunk) -> Twin:
        """The twin of a chunk's sequence; a new one begins with the chunk, since nothing is kept of what is before."""
        seq = chunk.seq
        twin = self._twins.get(seq)
        if twin is None or twin.num_preemptions != chunk.num_preemptions:
            twin = self._twins[seq] = Twin(seq, self._max_model_len, first=1)
            twin.computed = self._kept[seq] = chunk.start
        twin.follow(seq)
        return twin

    def _kept_rows(self, slot: int, places: Rows) -> Rows:
        """The rows of kept hidden states of a slot."""
        return self._num_step_rows + slot * self._window + places

    def _give(self, inputs: BatchInputs, source: Tensor, rows: Mapping[ScheduledChunk, Rows]) -> None:
        """Copy rows of hidden states to where the layer reads those of a step's tokens."""
        given = _rows(source, np.concatenate([rows[chunk] for chunk in inputs.chunks]))
        self._own_residual[: len(given)] = given


def _rows(source: Tensor, rows: Rows) -> Tensor:
    return source.index_select(0, to_device(rows, source.device))


def _last_rows(inputs: BatchInputs, before: BatchInputs) -> dict[ScheduledChunk, Rows]:
    """For each chunk of a step the last row of its sequence in the step before."""
    ends = np.cumsum([chunk.length for chunk in before.chunks])
    last = {chunk.seq: end - 1 for chunk, end in zip(before.chunks, ends, strict=True)}
    return {chunk: np.array([last[chunk.seq]]) for chunk in inputs.chunks}
