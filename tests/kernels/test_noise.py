"""The noise of draws in the kernels: the reference's uniform, and its logarithm to float32's rounding."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from neper.ops.sampling.reference import gumbel, noise_keys, uniform_of_bits
from tests.helpers.noise import ALL, Bits, bits_of, gumbel_of, hashed, roundings, seeds_for, words_of
from tests.kernels.scoring import DEVICE, INTERPRETED
from tests.kernels.test_sampling import Row, chosen

if INTERPRETED or DEVICE == "cuda":
    import triton
    import triton.language as tl

    from neper.ops.sampling.device_functions import log_of_bits, noisy_of

    @triton.jit
    def _logs(high, low, out, N: tl.constexpr):
        at = tl.program_id(0) * N + tl.arange(0, N)
        words = tl.load(high + at).to(tl.uint32, bitcast=True), tl.load(low + at).to(tl.uint32, bitcast=True)
        tl.store(out + at, log_of_bits(words[0], words[1]))

    @triton.jit
    def _noisy(ids, first, second, out, N: tl.constexpr):
        at = tl.program_id(0) * N + tl.arange(0, N)
        x = tl.zeros([N], tl.float32)
        keys = tl.load(first).to(tl.uint32), tl.load(second).to(tl.uint32)
        tl.store(out + at, noisy_of(x, tl.load(ids + at), 0.0, 1.0, keys[0], keys[1]))


def exponentials(bits: Bits) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """The reference's u, and the kernels' -log(1 - u)."""
    high, low = (torch.from_numpy(word.view(np.int32)).to(DEVICE) for word in words_of(bits))
    out = torch.empty(len(bits), device=DEVICE)
    _logs[(len(bits) // 1024,)](high, low, out, N=1024)
    return uniform_of_bits(high, low).cpu(), -out.double().cpu().numpy()


def some_bits(count: int, seed: int) -> Bits:
    """Bits of all magnitudes, and both ends."""
    generator = np.random.default_rng(seed)
    bits = (generator.random(count) * 2.0 ** generator.uniform(0, 53, count)).astype(np.int64)
    bits[: count // 2] = generator.integers(0, ALL, count // 2)
    bits[:6] = [0, 1, ALL - 1, ALL - 2**30, ALL // 3, ALL // 2]
    return bits


def test_case_73_the_kernels_take_the_logarithm_of_the_references_uniform() -> None:
    u, exponential = exponentials(some_bits(64 * 1024, seed=1))
    exact = -np.log1p(-u.double().numpy())
    small = u.numpy() < 1 / 3
    error = np.abs(exponential - exact)
    assert small.sum() > 1000
    assert (error <= 4e-7 * exact)[small].all()
    assert (error <= 4e-7 * exact + 2.0**-23 * np.exp(exact)).all()


def test_case_73_the_chance_of_any_noise_is_gumbels_to_36_nats() -> None:
    """As in tests/ops/test_noise.py, for the kernels' logarithm."""
    levels = np.linspace(-2.5, 36, 1024)
    below, above = np.zeros(1024, dtype=np.int64), np.full(1024, ALL, dtype=np.int64)
    while (above - below > 1).any():
        middle = (below + above) // 2
        smaller = exponentials(middle)[1] < np.exp(-levels)
        below, above = np.where(smaller, middle, below), np.where(smaller, above, middle)
    exact = -np.expm1(-np.exp(-levels))
    assert (np.abs(above / ALL - exact) < 6e-7 * exact + 1 / ALL).all()


def test_case_73_noise_is_the_references() -> None:
    generator = np.random.default_rng(3)
    for _ in range(4):
        seed, position = int(generator.integers(0, 2**63)), int(generator.integers(0, 10**6))
        ids = torch.from_numpy(generator.integers(0, 2**20, 16 * 1024))
        pair = noise_keys(seed, position)
        keys = torch.tensor([pair])
        want = gumbel(keys, ids[None])[0].double().numpy()
        exact = gumbel_of(bits_of(*hashed(keys.numpy(), ids.numpy()))[0])
        out = torch.empty(len(ids), device=DEVICE)
        first, second = (torch.tensor([key], dtype=torch.int64, device=DEVICE) for key in pair)
        _noisy[(16,)](ids.int().to(DEVICE), first, second, out, N=1024)
        got: npt.NDArray[np.float64] = -np.log(-out.double().cpu().numpy())
        assert (np.abs(got - want) < roundings(exact))[exact > -2.7].all()
        assert (np.abs(got - exact) < roundings(exact))[exact > -2.7].all()


@pytest.mark.parametrize("gap", [18.0, 30.0])
def test_case_73_a_rare_id_is_drawn_where_its_noise_says_so(gap: float) -> None:
    """Noise on both sides of what the other id's noise asks for."""
    count, rare, other = (2000, 300, 7) if DEVICE == "cuda" else (12, 30, 7)
    logits = torch.full((1, 301), -math.inf)
    logits[0, rare], logits[0, other] = 1.0, 1.0 + gap
    bits = (math.exp(-gap) * ALL * np.linspace(0.05, 3, count)).astype(np.int64)
    rows = [Row(seed=seed, position=9) for seed in seeds_for(bits, rare, 9)]
    keys = np.array([row.keys for row in rows])
    others = gumbel_of(bits_of(*hashed(keys, np.array([other])))[:, 0])
    margin = gumbel_of(bits) - gap - others
    ids, valid = chosen(logits.to(DEVICE).expand(count, -1).contiguous(), rows)
    assert all(valid)
    assert (margin > 0).any()
    assert (margin < 0).any()
    for token, by in zip(ids, margin.tolist(), strict=True):
        assert abs(by) < 1e-5 or token == (rare if by > 0 else other)
