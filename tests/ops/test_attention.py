"""Paged attention against a plain float64 softmax over each sequence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from neper.ops.attention import AttentionGroup, AttentionInputs, paged_attention, write_kv


def exact(q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None) -> Tensor:
    """q [Q, H, D] at positions start.. over k, v [L, KVH, D], float64."""
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1).double(), v.repeat_interleave(share, 1).double()
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(len(q)):
        position = start + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            keys, values = k[first : position + 1, head], v[first : position + 1, head]
            out[i, head] = (keys @ q[i, head].double() / math.sqrt(q.shape[2])).softmax(-1) @ values
    return out


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 64), (3, 1, 20), (2, 2, 8)])
def test_mixed_batch_is_exact(heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    k_cache = torch.zeros(400, kv_heads, dim)
    v_cache = torch.zeros(400, kv_heads, dim)
    k_cache[200:] = v_cache[200:] = math.nan  # slots that nobody owns may hold anything
    free = torch.randperm(199, generator=generator) + 1
    contexts, queries = [7, 1, 30, 12, 25], [1, 1, 1, 12, 9]
    ks, vs, slots, used = [], [], [], 0
    for length in contexts:
        ks.append(torch.randn(length, kv_heads, dim, generator=generator))
        vs.append(torch.randn(length, kv_heads, dim, generator=generator))
        slots.append(free[used : used + length])
        used += length
        write_kv(k_cache, v_cache, ks[-1], vs[-1], slots[-1])
    q = torch.randn(sum(queries), heads, dim, generator=generator)
    padded = torch.zeros(3, 30, dtype=torch.long)
    for i in range(3):
        padded[i, : contexts[i]] = slots[i]
    groups = (
        AttentionGroup(0, 3, 1, padded.view(-1), torch.tensor([[6], [0], [29]]), 30),
        AttentionGroup(3, 1, 12, slots[3], torch.arange(12)[None], 12),
        AttentionGroup(15, 1, 9, slots[4], torch.arange(16, 25)[None], 25),
    )
    got = paged_attention(q, k_cache, v_cache, AttentionInputs(torch.empty(0), groups), scale=dim**-0.5, window=window)
    row = 0
    for i, length in enumerate(queries):
        want = exact(q[row : row + length], ks[i], vs[i], contexts[i] - length, window)
        assert torch.allclose(got[row : row + length].double(), want, atol=2e-6)
        row += length
