"""Products of at most 64 rows with a weight matrix, by kernels that stream the weights: which fit, and how they launch.

Such a product takes as long as reading its weights, so what counts is how many bytes are on their way at any time
(an H200 needs about 4 MB), that all programs are resident at once, and that reading starts before x is there.
It satisfies `neper.ops.linear.api.LinearOps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from neper.ops.common.launching import launch_options
from neper.ops.common.variants import Variants
from neper.ops.fused.launch import silu_mul
from neper.ops.linear import reference
from neper.ops.linear.api import LinearScratch
from neper.ops.linear.kernels import dot_kernel, gemv_kernel

MAX_ROWS = 64
# Rows of x that the kernels are compiled for. A row's bits depend on which of them its step falls into, not on more.
BUCKETS = (1, 16, 32, 64)
_MAX_SPLIT = 8
_MAX_SPLIT_COLUMNS = 65536
_MAX_TILES = 4096
# A multiprocessor's shared memory, and what each program takes of it besides its own.
_SHARED_BYTES, _PROGRAM_BYTES = 227 * 1024, 1024
# What an H200 must have on its way, and what it can fetch ahead during a small kernel.
_IN_FLIGHT_BYTES = 5 << 20
_PREFETCH_BYTES = 12 << 20


@dataclass(frozen=True)
class Gemv:
    """The division of a product by `gemv_kernel`.

    Attributes:
        rows: of the weight, for one program.
        columns: read at a time: 256 for each warp, or a multiple of that.
        warps: of one program, side by side along a row.
    """

    rows: int
    columns: int
    warps: int


@dataclass(frozen=True)
class Dot:
    """The division of a product by `dot_kernel`.

    Attributes:
        rows, columns: of the weight, that one matrix product takes.
        split: programs that share the columns of the same rows.
        stages: reads that are on their way or in use at a time.
        warps: of one program.
        prefetch: columns that are asked for before x is there.
    """

    rows: int
    columns: int
    split: int
    stages: int
    warps: int
    prefetch: int


Config = Gemv | Dot

# What was measured to be best on an H200: (N, K, gated, rows of x) → how, None = torch.
TUNED: dict[tuple[int, int, bool, int], Config | None] = {
    (6144, 2560, False, 1): Gemv(rows=4, columns=512, warps=2),
    (6144, 2560, False, 16): Dot(rows=64, columns=128, split=1, stages=4, warps=4, prefetch=0),
    (6144, 2560, False, 32): Dot(rows=64, columns=128, split=1, stages=4, warps=4, prefetch=0),
    (6144, 2560, False, 64): Dot(rows=64, columns=128, split=1, stages=4, warps=4, prefetch=0),
    (2560, 4096, False, 1): Gemv(rows=4, columns=1024, warps=4),
    (2560, 4096, False, 16): Dot(rows=64, columns=128, split=3, stages=4, warps=4, prefetch=0),
    (2560, 4096, False, 32): Dot(rows=64, columns=128, split=3, stages=4, warps=4, prefetch=0),
    (2560, 4096, False, 64): Dot(rows=64, columns=128, split=3, stages=4, warps=4, prefetch=0),
    (19456, 2560, True, 1): Gemv(rows=4, columns=512, warps=1),
    (19456, 2560, True, 16): Dot(rows=64, columns=128, split=1, stages=3, warps=4, prefetch=0),
    (19456, 2560, True, 32): Dot(rows=128, columns=64, split=1, stages=4, warps=4, prefetch=0),
    (19456, 2560, True, 64): Dot(rows=128, columns=64, split=1, stages=4, warps=4, prefetch=320),
    (2560, 9728, False, 1): Gemv(rows=4, columns=1024, warps=4),
    (2560, 9728, False, 16): Dot(rows=64, columns=128, split=5, stages=3, warps=4, prefetch=384),
    (2560, 9728, False, 32): Dot(rows=64, columns=128, split=5, stages=3, warps=4, prefetch=384),
    (2560, 9728, False, 64): Dot(rows=64, columns=128, split=3, stages=4, warps=4, prefetch=768),
    (151936, 2560, False, 1): Gemv(rows=4, columns=512, warps=1),
    (151936, 2560, False, 16): Dot(rows=64, columns=128, split=1, stages=3, warps=4, prefetch=0),
    (151936, 2560, False, 32): Dot(rows=64, columns=128, split=1, stages=3, warps=4, prefetch=0),
    (151936, 2560, False, 64): None,
    (4096, 1024, False, 1): Gemv(rows=4, columns=512, warps=2),
    (4096, 1024, False, 16): Dot(rows=64, columns=128, split=1, stages=4, warps=4, prefetch=1024),
    (4096, 1024, False, 32): Dot(rows=64, columns=128, split=1, stages=4, warps=4, prefetch=1024),
    (4096, 1024, False, 64): Dot(rows=64, columns=128, split=1, stages=4, warps=4, prefetch=0),
    (1024, 2048, False, 1): Gemv(rows=4, columns=2048, warps=4),
    (1024, 2048, False, 16): Dot(rows=64, columns=128, split=4, stages=4, warps=4, prefetch=512),
    (1024, 2048, False, 32): Dot(rows=64, columns=128, split=4, stages=4, warps=4, prefetch=512),
    (1024, 2048, False, 64): Dot(rows=64, columns=128, split=4, stages=4, warps=4, prefetch=512),
    (6144, 1024, True, 1): Gemv(rows=4, columns=512, warps=2),
    (6144, 1024, True, 16): Dot(rows=64, columns=128, split=1, stages=4, warps=4, prefetch=0),
    (6144, 1024, True, 32): Dot(rows=64, columns=128, split=1, stages=4, warps=4, prefetch=0),
    (6144, 1024, True, 64): Dot(rows=64, columns=128, split=1, stages=4, warps=4, prefetch=0),
    (1024, 3072, False, 1): Gemv(rows=4, columns=2048, warps=8),
    (1024, 3072, False, 16): Dot(rows=64, columns=128, split=6, stages=4, warps=4, prefetch=512),
    (1024, 3072, False, 32): Dot(rows=64, columns=128, split=6, stages=4, warps=4, prefetch=512),
    (1024, 3072, False, 64): Dot(rows=64, columns=128, split=6, stages=4, warps=4, prefetch=0),
    (151936, 1024, False, 1): Gemv(rows=4, columns=512, warps=2),
    (151936, 1024, False, 16): Dot(rows=64, columns=128, split=1, stages=3, warps=4, prefetch=0),
    (151936, 1024, False, 32): Dot(rows=64, columns=128, split=1, stages=3, warps=4, prefetch=0),
    (151936, 1024, False, 64): Dot(rows=64, columns=128, split=1, stages=3, warps=4, prefetch=0),
}


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    scratch: LinearScratch | None = None,
) -> Tensor:
    """See `LinearOps.linear`."""
    if scratch is not None and x.shape[0] <= MAX_ROWS:
        config = choose(x.shape[0], *weight.shape)
        if config is not None and supports(x, weight):
            return skinny_linear(x, weight, bias, out, scratch=scratch, config=config)
    return reference.linear(x, weight, bias, out=out)


def gate_up_silu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scratch: LinearScratch | None = None
) -> Tensor:
    """See `LinearOps.gate_up_silu`."""
    if scratch is not None and bias is None and x.shape[0] <= MAX_ROWS and supports(x, weight):
        return skinny_gate_up(x, weight, scratch=scratch)
    return silu_mul(linear(x, weight, bias, scratch=scratch))


def allocate_scratch(max_n: int, dtype: torch.dtype, device: torch.device) -> LinearScratch | None:
    """See `LinearOps.allocate_scratch`."""
    return scratch_for(MAX_ROWS, max_n, device) if dtype in (torch.bfloat16, torch.float16) else None


def scratch_for(max_rows: int, max_n: int, device: torch.device) -> LinearScratch:
    """Scratch for products of up to `max_rows` rows (at most 64 count) with weights of up to `max_n` rows."""
    columns = min(_MAX_SPLIT * triton.cdiv(max_n, 128) * 128, _MAX_SPLIT_COLUMNS)
    return LinearScratch(
        partials=torch.empty(bucket_of(min(max_rows, MAX_ROWS)) * columns, dtype=torch.float32, device=device),
        tickets=torch.zeros(_MAX_TILES, dtype=torch.int32, device=device),
    )


def supports(x: Tensor, weight: Tensor) -> bool:
    """True where `skinny_linear(x, weight)` can be: 1..64 rows, 16-bit floats, K a multiple of 16, aligned rows."""
    return (
        x.dim() == 2
        and weight.dim() == 2
        and 1 <= x.shape[0] <= MAX_ROWS
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] == weight.shape[1]
        and x.shape[1] % 16 == 0
        and x.stride(1) == 1
        and x.stride(0) % 16 == 0
        and weight.is_contiguous()
        and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    )


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    scratch: LinearScratch | None = None,
    config: Config | None = None,
) -> Tensor:
    """x @ weight.T + bias, summed in float32 and rounded once.

    Args:
        x: [M, K] bfloat16 or float16, M <= 64; see `supports`.
        weight: [N, K], of the same dtype.
        bias: [N], of the same dtype.
        out: [M, N] to write to, contiguous.
        scratch: for sums in parts; made for this call where absent, which costs an allocation and a kernel.
        config: how to divide the work; None = the best that is known, which may be torch.

    Returns:
        [M, N] in x's dtype. Its bits depend on the values and the bucket of M alone.

    Raises:
        ValueError: the arguments are not supported, or the scratch is too small.
    """
    _check(x, weight)
    if config is None:
        config = choose(x.shape[0], *weight.shape)
        if config is None:
            result = F.linear(x, weight, bias)
            return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    return _launch(x, weight, bias, out, scratch, config, gated=False)


def skinny_gate_up(
    x: Tensor, weight: Tensor, *, scratch: LinearScratch | None = None, config: Config | None = None
) -> Tensor:
    """silu(gate) * up of the product x @ weight.T, whose first half of columns is the gate.

    Args:
        x: [M, K] bfloat16 or float16, M <= 64; see `supports`.
        weight: [2 I, K], of the same dtype.
        scratch, config: see `skinny_linear`.

    Returns:
        [M, I] in x's dtype, rounded once.
    """
    _check(x, weight)
    if config is None:
        config = choose(x.shape[0], *weight.shape, gated=True)
        if config is None:
            return silu_mul(F.linear(x, weight))
    out = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    return _launch(x, weight, None, out, scratch, config, gated=True)


def bucket_of(rows: int) -> int:
    """The number of rows that a product of `rows` rows is compiled for."""
    return next(bucket for bucket in BUCKETS if rows <= bucket)


def choose(m: int, n: int, k: int, *, gated: bool = False) -> Config | None:
    """The way to multiply [m, k] with [n, k]; None = torch.

    It is what `TUNED` says. Shapes that are not in it: for one row the first candidate, which was better than torch in
    all ten that were measured; for more rows torch, for there it takes the right candidate.
    """
    bucket = bucket_of(m)
    if (n, k, gated, bucket) in TUNED or bucket > 1:
        return TUNED.get((n, k, gated, bucket))
    return candidates(m, n, k)[0]


def candidates(m: int, n: int, k: int, *, processors: int = 132) -> list[Config]:
    """At most 12 ways to multiply [m, k] with [n, k] that are worth measuring, the most promising first."""
    bucket = bucket_of(m)
    found: Iterable[Config] = _gemvs(n, k) if bucket == 1 else _dots(bucket, n, k, processors)
    return list(dict.fromkeys(found))[:12]


def variants(products: Iterable[tuple[Tensor, Tensor | None, bool]], device: torch.device) -> Variants:
    """See `LinearOps.variants`."""
    launches: list[Callable[[], Any]] = []
    for weight, bias, gated in products:
        for bucket in BUCKETS:
            x = torch.zeros(bucket, weight.shape[1], dtype=weight.dtype, device=device)
            if supports(x, weight) and choose(bucket, *weight.shape, gated=gated):
                # Each makes its own scratch, since they may run at once.
                launches.append(
                    partial(skinny_gate_up, x, weight) if gated else partial(skinny_linear, x, weight, bias)
                )
    return Variants((gemv_kernel, dot_kernel), launches)


def _gemvs(n: int, k: int) -> Iterator[Gemv]:
    # Each warp has one 512-byte read of each of its rows on its way, and few of its columns should be beyond K.
    warps = min(triton.next_power_of_2(triton.cdiv(_IN_FLIGHT_BYTES, n * 512)), triton.next_power_of_2(k) // 256, 8)
    enough = max(1, warps)
    half = max(1, enough // 2)
    for warps, deep in ((enough, 1), (half, 1), (half, 2), (min(8, enough * 2), 1)):
        for rows in (4, 8 // deep):
            yield Gemv(rows, 256 * warps * deep, warps)


def _dots(bucket: int, n: int, k: int, processors: int) -> list[Dot]:
    ranked: list[tuple[float, Dot]] = []
    for rows, columns, stages in ((64, 128, 3), (64, 128, 4), (128, 64, 4), (128, 64, 6), (32, 128, 4), (32, 256, 3)):
        shared = stages * (rows + bucket) * columns * 2 + _PROGRAM_BYTES
        tiles, resident = triton.cdiv(n, rows), processors * (_SHARED_BYTES // shared)
        for split in range(1, _MAX_SPLIT + 1):
            programs = tiles * split
            too_short = split > 1 and triton.cdiv(k, columns) < split * (stages - 1)
            if too_short or (split > 1 and (programs * rows > _MAX_SPLIT_COLUMNS or tiles > _MAX_TILES)):
                continue
            in_flight = min(programs, resident) * (stages - 1) * rows * columns * 2
            # In seconds: the reads, slower where few are on their way or programs run after each other, and the sum.
            waves = triton.cdiv(programs, resident) * resident / programs if programs > resident else 1.0
            reads = n * k * 2 / 4.2e12 * max(1.0, _IN_FLIGHT_BYTES / in_flight) * waves
            # x is read by each program again, from L2.
            again = programs * bucket * (k / split) * 2 / 5e12
            sums = 1e-6 + split * n * bucket * 8 / 3e12 if split > 1 else 0.0
            ahead = _prefetch(n * split, k // split, columns)
            ranked.append((max(reads, again) + sums, Dot(rows, columns, split, stages, 4, ahead)))
    ranked.sort(key=lambda pair: pair[0])
    best = [config for _, config in ranked[:10]]
    return [*best, *(Dot(c.rows, c.columns, c.split, c.stages, c.warps, 0) for c in best[:2])]


def _prefetch(n: int, columns: int, unit: int) -> int:
    """The number of `columns` to fetch ahead for each of n rows, a multiple of `unit`."""
    affordable = min(columns, _PREFETCH_BYTES // (2 * n))
    return max(0, affordable // unit * unit)


def _check(x: Tensor, weight: Tensor) -> None:
    if not supports(x, weight):
        raise ValueError(
            f"no kernel multiplies {list(x.shape)} {x.dtype} with {list(weight.shape)} {weight.dtype}: it takes 1 to"
            f" {MAX_ROWS} rows of 16-bit floats that begin at multiples of 16 bytes, and K a multiple of 16"
        )


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    scratch: LinearScratch | None,
    config: Config,
    *,
    gated: bool,
) -> Tensor:
    (m, k), n = x.shape, weight.shape[0]
    bucket = bucket_of(m)
    tiles = triton.cdiv(n, config.rows)
    constants = {
        "K": k, "BN": config.rows, "BK": config.columns, "GATED": gated, "BIAS": bias is not None,
        "num_warps": config.warps, **launch_options(x.device),
    }  # fmt: skip
    given_bias = x if bias is None else bias
    if isinstance(config, Gemv):
        if m > 1:
            raise ValueError(f"one row is multiplied without matrix instructions, not {m}")
        gemv_kernel[(tiles,)](x, weight, given_bias, out, n, **constants)
        return out
    if scratch is None:
        scratch = scratch_for(m, n, x.device)
    if config.split > 1 and (
        tiles * config.split * config.rows * bucket > scratch.partials.numel() or tiles > scratch.tickets.numel()
    ):
        raise ValueError(f"the scratch is too small for {m} rows of {n}")
    dot_kernel[(tiles, config.split)](
        x, x.stride(0), weight, given_bias, out, m, n, scratch.partials, scratch.tickets,
        MB=bucket, SPLIT=config.split, STAGES=config.stages, PREFETCH=config.prefetch, WIDE=x.device.type == "cpu",
        **constants,
    )  # fmt: skip
    return out
