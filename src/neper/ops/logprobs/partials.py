"""Partial scores: of a part of the vocabulary, closed under merge. In plain torch, on any device.

With the vocabulary cut over tensor-parallel ranks, each rank reduces its own shard of the logits, and ranks exchange
5 + 2 k numbers a row, not V:

    targets = target_logits(shard, token_ids, first_id)     then all-reduce it by maximum
    part = partial_logprobs(shard, targets, k, first_id)    then all-gather its fields
    scores = finish_partials(merge_partials(parts))         the same on every rank, parts in the order of ranks

Order, ids, ranks and validity are exactly those of the whole row, wherever it was cut. Logprobs (of the raw view) agree
with the unsharded ones within 1e-6, since other cuts sum in another tree; the same cuts and grouping repeat to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from neper.errors import InvalidRequestError
from neper.ops.common.order import ordered_top_k, top_k_by_key
from neper.ops.logprobs.api import TokenLogprobs
from neper.ops.logprobs.reference import exp_sums, log_softmax


class PartialLogprobs(NamedTuple):
    """Scores of R rows over a part of the vocabulary. NaN or +inf in a row shows in its maximum, and stays in merges.

    Attributes:
        maximum: [R] float32, the largest logit; -inf where the part holds nothing above it.
        sum_exp: [R] float32, sum of exp(x - maximum); 0 where maximum is -inf.
        target: [R] float32, the logit of the row's token, as given to `partial_logprobs`.
        above: [R] int32, how many of the part's logits are strictly greater than it.
        top_values: [R, k] float32, the part's best logits in order; -inf in unused places.
        top_ids: [R, k] int32, their ids in the whole vocabulary; -1 in unused places.
    """

    maximum: Tensor
    sum_exp: Tensor
    target: Tensor
    above: Tensor
    top_values: Tensor
    top_ids: Tensor


@torch.no_grad()
def target_logits(shard: Tensor, token_ids: Tensor, first_id: int = 0) -> Tensor:
    """The logit [R] float32 of each row's token, -inf where `shard` lacks it: the whole row's is the maximum of all.

    Args:
        shard: [R, Vs] float, the logits of ids first_id .. first_id + Vs.
        token_ids: [R] int; -1 = the row's best, whose logit is not known yet: +inf stands for it.
    """
    place = token_ids.long() - first_id
    size = shard.shape[1]
    found = shard.gather(1, place.clamp(0, size - 1).unsqueeze(1)).squeeze(1).float()
    found = found.masked_fill((place < 0) | (place >= size), -torch.inf)
    return found.masked_fill(token_ids < 0, torch.inf)


@torch.no_grad()
def partial_logprobs(shard: Tensor, targets: Tensor, top_k: int, first_id: int = 0) -> PartialLogprobs:
    """The partial scores of one shard.

    Args:
        shard: [R, Vs] float, Vs >= 1, any row stride: the logits of ids first_id .. first_id + Vs.
        targets: [R] float32, the logit of each row's token, wherever it is (see `target_logits`).
        top_k: k, the same for all shards; may exceed Vs.

    Raises:
        InvalidRequestError: on shapes that do not fit, or a negative top_k.
    """
    if shard.dim() != 2 or shard.shape[1] == 0 or not shard.is_floating_point():
        raise InvalidRequestError(f"a shard must be a [rows, ids] float tensor, got {list(shard.shape)}")
    if targets.shape != shard.shape[:1] or targets.dtype != torch.float32:
        raise InvalidRequestError(
            f"targets must hold one float32 logit per row of {len(shard)} (see target_logits), "
            f"got {list(targets.shape)} {targets.dtype}"
        )
    if top_k < 0:
        raise InvalidRequestError(f"top_k must be at least 0, got {top_k}", param="top_k")
    x = shard.float().contiguous()
    maximum, sum_exp = exp_sums(x)
    values, ids = ordered_top_k(x, min(top_k, x.shape[1]))
    ids = (ids + first_id).masked_fill(values == -torch.inf, -1)
    missing = (0, top_k - values.shape[1])
    return PartialLogprobs(
        maximum=maximum,
        sum_exp=sum_exp.masked_fill(maximum == -torch.inf, 0.0),
        target=targets,
        above=(x > targets.unsqueeze(1)).sum(-1, dtype=torch.int32),
        top_values=torch.nn.functional.pad(values, missing, value=-torch.inf),
        top_ids=torch.nn.functional.pad(ids, missing, value=-1),
    )


def merge_partials(parts: Sequence[PartialLogprobs]) -> PartialLogprobs:
    """The partial scores of all parts together; no two may share an id. Sums are made in the order of `parts`.

    All parts must have had the same targets, those of the whole row: a row where they differ comes out invalid.

    Raises:
        InvalidRequestError: on no parts, or lists of different lengths.
    """
    if not parts:
        raise InvalidRequestError("there must be at least one partial result to merge")
    k = parts[0].top_values.shape[1]
    if any(part.top_values.shape[1] != k for part in parts):
        raise InvalidRequestError("partial results to merge must have lists of the same length")
    maximum, target = parts[0].maximum, parts[0].target
    for part in parts[1:]:
        maximum = torch.maximum(maximum, part.maximum)  # keeps NaN
        maximum = maximum.masked_fill(target != part.target, torch.nan)
    sum_exp = torch.zeros_like(maximum)
    above = torch.zeros_like(parts[0].above)
    for part in parts:
        # -inf minus -inf would be NaN: a part with nothing in it adds nothing, as the first one too.
        share = part.sum_exp * torch.exp(part.maximum - maximum)
        sum_exp = sum_exp + share.masked_fill(part.maximum == -torch.inf, 0.0)
        above = above + part.above
    values = torch.cat([part.top_values for part in parts], 1)
    ids = torch.cat([part.top_ids for part in parts], 1)
    values, ids = top_k_by_key(values, ids.long().clamp(min=0), k)
    return PartialLogprobs(maximum, sum_exp, target, above, values, ids.masked_fill(values == -torch.inf, -1))


def finish_partials(partial: PartialLogprobs) -> TokenLogprobs:
    """The scores of whole rows, once the parts of the whole vocabulary are merged."""
    maximum, log_sum = partial.maximum, partial.sum_exp.log()
    valid = maximum.isfinite()
    chosen = torch.where(partial.target == torch.inf, maximum, partial.target)
    top_logprobs = log_softmax(partial.top_values, maximum, log_sum, None)
    unused = (partial.top_ids < 0) | ~valid.unsqueeze(1)
    return TokenLogprobs(
        logprob=log_softmax(chosen, maximum, log_sum, None).masked_fill(~valid, -torch.inf),
        rank=(partial.above + 1).masked_fill(~valid, 0),
        top_ids=partial.top_ids.masked_fill(unused, -1),
        top_logprobs=top_logprobs.masked_fill(unused, -torch.inf),
        valid=valid,
    )
