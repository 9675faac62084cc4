"""Candidates compared: totals, ranks and shares, by their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from neper.candidates import Normalize, compare

LOGPROBS = [[-1.0, -2.0], [-2.5], [-3.0], [-0.5] * 7, [-math.inf, -1.0], [-800.0], [-2.5]]


@pytest.mark.parametrize("normalize", ["sum", "mean", "none"])
def test_definitions(normalize: Normalize) -> None:
    found = compare([np.array(values, np.float32) for values in LOGPROBS], normalize)
    totals = [math.fsum(values) for values in LOGPROBS]
    means = [total / len(values) for total, values in zip(totals, LOGPROBS, strict=True)]
    scores = means if normalize == "mean" else totals
    whole = 1.0 if normalize == "none" else math.fsum(map(math.exp, scores))
    assert [row.logprob for row in found] == pytest.approx(totals)
    assert [row.mean_logprob for row in found] == pytest.approx(means)
    assert [row.rank for row in found] == [1 + sum(other > score for other in scores) for score in scores]
    assert [row.probability for row in found] == pytest.approx([math.exp(score) / whole for score in scores])


def test_far_below_what_float64_holds() -> None:
    shares = [row.probability for row in compare([np.float32([-5000.0]), np.float32([-5000.0, -math.log(3.0)])])]
    assert shares == pytest.approx([0.75, 0.25], rel=1e-6)


def test_where_all_are_impossible() -> None:
    for normalize in ("sum", "mean", "none"):
        found = compare([np.float32([-math.inf]), np.float32([-1.0, -math.inf])], normalize)
        assert [(row.rank, row.probability) for row in found] == [(1, 0.0)] * 2
