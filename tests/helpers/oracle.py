"""Scores of a row in float64 and in the order written out: what every implementation of the reduction is held to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LISTED_WHOLE = 1024
FLOAT32_OVERFLOWS_AT = 2.0**128 - 2.0**103  # the least that rounds to float32's inf

Floats = npt.NDArray[np.float64]


class ExpectedRow(NamedTuple):
    """What a row's scores must be. Logprobs are float64; `naive` are float32 torch.log_softmax's for the same ids."""

    valid: bool
    logprob: float
    rank: int
    ids: list[int]
    logprobs: list[float]
    naive_logprob: float
    naive_logprobs: list[float]


INVALID = ExpectedRow(False, -math.inf, 0, [], [], -math.inf, [])


def exact_logprobs(row: Tensor) -> Floats:
    """log-softmax of one row in float64."""
    return _log_softmax(row.double().cpu().numpy())


def order(row: Tensor | Floats) -> list[int]:
    """All ids above -inf, by (value descending, id ascending)."""
    values = row.double().cpu().numpy() if isinstance(row, Tensor) else row
    ids: list[int] = np.argsort(-values, kind="stable")[: int((values > -math.inf).sum())].tolist()
    return ids


def expected(
    logits: Tensor,
    token_ids: Sequence[int] | None,
    top_k: int,
    *,
    row_top_k: Sequence[int] | None = None,
    temperature: Sequence[float] | None = None,
    allowed: Sequence[Sequence[int]] | None = None,
    logprob_token_ids: Sequence[Sequence[int]] | None = None,
    rows: Sequence[int] | None = None,
) -> list[ExpectedRow]:
    """What neper.token_logprobs must return, row by row; an id of -1 is the row's best."""
    logits = logits.detach().cpu()
    sources = range(len(logits)) if rows is None else rows
    return [
        _expected_row(
            logits[source].float(),
            -1 if token_ids is None else token_ids[r],
            top_k if row_top_k is None else min(top_k, row_top_k[r]),
            1.0 if temperature is None or temperature[r] < 1e-5 else float(np.float32(temperature[r])),
            allowed[r] if allowed is not None else (),
            logprob_token_ids[r] if logprob_token_ids is not None else (),
        )
        for r, source in enumerate(sources)
    ]


def error_bound(exact: float) -> float:
    """How far a logprob may lie from its float64 value."""
    return max(3e-5, 2.0**-22 * abs(exact))


def assert_right(got: Sequence[Tensor], want: list[ExpectedRow]) -> None:
    """`got` (the fields of TokenLogprobs) holds exactly the expected ids, ranks and flags, and values within bounds.

    Besides each value's own bound, none is further off than the naive formula's worst by more than 1e-6 and 1 ulp.
    """
    logprob, rank, top_ids, top_logprobs, valid = (field.tolist() for field in got)
    assert valid == [row.valid for row in want]
    assert rank == [row.rank for row in want]
    width = got[2].shape[1]
    assert top_ids == [row.ids + [-1] * (width - len(row.ids)) for row in want]
    values: list[float] = []
    exact: list[float] = []
    naive: list[float] = []
    for r, row in enumerate(want):
        assert top_logprobs[r][len(row.ids) :] == [-math.inf] * (width - len(row.ids))
        values += [logprob[r], *top_logprobs[r][: len(row.ids)]]
        exact += [row.logprob, *row.logprobs]
        naive += [row.naive_logprob, *row.naive_logprobs]
    assert_values_right(np.array(values), np.array(exact), np.array(naive))


def assert_values_right(values: Floats, exact: Floats, naive: Floats) -> None:
    """The bounds on `values` alone, all of one case."""
    assert not np.isnan(values).any()
    assert (values <= 0).all()
    overflows = exact <= -FLOAT32_OVERFLOWS_AT
    assert (values[overflows] == -math.inf).all()
    values, exact, naive = values[~overflows], exact[~overflows], naive[~overflows]
    error = np.abs(values - exact)
    bound = np.maximum(3e-5, 2.0**-22 * np.abs(exact))
    assert (error <= bound).all(), f"off by {(error / bound).max():.3g} times the bound"
    worst_naive = np.abs(naive - exact).max(initial=0.0)
    if math.isfinite(worst_naive):
        with np.errstate(over="ignore"):  # beyond float32's largest number comes inf
            ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
        excess = (error - worst_naive - ulp).max(initial=0.0)
        assert excess <= 1e-6, f"worse than the naive formula by {excess:.3g} and 1 ulp"


def _log_softmax(x: Floats) -> Floats:
    m = x.max()
    result: Floats = (x - m) - math.log(np.exp(x - m).sum())
    return result


def _expected_row(
    row: Tensor, token: int, k: int, temperature: float, allowed: Sequence[int], named: Sequence[int]
) -> ExpectedRow:
    x: Floats = row.double().numpy()
    if np.isnan(x).any() or x.max() in (math.inf, -math.inf):
        return INVALID
    support = np.unique(np.asarray(allowed, dtype=np.int64)) if allowed else np.arange(len(x))
    within = x[support]
    if within.max() == -math.inf:
        return INVALID
    exact = np.full(len(x), -math.inf)
    naive = np.full(len(x), -math.inf)
    exact[support] = _log_softmax(within / temperature)
    naive[support] = torch.log_softmax(row[torch.from_numpy(support)] / temperature, -1).double().numpy()
    best = support[order(within)].tolist()
    if named or (allowed and len(support) <= LISTED_WHOLE):
        chosen = sorted(set(named) or set(support.tolist()))
        ids = [chosen[i] for i in np.argsort(-x[chosen], kind="stable")]
    else:
        ids = best[:k]
    token = best[0] if token < 0 else token
    return ExpectedRow(
        valid=True,
        logprob=float(exact[token]),
        rank=1 + int((within > x[token]).sum()),
        ids=ids,
        logprobs=exact[ids].tolist(),
        naive_logprob=float(naive[token]),
        naive_logprobs=naive[ids].tolist(),
    )
