"""The small operations of `reference` as Triton kernels: one program a row, float32 inside, rounded once.

At a few rows they are pure latency: what no kernel writes (weights) is loaded before the wait for the kernel ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from neper.ops.common import await_turn
from neper.ops.launch import Variants, launch_options

# A longer row would not fit a program's registers.
MAX_SIZE = 16384
# Columns of one program of `silu_mul`: few where rows are few, so that one row occupies many multiprocessors.
_NARROW, _WIDE = 512, 2048
_WIDE_FROM_ROWS = 256


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


def embed(token_ids: Tensor, table: Tensor, last_tokens: Tensor | None) -> Tensor:
    """See `neper.ops.fused.reference.embed`."""
    out = torch.empty(len(token_ids), table.shape[1], dtype=table.dtype, device=table.device)
    # Ids are below 0 only with last_tokens; a pointer that is never followed stands in for it.
    slots = token_ids if last_tokens is None else last_tokens
    _rows(embed_kernel, out, token_ids, table, table.stride(0), slots, out, table.shape[1])
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `neper.ops.fused.reference.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rows(norm_kernel, out, x, x.stride(0), x, x.stride(0), weight, out, x.shape[1], eps, ADD=False)
    return out


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `neper.ops.fused.reference.add_rms_norm`."""
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    strides = hidden.stride(0), delta.stride(0)
    _rows(norm_kernel, out, hidden, strides[0], delta, strides[1], weight, out, hidden.shape[1], eps, ADD=True)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `neper.ops.fused.reference.silu_mul`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = _NARROW if rows < _WIDE_FROM_ROWS else _WIDE
    if rows:
        silu_mul_kernel[(rows, triton.cdiv(size, block))](
            gate_up, gate_up.stride(0), out, size, BLOCK=block, num_warps=block // 256, **launch_options(gate_up.device)
        )
    return out


def variants(hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device) -> Variants:
    """What a model of these sizes needs."""
    x = torch.zeros(1, hidden_size, dtype=dtype, device=device)
    gate_up = torch.zeros(_WIDE_FROM_ROWS, 2 * intermediate_size, dtype=dtype, device=device)
    ids = torch.zeros(1, dtype=torch.int32, device=device)
    launches: list[Callable[[], Any]] = [
        partial(embed, ids, x, ids),
        partial(rms_norm, x, x[0], 1e-6),
        partial(add_rms_norm, x, x.clone(), x[0], 1e-6),
        partial(silu_mul, gate_up),
        partial(silu_mul, gate_up[:1]),
    ]
    return Variants((embed_kernel, norm_kernel, silu_mul_kernel), launches)


def _rows(kernel: Any, out: Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch one program for each row of `out` [T, D], with the whole row in its registers."""
    rows, size = out.shape
    if size > MAX_SIZE:
        raise ValueError(f"rows of {size} values are too long for a kernel: at most {MAX_SIZE}")
    block = triton.next_power_of_2(size)
    if rows:
        # 16 values a thread: two 16-byte loads of bfloat16.
        warps = min(16, max(1, block // 512))
        kernel[(rows,)](*arguments, BLOCK=block, num_warps=warps, **constants, **launch_options(out.device))
