"""Reductions in plain torch that the kernels are timed against, and the check of the kernels' results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from neper.errors import NeperError
from neper.ops import TokenLogprobs, token_logprobs


class Scores(NamedTuple):
    """The results of a baseline: the fields of TokenLogprobs without validity, ties in any order.

    The baselines do not compute the validity, since nothing reads it.

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
    """log_softmax of whole rows in float32, then gather and topk: the most common form.

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
    """One normaliser per row, subtracted only from the values that are returned. Arguments as in log_softmax_top_k."""
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


def check(what: str, got: TokenLogprobs, logits: Tensor, token_ids: Tensor, top_k: int, **sets: list[Tensor]) -> None:
    """Compare a result with the reference, in plain torch on the CPU.

    Args:
        what: the case, for the message.
        sets: arguments of token_logprobs with one set per row, int64 on the CPU.

    Raises:
        NeperError: on a difference.
    """
    lists: dict[str, Any] = {kind: [ids.tolist() for ids in rows] for kind, rows in sets.items()}
    expected = token_logprobs(logits.cpu(), token_ids.cpu(), top_k, **lists)
    for field, found, right in zip(TokenLogprobs._fields, got, expected, strict=True):
        found = found.cpu()
        same = torch.isclose(found, right, rtol=2.0**-22, atol=3e-5) if right.is_floating_point() else found == right
        if not same.all():
            place = (~same).nonzero()[0].tolist()
            a, b = (values[tuple(place)].item() for values in (found, right))
            raise NeperError(f"wrong result, nothing is timed: {what}: {field}{place} is {a!r}, and {b!r} is right")
