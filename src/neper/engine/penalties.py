"""Which tokens each running sequence has seen: the device tables behind the penalties."""

from __future__ import annotations

import torch
from torch import Tensor

from neper.engine.sequence import Sequence
from neper.ops import Penalties


class PenaltyTables:
    """Counts per slot: `output_counts` [slots, V] int32 and `in_prompt` [slots, V] bool, made at start.

    A slot's row is filled when a sequence with penalties first samples in it, and brought up to date whenever it is
    gathered; sequences without penalties never touch the tables.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._output_counts = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((num_slots, vocab_size), dtype=torch.bool, device=device)
        self._owner: list[Sequence | None] = [None] * num_slots
        self._num_recorded = [0] * num_slots

    def gather(self, rows: tuple[int, ...], sequences: list[Sequence]) -> Penalties:
        """The penalties of a step's `rows`, which belong to `sequences` in the same order."""
        device = self._output_counts.device
        for seq in sequences:
            self._catch_up(seq)
        slots = torch.tensor([seq.slot for seq in sequences], device=device)
        params = [seq.request.sampling for seq in sequences]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

        return Penalties(
            rows=torch.tensor(rows, device=device),
            repetition=column([p.repetition_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
            presence=column([p.presence_penalty for p in params]),
            output_counts=self._output_counts.index_select(0, slots),
            in_prompt=self._in_prompt.index_select(0, slots),
        )

    def _catch_up(self, seq: Sequence) -> None:
        """Bring the slot's row to the sequence's tokens: all of them if the slot was another's, else the new ones."""
        slot = seq.slot
        device = self._output_counts.device
        if self._owner[slot] is not seq:
            self._owner[slot] = seq
            self._num_recorded[slot] = seq.num_prompt_tokens
            self._output_counts[slot].zero_()
            self._in_prompt[slot].zero_()
            self._in_prompt[slot, torch.tensor(seq.token_ids[: seq.num_prompt_tokens], device=device)] = True
        new = torch.tensor(seq.token_ids[self._num_recorded[slot] :], dtype=torch.int64, device=device)
        self._output_counts[slot].index_add_(0, new, torch.ones_like(new, dtype=torch.int32))
        self._num_recorded[slot] = seq.num_tokens
