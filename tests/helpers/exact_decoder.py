"""A decoder whose logits are a hash of the whole context: the same bits in any company, so results can be held to them.

It reads its context from the KV cache, by block tables and context lengths, as attention does: a token in the wrong
slot, or of another request, gives other logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neper.models.decoder import Decoder
from neper.models.kv_cache import KVCache
from neper.models.model_config import ModelConfig
from neper.ops.attention.api import AttentionInputs

ROWS = 2**12
POISON = 7
"""A token after which all logits of its context are NaN."""


class ExactDecoder(Decoder):
    """Each context picks one of ROWS rows of random logits.

    Keys hold a token's id + 1 and its position. A hidden state holds the number of its row, whether it is poisoned, and
    for what predicts from it its position and the first id of its context.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        self.dtype = torch.float32
        self.device = torch.device("cpu")
        self.residual = None
        generator = np.random.default_rng(seed)
        self._logits = torch.from_numpy(generator.normal(0, 3, (ROWS, config.vocab_size)).astype(np.float32))
        self._factors = generator.integers(1, 2**62, config.max_position_embeddings, dtype=np.uint64)

    def prepare(self, num_positions: int) -> None:
        assert num_positions <= len(self._factors)

    def forward(
        self, token_ids: Tensor, kv_cache: KVCache, attention: AttentionInputs, last_tokens: Tensor | None = None
    ) -> Tensor:
        ids = token_ids.numpy()
        if last_tokens is not None:
            ids = np.where(ids < 0, last_tokens.numpy()[np.where(ids < 0, -1 - ids, 0)], ids)
        keys = kv_cache.layers[0][0].numpy()[:, 0]
        slots, positions = attention.slot_mapping.numpy(), attention.positions.numpy()
        keys[slots, 0], keys[slots, 1] = ids + 1, positions
        hidden = torch.zeros(len(ids), self.config.hidden_size)
        row = 0
        for group in attention.groups:
            for seq in range(group.first_seq, group.first_seq + group.num_seqs):
                rows = slice(row, row + group.query_len)
                context = _context(keys, attention, seq)
                hidden[rows, :4] = torch.from_numpy(self._states(*self._whole(context, rows))[positions[rows]])
                row = rows.stop
        if self.residual is not None:
            self.residual[: len(hidden)] = hidden
        return hidden

    def _whole(self, context: npt.NDArray[Any], rows: slice) -> tuple[npt.NDArray[Any], int]:
        """The ids + 1 and positions of a context, and how many of them come before its first token."""
        return context, 0

    def _states(self, context: npt.NDArray[Any], before: int) -> npt.NDArray[Any]:
        """[context, 4] float32: for each token the row of logits after it, whether it is NaN, its position, and the
        first id of the context.
        """
        ids, positions = context.T.astype(np.uint64)
        with np.errstate(over="ignore"):
            hashes = (ids * self._factors[positions]).cumsum(dtype=np.uint64)
        poisoned = np.maximum.accumulate(ids == POISON + 1)
        first = np.full(len(ids), ids[0] - 1 if len(ids) else 0)
        states = np.stack(((hashes >> np.uint64(40)) % np.uint64(ROWS), poisoned, positions, first), axis=1)
        return states[before:].astype(np.float32)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        logits = self._logits[hidden[:, 0].long()].masked_fill(hidden[:, 1:2] > 0, torch.nan)
        return logits if out is None else out.copy_(logits)


class ExactPredictor(ExactDecoder):
    """A prediction layer for an `ExactDecoder` that is right where it is given the hidden states of its positions.

    The first token of a context, which it never sees, comes with them.
    """

    def __init__(self, target: ExactDecoder, rows: int) -> None:
        super().__init__(replace(target.config, num_layers=1, sliding_windows=(None,)))
        self._logits, self._factors = target._logits, target._factors
        self.keep_residual(rows)

    def forward(
        self, token_ids: Tensor, kv_cache: KVCache, attention: AttentionInputs, last_tokens: Tensor | None = None
    ) -> Tensor:
        assert self.residual is not None
        # Copied: what it reads is where it writes.
        self._before = self.residual[: len(token_ids)].clone()
        self.misplaced = self._before[:, 2] != attention.positions
        hidden = super().forward(token_ids, kv_cache, attention, last_tokens)
        hidden[self.misplaced, 0] = 0
        return hidden

    def _whole(self, context: npt.NDArray[Any], rows: slice) -> tuple[npt.NDArray[Any], int]:
        first = int(self._before[rows.start, 3])
        # What it computes at a position is about the token after it.
        return np.concatenate(([[first + 1, 0]], context + np.array([0, 1]))), 1


def _context(keys: npt.NDArray[Any], attention: AttentionInputs, seq: int) -> npt.NDArray[Any]:
    """[context, 2]: the id + 1 and the position of each token of a sequence's context, as its keys say."""
    places = np.arange(int(attention.context_lens[seq]))
    table, size = attention.block_tables[seq].numpy(), attention.block_size
    return keys[table[places // size] * size + places % size, :2]
