"""Launches the kernels of named sets, or lists sets that are too long for them by one sort."""

from __future__ import annotations

import torch
from torch import Tensor

from neper.ops.common.order import monotonic
from neper.ops.logprobs.reference import inverse_temperature, log_softmax
from neper.ops.logprobs.rows import Given, Norms
from neper.ops.logprobs.set_kernels import PART_IDS, list_kernel, restrict_kernel
from neper.ops.logprobs.token_sets import TokenSets
from neper.types import LISTED_WHOLE


def score_sets(
    logits: Tensor,
    sets: TokenSets,
    restrict: bool,
    given: Given,
    norms: Norms,
    top_k: int,
) -> None:
    """Overwrite the results of the rows that have a set.

    Args:
        logits: [N, V]; `given` says which of its rows.
        sets: those of the rows of `given`.
        restrict: renormalise over the set, instead of only listing it.
        norms: M and L of each row; restricted rows get those of their set.
    """
    scores = given.scores
    count = len(scores.logprob)
    longest = sets.longest
    if longest == 0:
        return
    step, unit = given.row_step(logits)
    if restrict:
        restrict_kernel[(count,)](
            logits, step, given.rows, given.token_ids, given.temperature, given.flags, sets.ids, sets.offsets,
            norms.words, norms.stride, scores.logprob, scores.rank, scores.valid, logits.shape[1],
            UNIT=unit, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    if longest <= LISTED_WHOLE:
        list_kernel[(-(-longest // PART_IDS), count)](
            logits, step, given.rows, given.temperature, given.flags, sets.ids, sets.offsets, norms.words, norms.stride,
            scores.top_ids, scores.top_logprobs, scores.top_ids.stride(0), scores.valid, logits.shape[1],
            scores.top_ids.shape[1], UNIT=unit, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        _list_sorted(logits, sets, restrict, given, norms, top_k)


def _list_sorted(logits: Tensor, sets: TokenSets, restrict: bool, given: Given, norms: Norms, top_k: int) -> None:
    """List sets of any size by one stable sort of all members. Unlike the kernels it allocates."""
    scores, n = given.scores, int(sets.lengths.sum())
    count, width = scores.top_ids.shape
    ids = sets.ids[sets.begin : sets.begin + n]
    starts = sets.offsets.long() - sets.begin
    lengths = starts.diff()
    row = torch.repeat_interleave(torch.arange(count, device=ids.device), lengths, output_size=n)
    source = given.rows.long()[row] if given.flags & 1 else row
    x = logits[source, ids.long()].float()
    descending = ~monotonic(x).long()
    order = ((row << 33) + descending).sort(stable=True).indices  # members stand in ascending order of ids
    column = torch.arange(n, device=ids.device) - starts[row]
    listed = lengths
    if restrict:
        limit = given.row_top_k.long().clamp(max=top_k) if given.flags & 8 else torch.full_like(lengths, top_k)
        listed = torch.where(lengths > LISTED_WHOLE, limit, lengths)
    listed = torch.where(scores.valid, listed, 0)
    keep = column < listed[row]
    if restrict:  # a set too large to be listed whole has a top k, and that lists nothing masked
        keep &= (x[order] > -torch.inf) | (lengths[row] <= LISTED_WHOLE)
    column = torch.where(keep, column, width)  # one column beyond, for what is not listed
    maximum, log_sum = norms.read(count)
    factor = inverse_temperature(given.temperature if given.flags & 4 else None)
    value = log_softmax(x[order], maximum[row], log_sum[row], factor[row] if factor is not None else None)
    has_set = (lengths > 0).unsqueeze(1)
    for out, values, unused in ((scores.top_ids, ids[order], -1), (scores.top_logprobs, value, -torch.inf)):
        placed = out.new_full((count, width + 1), unused)
        placed[row, column] = values
        out.copy_(torch.where(has_set, placed[:, :width], out))
