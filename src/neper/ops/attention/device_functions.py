"""Shared by the attention kernels: heads with both of their halves at hand, their norm and their rotation."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_mask(rows, columns, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """[R, WIDTH]: the rows that are there, and of their columns the first COUNT."""
    mask = rows[:, None]
    if COUNT < WIDTH:
        mask = mask & (columns < COUNT)[None, :]
    return mask


@triton.jit
def partner(columns, D: tl.constexpr):
    """The column of the other half that each column of a head is rotated with."""
    return tl.where(columns < D // 2, columns + D // 2, columns - D // 2)


@triton.jit
def angles(rotary, positions, columns, mask, D: tl.constexpr):
    """cos and sin of the columns of heads at positions [R]; [R, WIDTH], the first half of sin negated."""
    first = (columns < D // 2)[None, :]
    at = rotary + positions.to(tl.int64)[:, None] * D + tl.minimum(columns, partner(columns, D))[None, :]
    sin = tl.load(at + D // 2, mask=mask, other=0.0)
    return tl.load(at, mask=mask, other=0.0), tl.where(first, -sin, sin)


@triton.jit
def norm_weights(norm, columns, mask, D: tl.constexpr):
    """The weights of a norm for the columns, and for their partners; [R, WIDTH] float32, equal rows in one layout."""
    heads = norm + tl.zeros_like(mask).to(tl.int32)
    weight = tl.load(heads + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    return weight, tl.load(heads + partner(columns, D)[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_pairs(heads, columns, mask, D: tl.constexpr):
    """Heads [R, WIDTH] at pointers [R, 1] as float32, and the same with their halves exchanged."""
    x = tl.load(heads + columns[None, :], mask=mask, other=0.0)
    return x.to(tl.float32), tl.load(heads + partner(columns, D)[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def norm_heads(x, y, w, u, eps, D: tl.constexpr):
    """RMSNorm of heads x with weights w; y and u are the same with their halves exchanged."""
    inverse = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / D + eps)
    return x * inverse * w, y * inverse * u
