"""The kernels of the small operations: one program a row, float32 inside, rounded once.

At a few rows they are pure latency: what no kernel writes (weights) is loaded before the wait for the kernel ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neper.ops.common.device_functions import await_turn


@triton.jit(do_not_specialize_on_alignment=["token_ids", "last_tokens"])
def embed_kernel(
    token_ids, table, table_stride, last_tokens, out, D, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    await_turn(PDL)
    token = tl.load(token_ids + row).to(tl.int64)
    if token < 0:
        token = tl.load(last_tokens + (-1 - token)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(table + token * table_stride + column, mask=column < D)
    tl.store(out + row * D + column, x, mask=column < D)


@triton.jit
def norm_kernel(
    x, x_stride, delta, delta_stride, weight, out, D, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = x * rsqrt(mean(x^2) + eps) * weight; with ADD x += delta first, rounded and stored."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    w = tl.load(weight + column, mask=inside, other=0.0)
    await_turn(PDL)
    source = x + row * x_stride + column
    h = tl.load(source, mask=inside, other=0.0)
    if ADD:
        d = tl.load(delta + row * delta_stride + column, mask=inside, other=0.0)
        h = (h.to(tl.float32) + d.to(tl.float32)).to(h.dtype)
        tl.store(source, h, mask=inside)
    h = h.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h) / D + eps)
    tl.store(out + row * D + column, h * scale * w.to(tl.float32), mask=inside)


@triton.jit
def silu_mul_kernel(gate_up, stride, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    source = gate_up + row * stride + column
    await_turn(PDL)
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, silu(gate) * up, mask=inside)


@triton.jit
def silu(x):
    """x * sigmoid(x), of float32."""
    return x / (1.0 + tl.exp(-x))
