"""What top-k, top-p and min-p leave of a row, in float64: the oracle of everything that filters."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
SLACK = 1e-6  # of all mass: what float32's rounding of probabilities may move the edge of a filter by


class Kept(NamedTuple):
    """The ids that are kept are the first of `order`, between `fewest` and `most` of them: one number nearly always."""

    order: npt.NDArray[np.int64]
    fewest: int
    most: int


def kept(row: Floats, *, temperature: float, top_k: int, top_p: float, min_p: float, top_n_sigma: float = 0.0) -> Kept:
    """By the definitions: top_n_sigma first, at most so many standard deviations below the best; then top_k; top_p over
    what it left, renormalised; min_p against the best id. 0 is off for all but top_p, for which 1 is."""
    order = np.lexsort((np.arange(len(row)), -row))
    order = order[row[order] > -np.inf]
    if top_n_sigma > 0:
        finite = row[order]
        order = order[finite >= finite[0] - float(np.float32(top_n_sigma)) * finite.std()]
    x = row[order]
    with np.errstate(under="ignore"):
        share = np.exp((x - x[0]) / float(np.float32(temperature)))
    if top_k > 0:
        share = share[:top_k]
    before = (np.cumsum(share) - share) / share.sum()
    counts = []
    for slack in (-SLACK, SLACK):
        left = share >= float(np.float32(min_p)) * (1 - slack)
        left |= share == 1.0  # equals of the best are exactly as probable
        if top_p < 1:
            left &= before < float(np.float32(top_p)) + slack
        left[0] = True
        counts.append(int(left.sum()))  # a prefix: shares fall and what is before grows
    return Kept(order, *counts)


def logprobs(row: Floats, ids: npt.NDArray[np.int64], temperature: float) -> Floats:
    """log of each id's share of `ids`, after temperature."""
    x = (row[ids] - row[ids].max()) / float(np.float32(temperature))
    with np.errstate(under="ignore"):
        result: Floats = x - np.log(np.exp(x).sum())
    return result
