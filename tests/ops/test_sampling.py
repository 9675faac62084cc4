"""Sampling: filters against plain-Python definitions, the draw against the distribution it should follow."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from neper.ops import Bias, DrawInputs, Penalties, noise_keys, sample
from neper.ops.sampling.reference import edit_logits, gumbel, processed_logits
from neper.ops.token_logprobs import token_logprobs


def draws(
    count: int,
    vocab: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_n_sigma: float = 0.0,
    seeds: list[int] | None = None,
    position: int = 0,
) -> DrawInputs:
    seeds = list(range(count)) if seeds is None else seeds
    return DrawInputs(
        rows=torch.arange(count),
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k or vocab),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
        top_n_sigma=torch.full((count,), top_n_sigma),
        keys=torch.tensor([noise_keys(seed, position) for seed in seeds]),
        filtered=top_k is not None or top_p < 1.0 or min_p > 0.0 or top_n_sigma > 0.0,
    )


def kept(row: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """The distribution that should be drawn from: {id: probability}, by the definitions, in float64."""
    x = (row / temperature).double()
    probability = x.softmax(-1).tolist()
    ids = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))[:top_k]
    mass = sum(probability[i] for i in ids)
    chosen, before = [], 0.0
    for i in ids:
        if before < top_p * mass and probability[i] >= min_p * probability[ids[0]]:
            chosen.append(i)
        before += probability[i]
    total = sum(probability[i] for i in chosen)
    return {i: probability[i] / total for i in chosen}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.3, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (0.8, 12, 0.7, 0.05),
    ],
)
def test_draws_follow_the_filtered_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    vocab, count = 40, 20_000
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 2
    want = kept(row, temperature=temperature, top_k=top_k or vocab, top_p=top_p, min_p=min_p)
    inputs = draws(count, vocab, temperature=temperature, top_k=top_k or None, top_p=top_p, min_p=min_p)
    ids, valid = sample(row.expand(count, -1), draws=inputs)
    assert valid.all()
    counts = np.bincount(ids.numpy(), minlength=vocab)
    assert {i for i in range(vocab) if counts[i]} <= set(want)
    for i, p in want.items():
        assert abs(counts[i] / count - p) < 5 * math.sqrt(p * (1 - p) / count) + 1e-4, (i, p, counts[i] / count)


def test_a_flat_distribution_reaches_beyond_the_first_candidates() -> None:
    vocab = 3000
    ids, _ = sample(torch.zeros(200, vocab), draws=draws(200, vocab, top_p=0.95))
    assert ids.max() < math.ceil(0.95 * vocab)  # equal logits are kept in id order
    assert (ids > 1024).float().mean() > 0.5


def test_a_draw_does_not_depend_on_company_or_on_filters_that_keep_everything() -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(2))
    together, _ = sample(logits, draws=draws(6, 5000, seeds=[9, 8, 7, 6, 5, 4], position=3))
    for r in range(6):
        alone, _ = sample(logits[r : r + 1], draws=draws(1, 5000, seeds=[9 - r], position=3))
        assert alone.item() == together[r].item()
        filtered, _ = sample(logits[r : r + 1], draws=draws(1, 5000, seeds=[9 - r], position=3, min_p=1e-30))
        assert filtered.item() == together[r].item()


@pytest.mark.parametrize(("offset", "temperature"), [(1e7, 1.0), (100.0, 1.1e-5), (-3e38, 1.0)])
@pytest.mark.parametrize(("top_p", "min_p"), [(1.0, 0.0), (0.9, 0.0), (1.0, 1e-9)])
def test_neither_offset_nor_low_temperature_changes_the_distribution(
    offset: float, temperature: float, top_p: float, min_p: float
) -> None:
    count = 20_000
    step = float(np.spacing(np.float32(abs(offset)))) if temperature < 1 else 1.0
    row = torch.tensor([offset, offset - step, offset - 2 * step, offset - 3 * step])
    gap = (row.double() - row[0].double()).div(temperature)
    want = kept(gap, temperature=1.0, top_k=4, top_p=top_p, min_p=min_p)
    ids, valid = sample(row.expand(count, -1), draws=draws(count, 4, temperature=temperature, top_p=top_p, min_p=min_p))
    assert valid.all()
    for i, n in enumerate(np.bincount(ids.numpy(), minlength=4)):
        p = want.get(i, 0.0)
        assert abs(n / count - p) < 5 * math.sqrt(p * (1 - p) / count) + 1e-4, (i, p, n / count)


def test_logits_that_overflow_when_tempered_keep_their_order() -> None:
    for row in ([3e38, 3.3e38, 1.0], [-3e38, -2.9e38, -3.3e38]):
        for top_p in (1.0, 0.9):
            ids, _ = sample(torch.tensor([row]), draws=draws(1, 3, temperature=0.5, top_p=top_p))
            assert ids.tolist() == [1]


def test_top_k_goes_by_the_logits_even_where_tempering_merges_them() -> None:
    low = torch.arange(1.9, 1.901, 2**-23, dtype=torch.float32)
    rows = torch.stack([low, low.nextafter(torch.tensor(2.0))], 1)
    assert (rows[:, 0] / 1.05 == rows[:, 1] / 1.05).any()
    ids, _ = sample(rows, draws=draws(len(rows), 2, temperature=1.05, top_k=1))
    assert (ids == 1).all()
    close = torch.tensor([30.0, 1.0, 1.0 + 2**-23, -50.0])  # 30 below the best, ids 1 and 2 are equal
    ids, _ = sample(close.expand(4000, -1), draws=draws(4000, 4, temperature=20.0, top_k=2))
    assert set(ids.tolist()) == {0, 2}


def test_filters_of_other_rows_change_no_draw() -> None:
    generator = torch.Generator().manual_seed(6)
    for vocab, temperature in ((5000, 1.1e-5), (5000, 1.0), (1500, 2.0)):
        logits = torch.randn(8, vocab, generator=generator) * 20
        plain = draws(8, vocab, temperature=temperature)
        mixed = dataclasses.replace(plain, top_p=torch.tensor([0.5] + [1.0] * 7), filtered=True)
        assert torch.equal(sample(logits, draws=plain)[0][1:], sample(logits, draws=mixed)[0][1:])


def test_position_and_seed_change_the_noise() -> None:
    keys = torch.tensor([noise_keys(s, p) for s in (0, 1, 2**40, -5) for p in range(50)])
    noise = gumbel(keys, torch.arange(64).expand(len(keys), -1)).double().numpy()
    assert np.isfinite(noise).all()
    correlation = np.corrcoef(noise)
    assert np.abs(correlation - np.eye(len(keys))).max() < 0.65  # 64 samples: 5 sigma
    assert abs(noise.mean() - 0.5772) < 0.05
    assert abs(noise.var() - math.pi**2 / 6) < 0.1


def test_greedy_takes_the_lowest_id_among_equals_and_top_k_1_agrees() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -0.0], [-0.0, 0.0, -1.0, 0.0]])
    ids, _ = sample(logits)
    assert ids.tolist() == [1, 0]
    drawn, _ = sample(logits.repeat(20, 1), draws=draws(40, 4, top_k=1))
    assert drawn.tolist() == [1, 0] * 20


def test_penalties_and_bias_by_their_definitions() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0], [1.0, 1.0, 1.0, 1.0]])
    penalties = Penalties(
        rows=torch.tensor([0]),
        repetition=torch.tensor([[2.0]]),
        frequency=torch.tensor([[0.25]]),
        presence=torch.tensor([[0.5]]),
        output_counts=torch.tensor([[0, 3, 1, 0]], dtype=torch.int32),
        in_prompt=torch.tensor([[True, False, False, False]]),
    )
    bias = Bias(torch.tensor([1, 0]), torch.tensor([2, 3]), torch.tensor([5.0, -math.inf]))
    edited = edit_logits(logits, penalties, bias)
    assert edited.tolist() == [[1.0, -2.0 - 0.75 - 0.5, 0.25 - 0.25 - 0.5, -math.inf], [1.0, 1.0, 6.0, 1.0]]
    assert logits[0, 0] == 2.0  # the model's own logits stay: raw logprobs are of those
    ids, valid = sample(logits, edited=edited)
    assert ids.tolist() == [0, 2]
    assert valid.all()


def test_rows_with_nothing_left_are_invalid_and_sample_id_0() -> None:
    logits = torch.zeros(3, 2)
    logits[2, 1] = math.nan
    bias = Bias(torch.tensor([1, 1]), torch.tensor([0, 1]), torch.full((2,), -math.inf))
    ids, valid = sample(logits, edited=edit_logits(logits, bias=bias), draws=draws(3, 2))
    assert valid.tolist() == [True, False, False]
    assert ids[1:].tolist() == [0, 0]


def left(row: Tensor) -> set[int]:
    return set((row > -math.inf).nonzero().flatten().tolist())


@pytest.mark.parametrize("vocab", [40, 3000])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.3, 0, 0.8, 0.0),
        (5.0, 0, 0.95, 0.0),
        (1.0, 0, 1.0, 0.02),
        (0.8, 12, 0.7, 0.05),
    ],
)
def test_processed_logits_are_what_draws_follow(
    vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0)) * 2
    inputs = draws(3, vocab, temperature=temperature, top_k=top_k or None, top_p=top_p, min_p=min_p)
    x = processed_logits(logits, draws=inputs)
    scores = token_logprobs(x, None, vocab, temperature=inputs.temperature)
    for r in range(3):
        want = kept(logits[r], temperature=temperature, top_k=top_k or vocab, top_p=top_p, min_p=min_p)
        assert left(x[r]) == set(want)
        assert all(x[r, i] == logits[r, i] for i in want)
        listed = dict(zip(scores.top_ids[r].tolist(), scores.top_logprobs[r].double().exp().tolist(), strict=True))
        listed.pop(-1, None)
        assert listed == pytest.approx(want, abs=1e-6)


def test_processed_logits_keep_exactly_what_can_be_drawn() -> None:
    """Noise for many seeds reaches all that is kept and nothing else, also at ties and bounds that rounding decides."""
    count = 3000
    rows = [
        torch.tensor([1.0, 1.0, 1.0, 1.0, 0.9, 0.9, -math.inf, 0.5]),
        torch.zeros(8),
        torch.tensor([0.0, -0.0, 0.0, -1.0, -1.0, -1.0, -2.0, -math.inf]),
    ]
    filters = [
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_p": 0.625},
        {"min_p": 0.9},
        {"min_p": 1.0},
        {"top_k": 6, "top_p": 0.5},
    ]
    for row in rows:
        for given in filters:
            inputs = draws(count, 8, **given)  # type: ignore[arg-type]
            x = processed_logits(row.expand(count, -1), draws=inputs)
            ids, _ = sample(row.expand(count, -1), draws=inputs)
            assert set(ids.tolist()) == left(x[0]), (row, given)
            assert (x == x[0]).all()
    assert left(processed_logits(rows[0][None], draws=draws(1, 8, top_k=3))[0]) == {0, 1, 2}
    assert left(processed_logits(rows[0][None], draws=draws(1, 8, min_p=1.0))[0]) == {0, 1, 2, 3}


def test_processed_logits_beyond_the_first_candidates() -> None:
    flat = torch.zeros(2, 3000)
    x = processed_logits(flat, draws=draws(2, 3000, top_p=0.95))
    assert [left(row) for row in x] == [set(range(2850))] * 2
    tied = processed_logits(flat, draws=draws(2, 3000, min_p=1.0))
    assert [len(left(row)) for row in tied] == [3000] * 2


def test_processed_rows_that_are_greedy_or_unfiltered_are_edited_only() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = Bias(torch.tensor([0, 2]), torch.tensor([3, 4]), torch.tensor([2.0, -math.inf]))
    inputs = draws(4, 50, top_k=5)
    some = dataclasses.replace(
        inputs.take(torch.tensor([1, 3])), top_k=torch.tensor([5, 50]), rows=torch.tensor([3, 1])
    )
    x = processed_logits(logits, bias=bias, draws=some)
    edited = edit_logits(logits, None, bias)
    assert x.dtype == torch.float32
    assert torch.equal(x[[0, 1, 2]], edited[[0, 1, 2]])
    assert len(left(x[3])) == 5
    assert torch.equal(processed_logits(logits, draws=draws(4, 50)), logits.float())
    assert processed_logits(logits).data_ptr() != logits.data_ptr()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_processed_rows_that_are_invalid_stay_so(poison: float) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    logits[1, 49] = poison
    logits[2] = -math.inf
    inputs = draws(3, 50, top_k=2, top_p=0.5)
    bias = Bias(torch.tensor([1]), torch.tensor([49]), torch.tensor([-math.inf]))
    for given in (None, bias):
        x = processed_logits(logits, bias=given, draws=inputs)
        scores = token_logprobs(
            x,
            sample(logits, edited=edit_logits(logits, bias=given), draws=inputs)[0],
            3,
            temperature=inputs.temperature,
        )
        assert scores.valid.tolist() == [True, False, False]


def test_elsewhere_than_on_a_cpu_nothing_depends_on_values() -> None:
    """Meta tensors have no values: an op that looks at one fails."""
    inputs = draws(3, 5000, top_k=5, top_p=0.5)
    there = DrawInputs(
        **{
            field.name: value.to("meta") if isinstance(value, Tensor) else value
            for field in dataclasses.fields(inputs)
            for value in [getattr(inputs, field.name)]
        }
    )
    logits = torch.zeros(4, 5000, device="meta")
    assert processed_logits(logits, draws=there).shape == (4, 5000)
    assert sample(logits, draws=there)[0].shape == (4,)
