"""The noise of draws: its distribution over all of its bits, and draws far below the best id."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from neper.ops import DrawInputs, noise_keys, sample
from neper.ops.sampling.reference import gumbel, gumbel_of_bits
from tests.helpers.noise import ALL, Bits, bits_of, gumbel_of, hashed, roundings, seeds_for, words_of


def noise_of(bits: Bits) -> np.ndarray:  # type: ignore[type-arg]
    high, low = (torch.from_numpy(word.view(np.int32)) for word in words_of(bits))
    return gumbel_of_bits(high, low).double().numpy()


def test_case_73_the_chance_of_any_noise_is_gumbels_to_36_nats() -> None:
    """Noise falls with the bits, so its distribution is where it crosses a value: found by bisection over all bits."""
    levels = np.concatenate([np.linspace(-2.5, 1, 50), np.linspace(1, 36, 200)])
    below = np.zeros(len(levels), dtype=np.int64)  # bits with noise above the level
    above = np.full(len(levels), ALL, dtype=np.int64)
    while (above - below > 1).any():
        middle = (below + above) // 2
        larger = noise_of(middle) > levels
        below, above = np.where(larger, middle, below), np.where(larger, above, middle)
    share = above / ALL
    exact = -np.expm1(-np.exp(-levels))
    # A float32 near 36 is a multiple of 3.8e-6. At 30 nats a unit of the bits is 0.1 % of the chance.
    assert (np.abs(share - exact) < 5e-6 * exact + 1 / ALL).all()
    smaller = np.exp(-np.exp(-levels[:50]))  # the chance of less noise: u near 1 is a multiple of 2^-24
    assert (np.abs((ALL - above[:50]) / ALL - smaller) < 2.0**-23 + 1e-6 * smaller).all()


def test_case_73_noise_falls_with_its_bits() -> None:
    generator = np.random.default_rng(1)
    bits = np.sort((generator.random(100_000) * 2.0 ** generator.uniform(0, 53, 100_000)).astype(np.int64))
    noise = noise_of(bits)
    assert np.isfinite(noise).all()
    assert (noise[:-1] - noise[1:] >= -np.spacing(np.abs(noise[1:]).astype(np.float32))).all()


def test_case_73_noise_is_finite_at_both_ends() -> None:
    ends = np.array([0, 1, ALL - 1, ALL // 2])
    assert noise_of(ends) == pytest.approx([54 * math.log(2), math.log(2**54 / 3), -2.8116, 0.36651], rel=1e-4)


def test_case_73_noise_is_that_of_float64() -> None:
    """For random seeds, positions and ids; the hash is written out once more, and runs backwards."""
    generator = np.random.default_rng(2)
    for _ in range(20):
        seed, position = int(generator.integers(0, 2**63)), int(generator.integers(0, 10**6))
        ids = generator.integers(0, 2**20, 2000)
        keys = np.array([noise_keys(seed, position)])
        got = gumbel(torch.from_numpy(keys), torch.from_numpy(ids)[None]).double().numpy()
        want = gumbel_of(bits_of(*hashed(keys, ids)))
        assert (np.abs(got - want) < roundings(want))[want > -2.7].all()
    bits = generator.integers(0, ALL, 1000)
    for token_id, position in ((0, 0), (7, 3), (151_935, 40_000)):
        keys = np.array([noise_keys(seed, position) for seed in seeds_for(bits, token_id, position)])
        assert (bits_of(*hashed(keys, np.array([token_id])))[:, 0] == bits).all()


@pytest.mark.parametrize(
    ("gap", "filtered"),
    [
        (1.0, False),
        (12.0, False),
        (17.0, False),
        (19.0, True),
        (25.0, False),
        (30.0, False),
        (30.0, True),
        (35.0, False),
    ],
)
def test_case_73_a_rare_id_is_drawn_as_often_as_it_should(gap: float, filtered: bool) -> None:
    """Seeds are taken where the rare id has much noise: a share of all seeds that is known."""
    count, position = 10_000, 5
    share = min(1.0, 12 * math.exp(-gap))  # beyond it the other id would need a noise of less than -log 12
    bits = ((np.arange(count) + 0.5) / count * share * ALL).astype(np.int64)
    rare, other = 3, 1
    row = torch.full((5,), -math.inf)
    row[other], row[rare] = 2.0, 2.0 - gap
    draws = DrawInputs(
        rows=torch.arange(count),
        temperature=torch.ones(count),
        top_k=torch.full((count,), 4 if filtered else 5),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        top_n_sigma=torch.zeros(count),
        keys=torch.tensor([noise_keys(seed, position) for seed in seeds_for(bits, rare, position)]),
        filtered=filtered,
    )
    ids, _ = sample(row.expand(count, -1), draws=draws)
    drawn = int((ids == rare).sum())
    assert drawn + int((ids == other).sum()) == count
    expected = count / share * math.exp(-gap) / (1 + math.exp(-gap))
    assert abs(drawn - expected) < 4 * math.sqrt(expected) + 0.002 * expected, (drawn, expected)
