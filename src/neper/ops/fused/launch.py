"""Launches the kernels of the small operations; they satisfy `neper.ops.fused.api.FusedOps`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from neper.ops.common.launching import launch_options
from neper.ops.common.variants import Variants
from neper.ops.fused.kernels import embed_kernel, norm_kernel, silu_mul_kernel

# A longer row would not fit a program's registers.
MAX_SIZE = 16384
# Columns of one program of `silu_mul`: few where rows are few, so that one row occupies many multiprocessors.
_NARROW, _WIDE = 512, 2048
_WIDE_FROM_ROWS = 256


def embed(token_ids: Tensor, table: Tensor, last_tokens: Tensor | None = None) -> Tensor:
    """See `FusedOps.embed`."""
    out = torch.empty(len(token_ids), table.shape[1], dtype=table.dtype, device=table.device)
    # Ids are below 0 only with last_tokens; a pointer that is never followed stands in for it.
    slots = token_ids if last_tokens is None else last_tokens
    _rows(embed_kernel, out, token_ids, table, table.stride(0), slots, out, table.shape[1])
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `FusedOps.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rows(norm_kernel, out, x, x.stride(0), x, x.stride(0), weight, out, x.shape[1], eps, ADD=False)
    return out


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `FusedOps.add_rms_norm`."""
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    strides = hidden.stride(0), delta.stride(0)
    _rows(norm_kernel, out, hidden, strides[0], delta, strides[1], weight, out, hidden.shape[1], eps, ADD=True)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `FusedOps.silu_mul`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = _NARROW if rows < _WIDE_FROM_ROWS else _WIDE
    if rows:
        silu_mul_kernel[(rows, triton.cdiv(size, block))](
            gate_up, gate_up.stride(0), out, size, BLOCK=block, num_warps=block // 256, **launch_options(gate_up.device)
        )
    return out


def variants(hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device) -> Variants:
    """See `FusedOps.variants`."""
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
