"""The small operations as kernels, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from neper.ops.common.variants import compile_all
from neper.ops.fused import launch
from tests.kernels.scoring import DEVICE, DTYPES, INTERPRETED, randint, randn, some

SIZES = [8, 200, 1024, 2560]


def close(got: Tensor, want: Tensor) -> None:
    """got is the float64 `want` but for one rounding to its dtype, and float32's own."""
    # The interpreter cuts bfloat16 off where compiled kernels round.
    bfloat16 = 2.0**-7 if INTERPRETED else 2.0**-8
    rounding = {torch.float32: 0.0, torch.bfloat16: bfloat16, torch.float16: 2.0**-11}[got.dtype]
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=rounding + 4e-6)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [...] float64 in `dtype`, rounded as the kernels do here."""
    if INTERPRETED and dtype == torch.bfloat16:
        return (x.float().view(torch.int32) & -65536).view(torch.float32).to(dtype)
    return x.to(dtype)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm in float64."""
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_embed(dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    table = randn(50, 200, seed=1, dtype=dtype)
    last = torch.tensor([49, 7, 0], dtype=torch.int32, device=DEVICE)
    ids = torch.tensor([3, -3, 49, -1, 0, -2], dtype=ids_dtype, device=DEVICE)
    got = launch.embed(ids, table, last)
    assert torch.equal(got, table[torch.tensor([3, 0, 49, 49, 0, 7], device=DEVICE)])
    plain = randint(50, 5, seed=2).to(ids_dtype)
    assert torch.equal(launch.embed(plain, table, None), table[plain.long()])


@pytest.mark.parametrize("size", some(SIZES, [1, 896, 4096, 16384]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype: torch.dtype, size: int) -> None:
    x, weight = randn(3, size, seed=size, dtype=dtype), randn(size, seed=7, dtype=dtype)
    close(launch.rms_norm(x, weight, 1e-6), normed(x, weight, 1e-6))
    close(launch.rms_norm(x, weight, 3.0), normed(x, weight, 3.0))


@pytest.mark.parametrize("size", some(SIZES, [896, 4096, 16384]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm(dtype: torch.dtype, size: int) -> None:
    hidden, delta, weight = (randn(3, size, seed=s, dtype=dtype) for s in range(3))
    total = rounded(hidden.double() + delta.double(), dtype)
    got = launch.add_rms_norm(hidden, delta, weight[0], 1e-5)
    assert torch.equal(hidden, total)
    close(got, normed(total, weight[0], 1e-5))


@pytest.mark.parametrize("size", some([8, 200, 1100], [600, 3072, 9728]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype, size: int) -> None:
    x = randn(3, 2 * size, seed=size, dtype=dtype, scale=20.0)
    wide = x.double()
    close(launch.silu_mul(x), wide[:, :size] / (1 + (-wide[:, :size]).exp()) * wide[:, size:])


@pytest.mark.full
def test_silu_mul_of_many_rows() -> None:
    x = randn(300, 6000, seed=1, dtype=torch.bfloat16)
    wide = x.double()
    close(launch.silu_mul(x), wide[:, :3000] / (1 + (-wide[:, :3000]).exp()) * wide[:, 3000:])


def _norm(x: Tensor) -> Tensor:
    return launch.rms_norm(x, torch.ones_like(x[0]), 1e-6)


def _add_norm(x: Tensor) -> Tensor:
    return launch.add_rms_norm(x.clone(), x, torch.ones_like(x[0]), 1e-6)


@pytest.mark.parametrize("operation", [_norm, _add_norm, launch.silu_mul])
def test_rows_stand_alone(operation: Callable[[Tensor], Tensor]) -> None:
    """A row's bits do not depend on its company, and NaN stays in its row."""
    x = randn(4, 96, seed=9, dtype=torch.bfloat16)
    whole = operation(x)
    assert torch.equal(operation(x[2:3]), whole[2:3])
    x[1, 5] = math.nan
    marred = operation(x)
    assert marred[1].isnan().any()
    assert torch.equal(marred[[0, 2, 3]], whole[[0, 2, 3]])


def test_rows_may_be_apart() -> None:
    wide = randn(3, 256, seed=4)
    x, delta = wide[:, :96], wide[:, 96:192]
    weight = randn(96, seed=5)
    assert torch.equal(launch.rms_norm(x, weight, 1e-6), launch.rms_norm(x.contiguous(), weight, 1e-6))
    assert torch.equal(launch.silu_mul(x), launch.silu_mul(x.contiguous()))
    want_sum = x.contiguous()
    want = launch.add_rms_norm(want_sum, delta.contiguous(), weight, 1e-6)
    beyond = wide[:, 96:].clone()
    assert torch.equal(launch.add_rms_norm(x, delta, weight, 1e-6), want)
    assert torch.equal(x, want_sum)
    assert torch.equal(wide[:, 96:], beyond)


def test_no_rows() -> None:
    x = torch.empty(0, 64, device=DEVICE)
    assert launch.rms_norm(x, torch.ones(64, device=DEVICE), 1e-6).shape == (0, 64)
    assert launch.silu_mul(x).shape == (0, 32)
    ids = torch.empty(0, dtype=torch.int32, device=DEVICE)
    assert launch.embed(ids, torch.ones(3, 64, device=DEVICE), None).shape == (0, 64)


def test_longer_rows_than_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        launch.rms_norm(torch.ones(1, 16385, device=DEVICE), torch.ones(16385, device=DEVICE), 1e-6)


@pytest.mark.skipif(DEVICE != "cuda", reason="the interpreter compiles nothing")
def test_warm_up_compiles_all_that_a_step_needs() -> None:
    import triton

    device = torch.device("cuda", torch.cuda.current_device())
    compile_all([launch.variants(512, 1536, torch.bfloat16, device)], device)
    compiled: list[Any] = []
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_post_compile_hook = lambda **event: compiled.append(event)
        table = torch.randn(100, 512, device=device).bfloat16()
        for rows in (1, 3, 16, 700):
            x = launch.embed(torch.full((rows,), -1, dtype=torch.int32, device=device), table, _int32(5, device))
            x = launch.rms_norm(x, table[0], 1e-6)
            x = launch.add_rms_norm(x, x.clone(), table[1], 1e-6)
            launch.silu_mul(x.repeat(1, 6))
    assert compiled == []


def _int32(value: int, device: torch.device) -> Tensor:
    return torch.full((4,), value, dtype=torch.int32, device=device)
