"""Candidates of a prompt, compared: totals, ranks, and probabilities among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from neper.types import Float32Array

Normalize = Literal["sum", "mean", "none"]
"""The source of probabilities: totals or means, among the candidates; or each candidate's own total."""

NORMALIZES: tuple[Normalize, ...] = get_args(Normalize)


class Comparison(NamedTuple):
    """One candidate among others.

    Attributes:
        logprob: total of its tokens, natural log, in float64.
        mean_logprob: per token.
        rank: 1 + the number of candidates with a strictly greater total (with "mean": a greater mean).
        probability: its share among the candidates; with "none" exp(logprob).
    """

    logprob: float
    mean_logprob: float
    rank: int
    probability: float


def compare(logprobs: Sequence[Float32Array], normalize: Normalize = "sum") -> list[Comparison]:
    """Compare candidates by the logprobs of their tokens, one array [n >= 1] each.

    A candidate that is there twice counts twice. Where all are impossible (-inf), all shares are 0.
    """
    totals = np.array([values.sum(dtype=np.float64) for values in logprobs])
    means = totals / np.array([len(values) for values in logprobs])
    scores = means if normalize == "mean" else totals
    ascending = np.sort(scores)
    ranks = 1 + len(scores) - np.searchsorted(ascending, scores, side="right")
    shares = np.exp(scores)
    if normalize != "none" and (best := float(ascending[-1])) > -math.inf:
        shares = np.exp(scores - best)
        shares /= shares.sum()
    columns = (totals.tolist(), means.tolist(), ranks.tolist(), shares.tolist())
    return [Comparison(*row) for row in zip(*columns, strict=True)]
