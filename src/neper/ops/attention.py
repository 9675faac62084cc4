"""Paged attention: writes K/V to cache slots and attends over them, in plain torch.

A cache tensor is `[num_slots, kv_heads, head_dim]`; a block is `block_size` consecutive slots; block 0 is the null
block: never owned, always zero, so that gathering its slots as padding can bring no NaN (0 * NaN is NaN) into a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class AttentionGroup:
    """Sequences of a step that have the same number of query tokens, attended in one call.

    Attributes:
        start: first row of the group in the step's flat token order; its rows are contiguous.
        num_seqs: G.
        query_len: Q, tokens of each sequence in this step.
        slots: [G * L] int64, cache slots of each sequence's context from position 0, the null slot (0) beyond its end.
        positions: [G, Q] int64, positions of the query tokens.
        context_len: L, the padded context length.
    """

    start: int
    num_seqs: int
    query_len: int
    slots: Tensor
    positions: Tensor
    context_len: int
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, share: int, dtype: torch.dtype) -> Tensor:
        """What is added to the scores: 0 for keys at or before a query's own position and inside the window, else -inf.

        [G, 1, share * Q, L] in `dtype` ([G, 1, 1, L] for Q = 1): the query heads that share a KV head are rows of one
        call. Made once a step, in the form that the attention kernel takes as it is: a bool mask costs each of the
        model's layers a conversion.
        """
        if window not in self._masks:
            keys = torch.arange(self.context_len, device=self.positions.device)
            queries = self.positions[:, None, :, None]
            visible = keys <= queries
            if window is not None:
                visible &= keys > queries - window
            mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
            self._masks[window] = mask.repeat(1, 1, share, 1) if self.query_len > 1 else mask
        return self._masks[window]


@dataclass(frozen=True)
class AttentionInputs:
    """Where a step's T flat tokens write their K/V and what they attend to.

    Attributes:
        slot_mapping: [T] int64, the cache slot that each token's K and V are written to.
        groups: together they cover rows 0..T in order.
    """

    slot_mapping: Tensor
    groups: tuple[AttentionGroup, ...]


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v [T, kv_heads, head_dim] to the cache slots slot_mapping [T]."""
    k_cache.index_copy_(0, slot_mapping, k)
    v_cache.index_copy_(0, slot_mapping, v)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, inputs: AttentionInputs, *, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of a step's tokens over their own sequences, whose K/V are already in the cache.

    Args:
        q: [T, heads, head_dim]; heads is a multiple of kv_heads (grouped-query attention).
        k_cache, v_cache: [num_slots, kv_heads, head_dim].
        scale: factor of the scores, usually head_dim ** -0.5.
        window: a token sees itself and the window - 1 tokens before it; None = all.

    Returns:
        [T, heads, head_dim].
    """
    out = torch.empty_like(q)
    heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[1]
    share = heads // kv_heads
    for group in inputs.groups:
        n, length = group.num_seqs, group.query_len
        end = group.start + n * length
        # The query heads that share a KV head become extra query rows, so K and V are never repeated.
        queries = q[group.start : end].view(n, length, kv_heads, share, dim).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(n, kv_heads, share * length, dim)
        keys = k_cache.index_select(0, group.slots).view(n, -1, kv_heads, dim).transpose(1, 2)
        values = v_cache.index_select(0, group.slots).view(n, -1, kv_heads, dim).transpose(1, 2)
        mask = group.mask(window, share, q.dtype)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        attended = attended.view(n, kv_heads, share, length, dim).permute(0, 3, 1, 2, 4)
        out[group.start : end] = attended.reshape(n * length, heads, dim)
    return out
