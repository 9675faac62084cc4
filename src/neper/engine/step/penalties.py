"""Which tokens each running sequence has seen: the device tables behind the penalties."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from torch import Tensor

from neper.engine import memory
from neper.engine.plan.scheduler import ScheduledChunk
from neper.engine.plan.sequence import Sequence
from neper.engine.step.inputs import to_device
from neper.ops import Penalties


class PenaltyTables:
    """Counts per slot: `output_counts` [slots, V] int32 and `in_prompt` [slots, V] bool, made at start.

    A slot's row is filled when a sequence with penalties first samples in it; from then on the sampled tokens are
    counted on the device, which alone knows them in time. Sequences without penalties never touch the tables.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._output_counts = memory.allocate(
            "penalty counts", "max_num_seqs", num_slots, vocab_size, dtype=torch.int32, device=device
        )
        self._in_prompt = memory.allocate(
            "penalty counts", "max_num_seqs", num_slots, vocab_size, dtype=torch.bool, device=device
        )
        self._owner: list[tuple[Sequence, int] | None] = [None] * num_slots

    def gather(self, rows: tuple[int, ...], chunks: Items[ScheduledChunk]) -> Penalties:
        """The penalties of a step's `rows`, whose tokens these chunks sample, in the same order."""
        device = self._output_counts.device
        for chunk in chunks:
            self._own(chunk)
        slots = self._slots(chunks)
        params = [chunk.seq.request.sampling for chunk in chunks]

        def column(values: list[float]) -> Tensor:
            return to_device(np.array(values, dtype=np.float32), device).unsqueeze(1)

        return Penalties(
            rows=to_device(np.array(rows), device),
            repetition=column([p.repetition_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
            presence=column([p.presence_penalty for p in params]),
            output_counts=self._output_counts.index_select(0, slots),
            in_prompt=self._in_prompt.index_select(0, slots),
        )

    def count(self, penalties: Penalties, chunks: Items[ScheduledChunk], token_ids: Tensor) -> None:
        """Count what a step sampled: `token_ids` [S] of all its rows, of which `penalties` names those that count."""
        slots = self._slots(chunks)
        ids = token_ids.index_select(0, penalties.rows).long()
        self._output_counts[slots, ids] += 1  # no slot is named twice

    def _slots(self, chunks: Items[ScheduledChunk]) -> Tensor:
        return to_device(np.array([chunk.slot for chunk in chunks]), self._output_counts.device)

    def _own(self, chunk: ScheduledChunk) -> None:
        """Fill the slot's row with a sequence's tokens if it is another's: when one begins there, all are known."""
        seq, slot, device = chunk.seq, chunk.slot, self._output_counts.device
        owner = (seq, chunk.num_preemptions)
        if self._owner[slot] == owner:
            return
        self._owner[slot] = owner
        self._output_counts[slot].zero_()
        self._in_prompt[slot].zero_()
        tokens = np.array(seq.token_ids, dtype=np.int64)
        prompt = to_device(tokens[: seq.num_prompt_tokens], device)
        generated = to_device(tokens[seq.num_prompt_tokens : chunk.end], device)
        self._in_prompt[slot].index_fill_(0, prompt, True)
        self._output_counts[slot].index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
