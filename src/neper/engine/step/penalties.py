"""Which tokens each running sequence has seen: the device tables behind the penalties."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from neper.engine import memory
from neper.engine.plan.scheduler import SampledRow, ScheduledChunk
from neper.engine.plan.sequence import Sequence
from neper.engine.step.inputs import to_device
from neper.ops import Penalties


class PenaltyTables:
    """Counts per slot: `output_counts` [slots, V] int32 and `in_prompt` [slots, V] bool, made at start.

    A slot's row is filled when a sequence with penalties first samples in it; from then on the sampled tokens are
    counted on the device, which alone knows them in time. After drafts the host knows more than the device: it counts
    what was accepted when the sequence samples again. Sequences without penalties never touch the tables.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._output_counts = memory.allocate(
            "penalty counts", "max_num_seqs", num_slots, vocab_size, dtype=torch.int32, device=device
        )
        self._in_prompt = memory.allocate(
            "penalty counts", "max_num_seqs", num_slots, vocab_size, dtype=torch.bool, device=device
        )
        self._owner: list[tuple[Sequence, int] | None] = [None] * num_slots
        self._counted = [0] * num_slots  # leading tokens of the owner that its row counts

    def gather(self, places: tuple[int, ...], rows: Items[SampledRow]) -> Penalties:
        """The penalties of the rows at these places of a step."""
        device = self._output_counts.device
        for row in rows:
            self._own(row.chunk)
        slots = self._slots(rows)
        params = [row.seq.request.sampling for row in rows]
        output_counts = self._output_counts.index_select(0, slots)
        drafted = [(number, token_id) for number, row in enumerate(rows) for token_id in row.drafts]
        if drafted:
            numbers, ids = to_device(np.array(drafted), device).unbind(1)
            output_counts.index_put_((numbers, ids), torch.ones_like(ids, dtype=torch.int32), accumulate=True)

        def column(values: list[float]) -> Tensor:
            return to_device(np.array(values, dtype=np.float32), device).unsqueeze(1)

        return Penalties(
            rows=to_device(np.array(places), device),
            repetition=column([p.repetition_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
            presence=column([p.presence_penalty for p in params]),
            output_counts=output_counts,
            in_prompt=self._in_prompt.index_select(0, slots),
        )

    def count(self, penalties: Penalties, rows: Items[SampledRow], token_ids: Tensor) -> None:
        """Count what a step sampled: `token_ids` [S] of all its rows, of which `penalties` names those that count.

        Tokens of chunks with drafts are left for later: some of them will not be accepted.
        """
        ids = token_ids.index_select(0, penalties.rows).long()
        sure = [number for number, row in enumerate(rows) if not row.chunk.drafts]
        if len(sure) < len(rows):
            rows = [rows[number] for number in sure]
            ids = ids[sure]
        self._output_counts[self._slots(rows), ids] += 1  # no slot is named twice
        for row in rows:
            self._counted[row.chunk.slot] += 1

    def _slots(self, rows: Items[SampledRow]) -> Tensor:
        return to_device(np.array([row.chunk.slot for row in rows], dtype=np.int64), self._output_counts.device)

    def _own(self, chunk: ScheduledChunk) -> None:
        """Have the slot's row count all of a sequence's tokens; those that it does not count yet are known."""
        seq, slot, device = chunk.seq, chunk.slot, self._output_counts.device
        owner = (seq, chunk.num_preemptions)
        if self._owner[slot] != owner:
            self._owner[slot] = owner
            self._counted[slot] = seq.num_prompt_tokens
            self._output_counts[slot].zero_()
            self._in_prompt[slot].zero_()
            prompt = to_device(np.array(seq.token_ids[: seq.num_prompt_tokens], dtype=np.int64), device)
            self._in_prompt[slot].index_fill_(0, prompt, True)
        if self._counted[slot] < chunk.end_of_own:
            tokens = np.array(seq.token_ids[self._counted[slot] : chunk.end_of_own], dtype=np.int64)
            generated = to_device(tokens, device)
            self._output_counts[slot].index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
            self._counted[slot] = chunk.end_of_own
