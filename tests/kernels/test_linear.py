"""Products of a few rows with a weight matrix, against float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neper.ops.fused.launch import silu_mul
from neper.ops.linear import launch
from neper.ops.linear.launch import Config, Dot, Gemv, scratch_for, skinny_gate_up, skinny_linear, supports
from tests.kernels.scoring import DEVICE, INTERPRETED, randn, some

# Small enough for the interpreter: several programs, steps and parts of ragged sizes.
GEMVS = [Gemv(rows=4, columns=256, warps=1), Gemv(rows=8, columns=512, warps=2)]
DOTS = [Dot(rows=64, columns=64, split=split, stages=3, warps=4, prefetch=64) for split in (1, 2, 3)]
DTYPES = [torch.bfloat16, torch.float16]


def close(got: Tensor, want: Tensor) -> None:
    """got is the float64 `want` but for one rounding to its dtype (cut off by the interpreter), and float32 sums."""
    bfloat16 = 2.0**-7 if INTERPRETED else 2.0**-8
    torch.testing.assert_close(
        got.double(), want, atol=2e-4, rtol=bfloat16 if got.dtype == torch.bfloat16 else 2.0**-10
    )


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [m, k] and a weight [n, k] whose products are of the size of 1."""
    return randn(m, k, seed=m, scale=1.0, dtype=dtype), randn(n, k, seed=n, scale=k**-0.5, dtype=dtype)


def configs(m: int) -> list[Config]:
    return [*GEMVS] if m == 1 else [*DOTS]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", some([1, 5, 64], [2, 16, 17, 32, 33]))
@pytest.mark.parametrize(("n", "k"), some([(7, 16), (130, 592)], [(64, 512), (200, 1040), (1, 256)]))
def test_product(n: int, k: int, m: int, dtype: torch.dtype) -> None:
    x, weight = operands(m, n, k, dtype)
    want = x.double() @ weight.double().T
    for config in configs(m):
        close(skinny_linear(x, weight, config=config), want)


@pytest.mark.parametrize("m", [1, 7])
def test_bias_and_a_given_result(m: int) -> None:
    x, weight = operands(m, 70, 320, torch.bfloat16)
    bias = randn(70, seed=5, dtype=torch.bfloat16)
    for config in configs(m):
        out = torch.full((m + 1, 70), 7.0, dtype=torch.bfloat16, device=DEVICE)
        got = skinny_linear(x, weight, bias, out[:m], config=config)
        assert got.data_ptr() == out.data_ptr()
        close(out[:m], x.double() @ weight.double().T + bias.double())
        assert (out[m] == 7).all()


@pytest.mark.parametrize("m", some([1, 6], [32, 64]))
@pytest.mark.parametrize(("size", "k"), some([(37, 272)], [(64, 512), (96, 1040)]))
def test_gate_up(size: int, k: int, m: int) -> None:
    x, weight = operands(m, 2 * size, k, torch.bfloat16)
    gate, up = (x.double() @ (4 * weight).double().T).chunk(2, dim=-1)
    for config in configs(m):
        close(skinny_gate_up(x, 4 * weight, config=config), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("split", [2, 3])
def test_shared_scratch_is_left_as_it_was_found(split: int) -> None:
    scratch = scratch_for(64, 192, torch.device(DEVICE))
    scratch.partials.fill_(math.nan)
    config = DOTS[split - 1]
    first = None
    for _ in range(3):
        for m, n in ((5, 130), (64, 192)):
            x, weight = operands(m, n, 592, torch.bfloat16)
            close(skinny_linear(x, weight, scratch=scratch, config=config), x.double() @ weight.double().T)
            assert not scratch.tickets.any()
        got = skinny_linear(x, weight, scratch=scratch, config=config)
        first = got if first is None else first
        assert torch.equal(got, first)


@pytest.mark.parametrize(("m", "rows"), [(16, 5), (64, 33)])
def test_bits_of_a_row_depend_on_the_bucket_alone(m: int, rows: int) -> None:
    x, weight = operands(m, 70, 320, torch.bfloat16)
    for config in configs(m):
        whole = skinny_linear(x, weight, config=config)
        assert torch.equal(skinny_linear(x[m - rows :], weight, config=config), whole[m - rows :])


def test_nan_stays_in_its_row() -> None:
    x, weight = operands(9, 70, 320, torch.bfloat16)
    others = torch.arange(9, device=DEVICE) != 1
    for config in DOTS:
        whole = skinny_linear(x, weight, config=config)
        marred = x.clone()
        marred[1, 300] = math.nan
        got = skinny_linear(marred, weight, config=config)
        assert got[1].isnan().all()
        assert torch.equal(got[others], whole[others])


def test_rows_of_x_may_be_apart() -> None:
    wide = randn(5, 512, seed=3, scale=1.0, dtype=torch.bfloat16)
    weight = randn(70, 256, seed=4, scale=0.1, dtype=torch.bfloat16)
    x = wide[:, 128:384]
    for config in (GEMVS[0], DOTS[1]):
        rows = x[3:4] if isinstance(config, Gemv) else x
        got = skinny_linear(rows, weight, config=config)
        assert torch.equal(got, skinny_linear(rows.contiguous(), weight, config=config))


def test_what_is_supported() -> None:
    x, weight = operands(3, 24, 64, torch.bfloat16)
    assert supports(x, weight)
    assert not supports(x.float(), weight.float())
    assert not supports(x.half(), weight)
    assert not supports(x[:0], weight)
    assert not supports(x.repeat(22, 1), weight)
    assert not supports(x[:, :40].contiguous(), weight[:, :40].contiguous())
    assert not supports(x[:, :48], weight[:, :48])  # the weight's rows are apart
    assert not supports(x[:, 1:49], weight[:, :48].contiguous())
    with pytest.raises(ValueError, match="no kernel multiplies"):
        skinny_linear(x.float(), weight.float())
    with pytest.raises(ValueError, match="no kernel multiplies"):
        skinny_gate_up(x.repeat(22, 1), weight)
    with pytest.raises(ValueError, match="one row"):
        skinny_linear(x, weight, config=GEMVS[0])


def test_scratch_that_is_too_small_is_refused() -> None:
    x, weight = operands(40, 130, 592, torch.bfloat16)
    with pytest.raises(ValueError, match="scratch"):
        skinny_linear(x, weight, scratch=scratch_for(4, 16, torch.device(DEVICE)), config=DOTS[2])


SHAPES = [(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728), (1024, 2048), (1024, 3072), (896, 4864), (48, 16)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 2, 5, 32, 64])
def test_candidates_fit(m: int, n: int, k: int) -> None:
    """There are some, all different, within a multiprocessor's memory, the scratch and the sizes kernels can take."""
    found = launch.candidates(m, n, k)
    assert 1 <= len(found) <= 12
    assert len(set(found)) == len(found)
    bucket = launch.bucket_of(m)
    room = scratch_for(m, n, torch.device("cpu"))
    for config in found:
        assert config.rows & (config.rows - 1) == 0
        assert config.columns & (config.columns - 1) == 0
        if isinstance(config, Gemv):
            assert m == 1
            assert config.rows >= 2
            assert config.columns % (256 * config.warps) == 0
        else:
            tiles = math.ceil(n / config.rows)
            assert config.stages * (config.rows + bucket) * config.columns * 2 <= 227 * 1024
            assert config.split == 1 or tiles * config.rows * config.split * bucket <= room.partials.numel()
            assert config.split == 1 or tiles <= room.tickets.numel()
            assert config.split <= math.ceil(k / config.columns)


def test_the_choice_is_what_was_tuned_else_the_first_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.choose(1, 700, 320) == launch.candidates(1, 700, 320)[0]
    assert launch.choose(2, 700, 320) is None
    tuned = {(70, 320, False, 1): GEMVS[1], (70, 320, False, 16): DOTS[2], (70, 320, False, 32): None}
    monkeypatch.setattr(launch, "TUNED", tuned)
    assert launch.choose(1, 70, 320) == GEMVS[1]
    assert launch.choose(1, 70, 320, gated=True) == launch.candidates(1, 70, 320)[0] != GEMVS[1]
    for m in (2, 16):
        assert launch.choose(m, 70, 320) == DOTS[2]
    for m in (17, 64):
        assert launch.choose(m, 70, 320) is None


def test_own_choice_of_a_call() -> None:
    x, weight = operands(1, 96, 272, torch.bfloat16)
    close(skinny_linear(x, weight), x.double() @ weight.double().T)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    close(skinny_gate_up(x, weight), gate / (1 + (-gate).exp()) * up)
    x, weight = operands(8, 96, 272, torch.bfloat16)
    assert torch.equal(skinny_linear(x, weight), F.linear(x, weight))
    assert torch.equal(skinny_gate_up(x, weight), silu_mul(F.linear(x, weight)))


def test_variants_are_the_kernels_that_products_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = {(70, 320, False, 32): DOTS[0], (70, 320, True, 64): DOTS[1]}
    monkeypatch.setattr(launch, "TUNED", tuned)
    (_, weight), bias = operands(1, 70, 320, torch.bfloat16), randn(70, seed=5, dtype=torch.bfloat16)
    found = launch.variants(
        [(weight, bias, False), (weight, None, True), (weight.float(), None, False)], torch.device(DEVICE)
    )
    shapes = [launch().shape for launch in found.launches]
    assert shapes == [(1, 70), (32, 70), (1, 35), (64, 35)]


@pytest.mark.skipif(DEVICE != "cuda", reason="of compiled kernels alone: real sizes take the interpreter hours")
@pytest.mark.parametrize(("n", "k"), [(6144, 2560), (2560, 9728), (1024, 3072)])
@pytest.mark.parametrize("m", [1, 3, 8, 32, 64])
def test_every_candidate_at_real_sizes(m: int, n: int, k: int) -> None:
    x, weight = operands(m, n, k, torch.bfloat16)
    want = x.double() @ weight.double().T
    scratch = scratch_for(m, n, x.device)
    for config in launch.candidates(m, n, k):
        got = skinny_linear(x, weight, scratch=scratch, config=config)
        close(got, want)
        for _ in range(20):
            assert torch.equal(skinny_linear(x, weight, scratch=scratch, config=config), got)
        assert not scratch.tickets.any()


@pytest.mark.skipif(DEVICE != "cuda", reason="needs CUDA graphs")
@pytest.mark.parametrize("m", [1, 16])
def test_replayed_in_a_chain(m: int) -> None:
    """Kernels that start before the one ahead has ended still see all that it wrote."""
    from neper.ops.fused import reference as fused

    weights = [randn(2560, 2560, seed=s, scale=2560**-0.5, dtype=torch.bfloat16) for s in range(4)]
    norm = torch.ones(2560, dtype=torch.bfloat16, device=DEVICE)
    scratch = scratch_for(m, 2560, norm.device)
    given = randn(m, 2560, seed=9, scale=1.0, dtype=torch.bfloat16)
    split = Dot(rows=64, columns=128, split=4, stages=4, warps=4, prefetch=640)
    config = Gemv(rows=4, columns=512, warps=2) if m == 1 else split

    def chain() -> Tensor:
        hidden = given.clone()
        x = fused.rms_norm(hidden, norm, 1e-6)
        for weight in weights * 8:
            delta = skinny_linear(x, weight, scratch=scratch, config=config)
            x = fused.add_rms_norm(hidden, delta, norm, 1e-6)
        return x

    def alone() -> Tensor:
        hidden = given.clone()
        x = fused.rms_norm(hidden, norm, 1e-6)
        for weight in weights * 8:
            torch.cuda.synchronize()
            delta = skinny_linear(x, weight, scratch=scratch, config=config)
            torch.cuda.synchronize()
            x = fused.add_rms_norm(hidden, delta, norm, 1e-6)
        return x

    want = alone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(20):
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)
