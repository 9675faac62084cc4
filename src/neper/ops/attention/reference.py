"""Paged attention in plain torch: its definition, and what a CPU runs. It satisfies `neper.ops.attention.api`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neper.ops.attention.api import AttentionInputs
from neper.ops.common.variants import Variants


def attend(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    inputs: AttentionInputs,
    *,
    num_heads: int,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """See `AttentionOps.attend`."""
    kv_heads, dim = k_cache.shape[1:]
    heads = qkv.view(qkv.shape[0], num_heads + 2 * kv_heads, dim)
    qk, v = heads[:, : num_heads + kv_heads], heads[:, num_heads + kv_heads :]
    if q_norm is not None and k_norm is not None:
        parts = ((qk[:, :num_heads], q_norm), (qk[:, num_heads:], k_norm))
        qk = torch.cat([F.rms_norm(part, (dim,), None, eps) * weight for part, weight in parts], dim=1)
    cos, sin = inputs.rotation(rotary, qkv.dtype)
    qk = qk * cos + qk.roll(dim // 2, -1) * sin
    write_kv(k_cache, v_cache, qk[:, num_heads:], v, inputs.slots())
    return paged_attention(qk[:, :num_heads], k_cache, v_cache, inputs, scale=scale, window=window).flatten(1)


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write k, v [T, kv_heads, head_dim] to the cache slots [T] int64."""
    k_cache.index_copy_(0, slots, k)
    v_cache.index_copy_(0, slots, v)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, inputs: AttentionInputs, *, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of a step's queries [T, heads, head_dim], whose sequences' K/V are already in the cache.

    Returns:
        [T, heads, head_dim]. See `AttentionOps.attend` for the rest.
    """
    heads, dim = q.shape[1:]
    parts = []
    kv_heads = k_cache.shape[1]
    share = heads // kv_heads
    for group in inputs.groups:
        n, length = group.num_seqs, group.query_len
        end = group.start + n * length
        # The query heads that share a KV head become extra query rows, so K and V are never repeated.
        queries = q[group.start : end].view(n, length, kv_heads, share, dim).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(n, kv_heads, share * length, dim)
        slots = inputs.context_slots(group)
        keys = k_cache.index_select(0, slots).view(n, -1, kv_heads, dim).transpose(1, 2)
        values = v_cache.index_select(0, slots).view(n, -1, kv_heads, dim).transpose(1, 2)
        mask = inputs.mask(group, window, share, q.dtype)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        attended = attended.view(n, kv_heads, share, length, dim).permute(0, 3, 1, 2, 4)
        parts.append(attended.reshape(n * length, heads, dim))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def allocate_scratch(*_: Any, **__: Any) -> None:
    """Torch needs none."""


def variants(*_: Any, **__: Any) -> Variants:
    """Nothing is compiled."""
    return Variants((), [])
