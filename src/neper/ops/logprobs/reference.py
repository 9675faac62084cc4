"""Logprobs in plain torch: the definition of what a logprob is here, the CPU path, and the oracle for faster kernels.

For one row of logits x[0..V), read as float32:

    M = max x        L = log sum exp(x - M)        logprob(i) = (x[i] - M) - L

M and L stay two numbers: folding them into one normaliser would let a large common offset eat L's low bits, and
`softmax().log()` is -inf at a gap of about 104. In the tempered view every x - M is multiplied by 1 / temperature.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from neper.errors import InvalidRequestError
from neper.ops.common.order import KEY_BYTES, ordered_top_k, sorts_whole_rows, top_k_by_key
from neper.ops.common.variants import Variants
from neper.ops.logprobs.api import TokenLogprobs
from neper.ops.logprobs.token_sets import TokenSets
from neper.types import LISTED_WHOLE

# Terms of a row's sum are added in segments of this many, then the segments: the tree depends on V alone. torch's own
# sum over a whole row splits a lone long row between threads, so a row's bits would depend on its company.
_SUM_SEGMENT = 512
# Working memory of a call, beside its results: rows are scored in tiles of this size, one row at least.
_TILE_BYTES = 64 * 2**20
# Of it per logit: the float32, its exponential or a copy that fills the last chunk up, keys of up to a quarter of them.
_LOGIT_BYTES = 24
# Below this a temperature means greedy, whose scores are those of the raw view.
_GREEDY = 1e-5


@torch.no_grad()
def token_logprobs(
    logits: Tensor,
    token_ids: Tensor | None,
    top_k: int,
    *,
    out: TokenLogprobs,
    scratch: Tensor | None = None,
    row_top_k: Tensor | None = None,
    temperature: Tensor | None = None,
    allowed: TokenSets | None = None,
    named: TokenSets | None = None,
    rows: Tensor | None = None,
) -> None:
    """See `ScoringOps.token_logprobs`; needs no scratch.

    Raises:
        InvalidRequestError: on the CPU, for a token id that is neither -1 nor in the vocabulary.
    """
    vocab = logits.shape[1]
    if token_ids is not None and token_ids.device.type == "cpu":
        _check_ids(token_ids, vocab)
    factor = inverse_temperature(temperature)
    k = min(top_k, vocab)
    for part, x in _tiles(logits, rows, k):
        _score(
            x,
            _part(token_ids, part),
            k,
            _part(row_top_k, part),
            _part(factor, part),
            allowed.take(part) if allowed is not None else None,
            named.take(part) if named is not None else None,
            out.take(part),
        )


def scratch_words(rows: int, vocab_size: int) -> int:
    """Torch allocates what it needs."""
    return 0


def variants(*_: Any, **__: Any) -> Variants:
    """Nothing is compiled."""
    return Variants((), [])


@torch.no_grad()
def list_top_k(
    logits: Tensor,
    top_k: int,
    *,
    row_top_k: Tensor | None,
    temperature: Tensor | None,
    rows: Tensor | None,
    maximum: Tensor,
    log_sum: Tensor,
    scores: TokenLogprobs,
) -> None:
    """Fill the lists of `scores`, whose other fields are there, given each row's M and L [R]."""
    factor = inverse_temperature(temperature)
    for part, x in _tiles(logits, rows, min(top_k, logits.shape[1])):
        values, ids = ordered_top_k(x, min(top_k, logits.shape[1]))
        norm = (maximum[part], log_sum[part], _part(factor, part))
        _write_top_k(scores.take(part), values, ids, _part(row_top_k, part), *norm)


def _tiles(logits: Tensor, rows: Tensor | None, k: int) -> Iterator[tuple[slice, Tensor]]:
    """The rows that are scored, some at a time: their places and their logits [n, V] float32."""
    vocab = logits.shape[1]
    count = len(logits) if rows is None else len(rows)
    tile = max(1, _TILE_BYTES // (vocab * (KEY_BYTES if k and sorts_whole_rows(k, vocab) else _LOGIT_BYTES)))
    for begin in range(0, count, tile):
        part = slice(begin, min(begin + tile, count))
        selected = logits[part] if rows is None else logits.index_select(0, rows[part].long())
        yield part, selected.float().contiguous()  # torch's vector and strided kernels differ in the last bit


def inverse_temperature(temperature: Tensor | None) -> Tensor | None:
    """The factor of the tempered view, [R] float32: 1 for greedy rows, and above 0, since 0 times -inf is no number."""
    if temperature is None:
        return None
    return torch.where(temperature < _GREEDY, 1.0, temperature.reciprocal()).clamp(min=torch.finfo(torch.float32).tiny)


def row_normaliser(x: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """M and L of each row of x [R, V] float32: ([R], [R]) float32. Not finite in an invalid row.

    `factor` [R] float32 is 1 / temperature of the tempered view: L = log sum exp((x - M) * factor).
    """
    maximum, total = exp_sums(x, factor)
    return maximum, total.log_()


def exp_sums(x: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """M = max x and sum exp(x - M) of each row of x [R, V] float32; the sum is NaN where M is not finite."""
    maximum = x.amax(-1)
    terms = x - maximum.unsqueeze(1)
    if factor is not None:
        terms.mul_(factor.unsqueeze(1))
    # Not exp2, though it takes under half the time: torch's CPU exp2 computes the last few elements of each thread's
    # share with other code than the rest, so a row's bits would depend on its company and on the number of threads.
    return maximum, _sum_rows(terms.exp_())


def _score(
    x: Tensor,
    token_ids: Tensor | None,
    k: int,
    row_top_k: Tensor | None,
    factor: Tensor | None,
    allowed: TokenSets | None,
    named: TokenSets | None,
    scores: TokenLogprobs,
) -> None:
    """Score the rows of x [R, V] float32 into `scores`."""
    maximum, log_sum = row_normaliser(x, factor)
    # amax keeps NaN, so a finite maximum means: no NaN, no +inf, something above -inf.
    valid = maximum.isfinite() if factor is None else maximum.isfinite() & log_sum.isfinite()
    values, ids = _search(x, maximum, k, row_top_k)
    if token_ids is None:
        chosen, rank = maximum, torch.ones_like(maximum, dtype=torch.int32)
    else:
        chosen = _logits_of(x, token_ids, maximum)
        rank = _rank(x, chosen, maximum, values)
    scores.valid.copy_(valid)
    _write_token(scores, log_softmax(chosen, maximum, log_sum, factor), rank)
    _write_top_k(scores, values, ids, row_top_k, maximum, log_sum, factor)
    # Rows with sets are few, and the sets of any length; the host knows which rows have one.
    for row, ids in _each(allowed):
        here = slice(row, row + 1)
        _score_within(
            ids, x[here], _part(token_ids, here), k, _part(row_top_k, here), _part(factor, here), scores.take(here)
        )
    for row, ids in _each(named):
        here = slice(row, row + 1)
        values, ids = top_k_by_key(x[here].index_select(1, ids), ids, len(ids))
        logprobs = log_softmax(values, maximum[here], log_sum[here], _part(factor, here))
        _write_list(scores.take(here), ids, logprobs, torch.ones_like(values, dtype=torch.bool))


def _part(per_row: Tensor | None, rows: slice) -> Tensor | None:
    return None if per_row is None else per_row[rows]


def _each(sets: TokenSets | None) -> Iterator[tuple[int, Tensor]]:
    """The rows that have a set, and its ids [n] int64."""
    if sets is not None:
        for row in sets.lengths.nonzero()[0].tolist():
            yield row, sets.row(row).long()


def _score_within(
    allowed: Tensor,
    x: Tensor,
    token_id: Tensor | None,
    k: int,
    row_top_k: Tensor | None,
    factor: Tensor | None,
    scores: TokenLogprobs,
) -> None:
    """Score one row x [1, V] over the ids `allowed` [n] int64 alone, into `scores`, which hold the row's validity.

    A token outside the set has no probability, and the rank that its own logit would have among the set's.
    """
    members = x.index_select(1, allowed)
    maximum, log_sum = row_normaliser(members, factor)
    scores.valid.logical_and_(maximum.isfinite())
    if token_id is None:
        chosen, rank = maximum, torch.ones_like(maximum, dtype=torch.int32)
    else:
        logit = _logits_of(x, token_id, maximum)
        rank = (members > logit).sum(-1, dtype=torch.int32) + 1
        chosen = logit.masked_fill(~((allowed == token_id).any() | (token_id < 0)), -torch.inf)
    _write_token(scores, log_softmax(chosen, maximum, log_sum, factor), rank)
    if len(allowed) <= LISTED_WHOLE:
        values, ids = top_k_by_key(members, allowed, len(allowed))
        listed = torch.ones_like(values, dtype=torch.bool)
        _write_list(scores, ids, log_softmax(values, maximum, log_sum, factor), listed)
    else:
        values, ids = top_k_by_key(members, allowed, min(k, len(allowed)))
        _write_top_k(scores, values, ids, row_top_k, maximum, log_sum, factor)


def log_softmax(values: Tensor, maximum: Tensor, log_sum: Tensor, factor: Tensor | None) -> Tensor:
    """Logprobs of `values` [R] or [R, n], logits of R rows, given each row's M, L and factor [R]."""
    if values.dim() == 2:
        maximum, log_sum = maximum.unsqueeze(1), log_sum.unsqueeze(1)
        factor = factor.unsqueeze(1) if factor is not None else None
    gap = values - maximum
    if factor is not None:
        gap = gap * factor
    return gap - log_sum


def _write_token(scores: TokenLogprobs, logprob: Tensor, rank: Tensor) -> None:
    """Write logprob [R] float32 and rank [R] int32 to the rows that are valid, the fillings to the others."""
    invalid = ~scores.valid
    scores.logprob.copy_(logprob.masked_fill(invalid, -torch.inf))
    scores.rank.copy_(rank.masked_fill(invalid, 0))


def _write_top_k(
    scores: TokenLogprobs,
    values: Tensor,
    ids: Tensor,
    row_top_k: Tensor | None,
    maximum: Tensor,
    log_sum: Tensor,
    factor: Tensor | None,
) -> None:
    """Write the best ids [R, k] and their logits, but for what is masked or beyond the row's own k."""
    listed = values > -torch.inf
    if row_top_k is not None:
        listed &= torch.arange(values.shape[1], device=values.device) < row_top_k.unsqueeze(1)
    _write_list(scores, ids, log_softmax(values, maximum, log_sum, factor), listed)


def _write_list(scores: TokenLogprobs, ids: Tensor, logprobs: Tensor, listed: Tensor) -> None:
    """Write the `listed` of ids and logprobs [R, n] to the first n places of rows that are valid; fill all others."""
    n = ids.shape[1]
    unused = ~(listed & scores.valid.unsqueeze(1))
    scores.top_ids[:, :n].copy_(ids.masked_fill(unused, -1))
    scores.top_logprobs[:, :n].copy_(logprobs.masked_fill(unused, -torch.inf))
    scores.top_ids[:, n:].fill_(-1)
    scores.top_logprobs[:, n:].fill_(-torch.inf)


def _check_ids(token_ids: Tensor, vocab: int) -> None:
    """Raise InvalidRequestError for an id that is neither -1 nor below `vocab`."""
    ids = token_ids.numpy()
    wrong = ids[(ids < -1) | (ids >= vocab)]
    if len(wrong):
        raise InvalidRequestError(
            f"token id {wrong[0]} is not in the vocabulary of {vocab} (-1 stands for a row's best)", param="token_ids"
        )


def _logits_of(x: Tensor, token_ids: Tensor, maximum: Tensor) -> Tensor:
    """The logit [R] of each row's token: `maximum` for -1, -inf for an id beyond the vocabulary."""
    vocab = x.shape[1]
    logit = x.gather(1, token_ids.long().clamp(0, vocab - 1).unsqueeze(1)).squeeze(1)
    logit = torch.where(token_ids < 0, maximum, logit)
    return logit.masked_fill_(token_ids >= vocab, -torch.inf)


def _search(x: Tensor, maximum: Tensor, k: int, row_top_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """`ordered_top_k`; on the CPU without what no row lists.

    There rows that list nothing are not searched: their maximum stands in all places, so that `_rank` knows it. The
    rest is as wide as the longest list.
    """
    if row_top_k is None or x.device.type != "cpu":
        return ordered_top_k(x, k)
    wanted = row_top_k.numpy()
    k = min(k, max(0, int(wanted.max(initial=0))))
    searched = (wanted > 0).nonzero()[0]
    if k == 0 or len(searched) == len(x):
        return ordered_top_k(x, k)
    index = torch.from_numpy(searched)
    found_values, found_ids = ordered_top_k(x.index_select(0, index), k)
    values = maximum.unsqueeze(1).repeat(1, k).index_copy_(0, index, found_values)
    return values, found_ids.new_zeros(values.shape).index_copy_(0, index, found_ids)


def _sum_rows(terms: Tensor) -> Tensor:
    """Sum of each row [R, V] -> [R], by a tree that depends on V alone."""
    vocab = terms.shape[1]
    whole = vocab - vocab % _SUM_SEGMENT
    parts = terms[:, :whole].reshape(len(terms), whole // _SUM_SEGMENT, _SUM_SEGMENT).sum(-1)
    if whole < vocab:
        parts = torch.cat([parts, terms[:, whole:].sum(-1, keepdim=True)], 1)
    return parts.sum(-1)


def _rank(x: Tensor, chosen: Tensor, maximum: Tensor, top_values: Tensor) -> Tensor:
    """[R] int32: 1 + the number of strictly greater logits.

    On the CPU a token at or above the last listed value is ranked within the list, which saves a pass over the row.
    """
    if x.device.type != "cpu":
        return (x > chosen.unsqueeze(1)).sum(-1, dtype=torch.int32) + 1
    known = maximum.unsqueeze(1) if top_values.shape[1] == 0 else top_values
    rank = (known > chosen.unsqueeze(1)).sum(-1, dtype=torch.int32) + 1
    beyond = (chosen < known[:, -1]).numpy().nonzero()[0]
    if len(beyond):
        index = torch.from_numpy(beyond)
        counted = (x.index_select(0, index) > chosen.index_select(0, index).unsqueeze(1)).sum(-1, dtype=torch.int32)
        rank = rank.index_copy(0, index, counted + 1)
    return rank
