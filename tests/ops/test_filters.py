"""top_k, top_p and min_p together, beside penalties and allowed sets, at sizes around what is looked at first."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from neper.ops import DrawInputs, Masks, Penalties, noise_keys, sample
from neper.ops.sampling.reference import edit_logits, processed_logits
from neper.ops.token_logprobs import token_logprobs
from tests.helpers.filters import kept, logprobs
from tests.helpers.oracle import error_bound

SIZES = (1, 1023, 1024, 1025, 2000, 4000)
TOP_P = (1.0, 0.99, 0.7)
MIN_P = (0.0, 0.02)


def combinations(vocab: int) -> list[tuple[int, float, float]]:
    """(top_k, top_p, min_p), all of them."""
    sizes = sorted({0, vocab - 1, vocab, *(size for size in SIZES if size < vocab)} - {0} | {vocab})
    return list(itertools.product(sizes, TOP_P, MIN_P))


def inputs(
    filters: list[tuple[int, float, float]], temperature: float, seed: int = 0, sigma: float = 0.0
) -> DrawInputs:
    return DrawInputs(
        rows=torch.arange(len(filters)),
        temperature=torch.full((len(filters),), temperature),
        top_k=torch.tensor([top_k for top_k, _, _ in filters]),
        top_p=torch.tensor([top_p for _, top_p, _ in filters]),
        min_p=torch.tensor([min_p for _, _, min_p in filters]),
        top_n_sigma=torch.full((len(filters),), sigma),
        keys=torch.tensor([noise_keys(seed + row, 1) for row in range(len(filters))]),
        filtered=True,
    )


def logits_of(rows: int, vocab: int, seed: int) -> Tensor:
    """Multiples of 1/64, so that many are equal and edits by powers of 2 are exact."""
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 64).round() / 64


def penalties_of(rows: int, vocab: int, seed: int) -> Penalties:
    generator = torch.Generator().manual_seed(seed)
    return Penalties(
        rows=torch.arange(rows),
        repetition=torch.full((rows, 1), 2.0),
        frequency=torch.full((rows, 1), 0.25),
        presence=torch.full((rows, 1), -0.5),
        output_counts=(torch.rand(rows, vocab, generator=generator) * 4 - 2).int().clamp_(min=0),
        in_prompt=torch.rand(rows, vocab, generator=generator) < 0.1,
    )


def masks_of(rows: int, vocab: int, seed: int) -> Masks:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=generator).int()
    words[:, 0] |= 1
    return Masks(rows=torch.arange(rows), words=words)


def edited(row: Tensor, penalties: Penalties | None, masks: Masks | None, r: int) -> npt.NDArray[np.float64]:
    """The edits written out once more."""
    x = row.double().numpy()
    if penalties is not None:
        counts = penalties.output_counts[r].numpy()
        seen = (counts > 0) | penalties.in_prompt[r].numpy()
        x = np.where(seen, np.where(x > 0, x / 2, x * 2), x) - 0.25 * counts + 0.5 * (counts > 0)
    if masks is not None:
        words = masks.words[r].numpy().view(np.uint32)
        ids = np.arange(len(x))
        x = np.where((words[ids // 32] >> (ids % 32).astype(np.uint32)) & 1, x, -math.inf)
    return x


@pytest.mark.parametrize(
    ("penalised", "restricted"),
    [
        (False, False),
        (True, True),
        pytest.param(True, False, marks=pytest.mark.full),
        pytest.param(False, True, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("vocab", [300, 1023, 1024, 1025, 2049, pytest.param(5000, marks=pytest.mark.full)])
def test_case_71_exactly_what_the_filters_leave_is_kept(vocab: int, penalised: bool, restricted: bool) -> None:
    filters = combinations(vocab)
    rows = len(filters)
    temperature = 0.9 if vocab % 2 else 1.4
    logits = logits_of(rows, vocab, seed=vocab)
    penalties = penalties_of(rows, vocab, seed=1) if penalised else None
    masks = masks_of(rows, vocab, seed=2) if restricted else None
    draws = inputs(filters, temperature)
    view = processed_logits(logits, penalties=penalties, masks=masks, draws=draws)
    drawn, valid = sample(logits, edited=edit_logits(logits, penalties, None, masks), draws=draws)
    listed = token_logprobs(view, drawn, vocab, temperature=draws.temperature)
    assert valid.all()
    assert listed.valid.all()
    undecided = 0
    for r, (top_k, top_p, min_p) in enumerate(filters):
        row = edited(logits[r], penalties, masks, r)
        want = kept(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        undecided += want.fewest != want.most
        ids = (view[r] > -math.inf).nonzero().flatten().numpy()
        assert want.fewest <= len(ids) <= want.most, (filters[r], len(ids), want.fewest, want.most)
        left = want.order[: len(ids)]
        assert (np.sort(left) == ids).all(), filters[r]
        assert (view[r].numpy()[ids] == row[ids]).all(), filters[r]
        assert int(drawn[r]) in ids
        exact = logprobs(row, left, temperature)
        assert (listed.top_ids[r, : len(ids)].numpy() == left).all()
        assert (listed.top_ids[r, len(ids) :] == -1).all()
        error = np.abs(listed.top_logprobs[r, : len(ids)].double().numpy() - exact)
        assert error.max() <= error_bound(float(exact.min()))
    assert undecided <= max(2, rows // 20)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0, 3.5])
def test_top_n_sigma_comes_before_the_other_filters(sigma: float) -> None:
    """Of logits that edits leave, whatever the temperature; a row that is not valid stays as it is."""
    vocab = 1500
    filters = [*itertools.product((vocab, 40), TOP_P, MIN_P)]
    logits, masks = logits_of(len(filters), vocab, seed=5) + 1e4, masks_of(len(filters), vocab, seed=2)
    for temperature in (0.3, 2.0):
        draws = inputs(filters, temperature, sigma=sigma)
        view = processed_logits(logits, masks=masks, draws=draws)
        drawn, valid = sample(logits, edited=edit_logits(logits, None, None, masks), draws=draws)
        assert valid.all()
        for r, (top_k, top_p, min_p) in enumerate(filters):
            row = edited(logits[r], None, masks, r)
            want = kept(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, top_n_sigma=sigma)
            ids = (view[r] > -math.inf).nonzero().flatten().numpy()
            assert want.fewest <= len(ids) <= want.most
            assert (np.sort(want.order[: len(ids)]) == ids).all()
            assert int(drawn[r]) in ids
            alone, _ = sample(
                logits[r : r + 1],
                edited=edit_logits(logits[r : r + 1], None, None, Masks(torch.tensor([0]), masks.words[r : r + 1])),
                draws=dataclasses.replace(draws.take(torch.tensor([r])), rows=torch.tensor([0])),
            )
            assert alone.item() == drawn[r].item()
    broken = logits[:3].clone()
    broken[0, 7], broken[1, 7], broken[2] = math.nan, math.inf, -math.inf
    left = processed_logits(broken, draws=inputs([(vocab, 1.0, 0.0)] * 3, 1.0, sigma=sigma))
    assert torch.equal(left, broken) or torch.equal(left.nan_to_num(7.0), broken.nan_to_num(7.0))


@pytest.mark.parametrize(("top_k", "top_p"), [(1200, 0.8), pytest.param(0, 0.8, marks=pytest.mark.full)])
def test_case_71_draws_follow_the_distribution_that_is_left(top_k: int, top_p: float) -> None:
    """Chi-square over 10 groups of kept ids, of about the same mass each."""
    vocab, count, temperature = 1500, 1000, 1.2
    row = logits_of(1, vocab, seed=9)[0]
    want = kept(row.double().numpy(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=0.0)
    left = want.order[: want.fewest]
    probability = np.exp(logprobs(row.double().numpy(), left, temperature))
    group = np.minimum((np.cumsum(probability) * 10).astype(int), 9)
    places = np.full(vocab, -1)
    places[left] = group
    draws = inputs([(top_k or vocab, top_p, 0.0)] * count, temperature, seed=1000)
    ids, _ = sample(row.expand(count, -1), draws=draws)
    drawn = places[ids.numpy()]
    assert (drawn >= 0).all()
    expected = count * np.bincount(group, weights=probability, minlength=10)
    statistic = ((np.bincount(drawn, minlength=10) - expected) ** 2 / expected).sum()
    assert statistic < 38  # 9 degrees of freedom: a chance of 2e-5


def test_case_71_top_p_of_a_long_tail() -> None:
    """The first 1,024 ids hold all that is kept, but not all that top_k left."""
    ranks = torch.arange(1, 20_001, dtype=torch.float64)
    row = (-1.1 * ranks.log()).float()[torch.randperm(20_000, generator=torch.Generator().manual_seed(3))]
    for top_k, top_p, count in ((2000, 0.8, 210), (4000, 0.7, 114)):
        view = processed_logits(row[None], draws=inputs([(top_k, top_p, 0.0)], 1.0))
        want = kept(row.double().numpy(), temperature=1.0, top_k=top_k, top_p=top_p, min_p=0.0)
        assert want.fewest == want.most == count == int((view > -math.inf).sum())
