"""Reductions in plain torch that the kernels are timed against, and the float64 truth about a row of scores."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from neper.ops import TokenLogprobs
from neper.types import LISTED_WHOLE


class Scores(NamedTuple):
    """What a baseline returns: the fields of TokenLogprobs without validity, ties in any order.

    Nobody pays for a validity that he does not look at, so the baselines are spared it.

    Attributes:
        logprob: [R] float32.
        rank: [R] int64.
        top_ids: [R, k] int64.
        top_logprobs: [R, k] float32.
    """

    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def log_softmax_top_k(logits: Tensor, token_ids: Tensor, top_k: int) -> Scores:
    """log_softmax of whole rows in float32, then gather and topk: how it is mostly written.

    Args:
        logits: [R, V] float32, bfloat16 or float16.
        token_ids: [R] int64.
        top_k: 0 <= k <= V.
    """
    logprobs = torch.log_softmax(logits, -1, dtype=torch.float32)
    chosen = token_ids.unsqueeze(1)
    rank = _rank(logits, logits.gather(1, chosen))
    values, ids = _top_k(logprobs, top_k)
    return Scores(logprobs.gather(1, chosen).squeeze(1), rank, ids, values)


def logsumexp_top_k(logits: Tensor, token_ids: Tensor, top_k: int) -> Scores:
    """One normaliser a row, subtracted from what is returned only. Arguments as in log_softmax_top_k."""
    normaliser = torch.logsumexp(logits.float(), -1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    values, ids = _top_k(logits, top_k)
    return Scores((chosen.float() - normaliser).squeeze(1), _rank(logits, chosen), ids, values.float() - normaliser)


def host_scan(logits: Tensor, token_ids: Tensor, top_k: int, landing: Tensor) -> Scores:
    """Copy whole rows to host memory and scan them there.

    Args:
        logits: [R, V] on a device.
        token_ids: [R] int64 on the host.
        top_k: 0 <= k <= V.
        landing: [R, V] of the logits' dtype in host memory (pinned, where the device copies from and to it).
    """
    landing.copy_(logits, non_blocking=True)
    if logits.is_cuda:
        torch.cuda.current_stream(logits.device).synchronize()
    return log_softmax_top_k(landing, token_ids, top_k)


def _rank(logits: Tensor, chosen: Tensor) -> Tensor:
    return (logits > chosen).sum(-1) + 1


def _top_k(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    if top_k == 0:
        return x.new_empty((len(x), 0)), x.new_empty((len(x), 0), dtype=torch.int64)
    values, ids = x.topk(top_k)
    return values, ids


def mismatch(
    got: TokenLogprobs,
    row: int,
    logits: Tensor,
    token_id: int,
    top_k: int,
    *,
    allowed: Tensor | None = None,
    named: Tensor | None = None,
) -> str | None:
    """How one row of a result differs from float64 and a stable sort; None = not at all.

    Args:
        got: the result, in host memory.
        row: the row of `got`.
        logits: [V], the row's logits in host memory.
        token_id: the token that was scored.
        top_k: alternatives asked for.
        allowed, named: the row's sets, ascending int64 (see token_logprobs).
    """
    x = logits.double()
    candidates = allowed if allowed is not None else torch.arange(len(x))
    maximum = x[candidates].max()
    exact = (x - maximum) - (x[candidates] - maximum).exp().sum().log()
    wanted = named if named is not None else candidates
    # Stable over ascending ids: equal logits stay in the order of their ids.
    wanted = wanted[x[wanted].sort(descending=True, stable=True).indices]
    if named is None and (allowed is None or len(allowed) > LISTED_WHOLE):
        wanted = wanted[:top_k]
    places = len(got.top_ids[row])
    listed = wanted.tolist() + [-1] * (places - len(wanted))
    inside = bool((candidates == token_id).any())
    rank = 1 + int((x[candidates] > x[token_id]).sum())
    if not got.valid[row]:
        return "a finite row is marked invalid"
    if got.top_ids[row].tolist() != listed:
        place = next(i for i, (a, b) in enumerate(zip(got.top_ids[row].tolist(), listed, strict=True)) if a != b)
        return f"place {place} of the list holds id {int(got.top_ids[row, place])}, and {listed[place]} is right"
    if inside and int(got.rank[row]) != rank:
        return f"the rank of id {token_id} is {int(got.rank[row])}, and {rank} is right"
    value = float(got.logprob[row])
    right = float(exact[token_id]) if inside else -math.inf
    if not _close(value, right):
        return f"the logprob of id {token_id} is {value!r}, and {right!r} is right"
    for value, token in zip(got.top_logprobs[row].tolist(), listed, strict=True):
        right = float(exact[token]) if token >= 0 else -math.inf
        if not _close(value, right):
            return f"the listed logprob of id {token} is {value!r}, and {right!r} is right"
    return None


def _close(value: float, right: float) -> bool:
    return value == right or abs(value - right) <= max(3e-5, 2.0**-22 * abs(right))
