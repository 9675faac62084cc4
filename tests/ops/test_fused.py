"""The small operations in plain torch, against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from neper.ops.fused import reference as fused


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_embed_takes_rows_of_the_table(dtype: torch.dtype) -> None:
    table = randn(7, 5, seed=1)
    got = fused.embed(torch.tensor([6, 0, 0, 3], dtype=dtype), table)
    assert torch.equal(got, torch.stack([table[6], table[0], table[0], table[3]]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_below_zero_name_the_slot_of_a_last_token(dtype: torch.dtype) -> None:
    table = randn(7, 5, seed=1)
    last = torch.tensor([5, 4, 1], dtype=torch.int32)
    ids = torch.tensor([-1, 2, -3, -2], dtype=dtype)
    got = fused.embed(ids, table, last)
    assert torch.equal(got, torch.stack([table[5], table[2], table[1], table[4]]))
    assert ids.tolist() == [-1, 2, -3, -2]


def test_norm_has_the_root_mean_square_in_eps() -> None:
    x, weight = randn(3, 40, seed=2), randn(40, seed=3)
    got = fused.rms_norm(x, weight, 0.5)
    wide = x.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 0.5).sqrt() * weight.double()
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-6)


def test_norm_rounds_before_the_weight_and_after() -> None:
    x, weight = randn(3, 64, seed=2, dtype=torch.bfloat16), randn(64, seed=3, dtype=torch.bfloat16)
    wide = x.double()
    normed = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).to(torch.bfloat16)
    assert torch.equal(fused.rms_norm(x, weight, 1e-6), (normed.double() * weight.double()).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_norm_adds_in_place_and_norms_the_rounded_sum(dtype: torch.dtype) -> None:
    hidden, delta, weight = (randn(*shape, seed=s, dtype=dtype) for s, shape in enumerate([(3, 48), (3, 48), (48,)]))
    want = (hidden.double() + delta.double()).to(dtype)
    before = hidden.data_ptr()
    got = fused.add_rms_norm(hidden, delta, weight, 1e-6)
    assert hidden.data_ptr() == before
    assert torch.equal(hidden, want)
    assert torch.equal(got, fused.rms_norm(want, weight, 1e-6))


def test_silu_mul_gates_with_the_first_half() -> None:
    x = randn(3, 20, seed=5) * 8
    wide = x.double()
    want = wide[:, :10] / (1 + (-wide[:, :10]).exp()) * wide[:, 10:]
    torch.testing.assert_close(fused.silu_mul(x).double(), want, atol=1e-5, rtol=1e-5)
