"""Logprobs in plain torch: the definition of what a logprob is here, the CPU path, and the oracle for faster kernels.

For one row of logits x[0..V), read as float32:

    M = max x        L = log sum exp(x - M)        logprob(i) = (x[i] - M) - L

M and L stay two numbers: folding them into one normaliser would let a large common offset eat L's low bits, and
`softmax().log()` is -inf at a gap of about 104.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from neper.errors import InvalidRequestError

# Terms of a row's sum are added in segments of this many, then the segments: the tree depends on V alone. torch's own
# sum over a whole row splits a lone long row between threads, so a row's bits would depend on its company.
_SUM_SEGMENT = 512
# Ids are looked at in chunks of this many where that saves looking at most of them.
_CHUNK = 128


class TokenLogprobs(NamedTuple):
    """Scores of R rows, on the device of the logits.

    Attributes:
        logprob: [R] float32, natural log, of the row's token.
        rank: [R] int32, 1 + the number of ids with a strictly greater logit; 0 in an invalid row.
        top_ids: [R, k] int32, by (logit descending, id ascending); -1 in unused places.
        top_logprobs: [R, k] float32; -inf in unused places.
        valid: [R] bool; False where the row holds NaN or +inf, or nothing above -inf. All else of such a row is
            filled: logprob -inf, rank 0, an empty list.
    """

    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    valid: Tensor

    def take(self, rows: slice) -> TokenLogprobs:
        """The scores of some rows."""
        return TokenLogprobs(*(field[rows] for field in self))


def token_logprobs(
    logits: Tensor, token_ids: Tensor | None, top_k: int = 0, *, rows: Tensor | None = None
) -> TokenLogprobs:
    """Logprob and rank of one token per row, and the row's top k.

    Args:
        logits: [N, V] float32, bfloat16 or float16, any row stride.
        token_ids: [R] int, the token of each row, 0 <= id < V. None = each row's best (the greedy token): it is the
            first of the list, `top_ids[:, 0]`, and costs nothing beyond it. Needs top_k >= 1.
        top_k: alternatives to list, 0 <= top_k; more than V lists V. Ids at -inf are never listed.
        rows: [R] int, the rows of `logits` to score; None = all (R = N).

    Returns:
        TokenLogprobs. A row's bits depend on that row and V alone, never on top_k, R or its neighbours.

    Raises:
        InvalidRequestError: on shapes that do not fit, or a negative top_k.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise InvalidRequestError(f"logits must be a [rows, vocabulary] float tensor, got {list(logits.shape)}")
    if top_k < 0:
        raise InvalidRequestError(f"top_k must be at least 0, got {top_k}", param="top_k")
    if rows is not None:
        logits = logits.index_select(0, rows.long())
    if token_ids is None and top_k == 0:
        raise InvalidRequestError("without token_ids top_k must be at least 1", param="top_k")
    if token_ids is not None and token_ids.shape != logits.shape[:1]:
        raise InvalidRequestError(
            f"token_ids must hold one id per row: got {list(token_ids.shape)} for {logits.shape[0]} rows"
        )
    x = logits.float().contiguous()  # torch's vector and strided kernels differ in the last bit
    count, vocab = x.shape
    k = min(top_k, vocab)
    if count == 0:
        empty = x.new_empty((0,))
        return TokenLogprobs(
            empty, empty.int(), x.new_empty((0, top_k), dtype=torch.int32), x.new_empty((0, top_k)), empty.bool()
        )
    maximum, log_sum = row_normaliser(x)
    valid = maximum.isfinite()  # amax keeps NaN, so a finite maximum means: no NaN, no +inf, something above -inf
    values, ids = ordered_top_k(x, k)
    if token_ids is None:
        chosen, rank = maximum, torch.ones_like(maximum, dtype=torch.int32)
    else:
        chosen = x.gather(1, token_ids.long().unsqueeze(1)).squeeze(1)
        rank = _rank(x, chosen, maximum, values)
    logprob = (chosen - maximum) - log_sum
    top_logprobs = (values - maximum.unsqueeze(1)) - log_sum.unsqueeze(1)
    listed = (values > -torch.inf) & valid.unsqueeze(1)
    return TokenLogprobs(
        logprob=logprob.masked_fill(~valid, -torch.inf),
        rank=rank.masked_fill(~valid, 0),
        top_ids=_widen(ids.masked_fill(~listed, -1), top_k, -1),
        top_logprobs=_widen(top_logprobs.masked_fill(~listed, -torch.inf), top_k, -torch.inf),
        valid=valid,
    )


def row_normaliser(x: Tensor) -> tuple[Tensor, Tensor]:
    """M and L of each row of x [R, V] float32: ([R], [R]) float32. Not finite in an invalid row."""
    maximum = x.amax(-1)
    # Not exp2, though it takes under half the time: torch's CPU exp2 computes the last few elements of each thread's
    # share with other code than the rest, so a row's bits would depend on its company and on the number of threads.
    terms = (x - maximum.unsqueeze(1)).exp_()
    return maximum, _sum_rows(terms).log_()


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best id of each row, the lowest among equals, and whether the row is valid.

    Args:
        logits: [R, V] float.

    Returns:
        ids [R] int64 (0 in an invalid row) and valid [R] bool.
    """
    # A maximum alone is many times as fast as a maximum with its place, so the place is sought in one chunk only.
    # Of equal maxima both steps take the first; NaN counts as the maximum.
    chunks = _chunks(logits)
    chunk = chunks.amax(-1).max(-1).indices
    maximum, place = chunks[torch.arange(len(logits), device=logits.device), chunk].max(-1)
    valid = maximum.isfinite()
    return (chunk * _CHUNK + place).masked_fill(~valid, 0), valid


def ordered_top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row in the one order of this project: value descending, id ascending.

    Args:
        x: [R, V] float32; rows with NaN come out in no particular order.
        k: 0 <= k <= V.

    Returns:
        values [R, k] float32, ids [R, k] int32. Which ids stand at -inf is not defined.
    """
    vocab = x.shape[1]
    if k == 0:
        return x.new_empty((len(x), 0)), x.new_empty((len(x), 0), dtype=torch.int32)
    if k * _CHUNK * 4 > vocab:
        values, ids = _top_k_by_key(x, torch.arange(vocab, device=x.device), k)
        return values, ids.int()
    # Every member of the top k lies in one of the k best chunks by (maximum descending, chunk ascending): any other
    # element is preceded by those k maxima.
    chunks = _chunks(x)
    _, best = _top_k_by_key(chunks.amax(-1), torch.arange(chunks.shape[1], device=x.device), k)
    best = best.unsqueeze(-1)
    members = chunks.gather(1, best.expand(-1, -1, _CHUNK)).flatten(1)
    ids = (best * _CHUNK + torch.arange(_CHUNK, device=x.device)).flatten(1)
    values, ids = _top_k_by_key(members, ids, k)
    return values, ids.clamp_(max=vocab - 1).int()


def _chunks(x: Tensor) -> Tensor:
    """x [R, V] as [R, ceil(V / 128), 128], the last chunk filled up with -inf."""
    missing = -x.shape[1] % _CHUNK
    if missing:
        x = torch.nn.functional.pad(x, (0, missing), value=-torch.inf)
    return x.unflatten(1, (x.shape[1] // _CHUNK, _CHUNK))  # type: ignore[no-untyped-call, no-any-return]


def _top_k_by_key(x: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of x [R, N] float32 by (value descending, id ascending), ids [R, N] or [N] int64 below 2^32.

    One top-k over 64-bit keys: the float's bits made monotonic, then the inverted id. Returns values [R, k] float32 and
    ids [R, k] int64.
    """
    bits = (x + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into +0.0: they are equal, so their ids decide
    monotonic = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    best = ((monotonic.long() << 32) | (0xFFFFFFFF - ids)).topk(k).values
    high = (best >> 32).int()
    values = (high ^ ((high >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return values, 0xFFFFFFFF - (best & 0xFFFFFFFF)


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
    known = torch.cat([maximum.unsqueeze(1), top_values], 1) if top_values.shape[1] == 0 else top_values
    rank = (known > chosen.unsqueeze(1)).sum(-1, dtype=torch.int32) + 1
    beyond = (chosen < known[:, -1]).numpy().nonzero()[0]
    if len(beyond):
        index = torch.from_numpy(beyond)
        counted = (x.index_select(0, index) > chosen.index_select(0, index).unsqueeze(1)).sum(-1, dtype=torch.int32)
        rank = rank.index_copy(0, index, counted + 1)
    return rank


def _widen(columns: Tensor, width: int, fill: float) -> Tensor:
    """Pad [R, k] to [R, width] with `fill`."""
    missing = width - columns.shape[1]
    return torch.nn.functional.pad(columns, (0, missing), value=fill) if missing else columns
