"""Kernels for products of a few rows with a weight matrix, which take as long as reading the weights does.

`gemv_kernel` (one row) multiplies in float32 as the weights arrive in registers; `dot_kernel` (up to 64) uses matrix
instructions with the weights as their long side, and may divide K among programs. Nothing writes weights, so they can
ask for the first ones before they wait for the kernel that makes x.

A program's rows of the weight are consecutive, or with GATED alternately one of the gate half and the same of the up
half, whose results become silu(gate) * up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neper.ops.common.device_functions import await_turn
from neper.ops.fused.kernels import silu


@triton.jit
def _weight_rows(local, tile, N, BN: tl.constexpr, GATED: tl.constexpr):
    """The weight's row of each place of a program's tile, int64; places beyond the end repeat the last row."""
    if GATED:
        row = tl.minimum(tile * (BN // 2) + (local >> 1), N // 2 - 1) + (local & 1) * (N // 2)
    else:
        row = tl.minimum(tile * BN + local, N - 1)
    return row.to(tl.int64)


@triton.jit
def _prefetch(pointers):
    """Ask for the 128 bytes at each of `pointers` to be brought to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _prefetch_rows(base, first, count, K: tl.constexpr, BK: tl.constexpr):
    """Prefetch columns first .. first + count of the rows that begin at `base` [BN]."""
    line = tl.arange(0, BK // 64) * 64
    for column in range(first, first + count, BK):
        _prefetch(base[:, None] + tl.minimum(column + line, K - 1)[None, :])


@triton.jit
def _load(pointers, column, first, K: tl.constexpr, BK: tl.constexpr):
    """Load from pointers + first, 0 where column + first is beyond K."""
    if K % BK == 0:
        values = tl.load(pointers + first)
    else:
        values = tl.load(pointers + first, mask=column + first < K, other=0.0)
    return values


@triton.jit
def gemv_kernel(
    x, weight, bias, out, N,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [N] = weight [N, K] @ x [K] + bias. A program makes BN values."""
    STEPS: tl.constexpr = (K + BK - 1) // BK
    tile = tl.program_id(0)
    row = _weight_rows(tl.arange(0, BN), tile, N, BN, GATED)
    # Three dimensions from the start: columns / 8, row of the weight, and the columns that a thread loads at once. In
    # this order both sides are loaded by the threads that multiply them.
    column = tl.arange(0, BK // 8)[:, None, None] * 8 + tl.arange(0, 8)[None, None, :]
    pointers = weight + row[None, :, None] * K + column
    w = _load(pointers, column, 0, K, BK)
    await_turn(PDL)
    v = _load(x + column, column, 0, K, BK)
    total = tl.zeros([BK // 8, BN], tl.float32)
    for step in range(1, STEPS):
        next_w = _load(pointers, column, step * BK, K, BK)
        next_v = _load(x + column, column, step * BK, K, BK)
        total += tl.sum(v.to(tl.float32) * w.to(tl.float32), axis=2)
        w = next_w
        v = next_v
    total += tl.sum(v.to(tl.float32) * w.to(tl.float32), axis=2)
    _finish(tl.sum(total, axis=0)[:, None], row, tile, bias, out, 1, N, 1, BN, GATED, BIAS)


@triton.jit(do_not_specialize=["M"])
def dot_kernel(
    x, x_stride, weight, bias, out, M, N, partials, tickets,
    K: tl.constexpr, MB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    WIDE: tl.constexpr, PREFETCH: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] @ weight [N, K].T + bias, M <= MB. SPLIT programs share K for each BN columns.

    Each leaves its part in `partials`; the last of them, by the ticket of their columns, adds the parts in order.
    """
    BLOCKS: tl.constexpr = (K + BK - 1) // BK
    tile = tl.program_id(0)
    part = tl.program_id(1)
    start = part * BLOCKS // SPLIT
    end = (part + 1) * BLOCKS // SPLIT
    local = tl.arange(0, BN)
    row = _weight_rows(local, tile, N, BN, GATED)
    m = tl.arange(0, MB)
    column = tl.arange(0, BK)
    if PREFETCH > 0 and PDL:
        _prefetch_rows(weight + row * K, start * BK, tl.minimum(PREFETCH, (end - start) * BK), K, BK)
    await_turn(PDL)
    w_pointers = weight + row[:, None] * K + column[None, :]
    x_pointers = x + m[:, None] * x_stride + column[None, :]
    present = (m < M)[:, None]
    total = tl.zeros([BN, MB], tl.float32)
    for block in tl.range(start, end, num_stages=STAGES):
        first = block * BK
        if K % BK == 0:
            w = tl.load(w_pointers + first)
            v = tl.load(x_pointers + first, mask=present, other=0.0)
        else:
            inside = (first + column < K)[None, :]
            w = tl.load(w_pointers + first, mask=inside, other=0.0)
            v = tl.load(x_pointers + first, mask=present & inside, other=0.0)
        if WIDE:  # the interpreter multiplies 16-bit floats by their bit patterns
            w = w.to(tl.float32)
            v = v.to(tl.float32)
        total = tl.dot(w, tl.trans(v), total)
    if SPLIT == 1:
        _finish(total, row, tile, bias, out, M, N, MB, BN, GATED, BIAS)
    else:
        place = local[:, None] * MB + m[None, :]
        parts = partials + tile * (SPLIT * BN * MB) + place
        tl.store(parts + part * (BN * MB), total)
        tl.debug_barrier()
        if tl.atomic_add(tickets + tile, 1, sem="acq_rel") == SPLIT - 1:
            tl.debug_barrier()
            # From L2, where the other programs left them.
            total = tl.load(parts, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                total += tl.load(parts + other * (BN * MB), cache_modifier=".cg")
            _finish(total, row, tile, bias, out, M, N, MB, BN, GATED, BIAS)
            tl.store(tickets + tile, 0)


@triton.jit
def _finish(
    total, row, tile, bias, out, M, N, MB: tl.constexpr, BN: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr
):
    """Add the bias to total [BN, MB], gate it, and write it to `out`."""
    if BIAS:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, [BN // 2, 2, MB]), [0, 2, 1]))
        total = silu(gate) * up
        width = N // 2
        n = tile * (BN // 2) + tl.arange(0, BN // 2)
    else:
        width = N
        n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, MB)
    tl.store(out + m[None, :].to(tl.int64) * width + n[:, None], total, mask=(n < width)[:, None] & (m < M)[None, :])
