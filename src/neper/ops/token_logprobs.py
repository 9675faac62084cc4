"""token_logprobs: the public reduction of logits to scores. Checks what it is given; `backends` says who computes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from neper.errors import InvalidRequestError
from neper.ops import backends
from neper.ops.buffers import LogprobBuffers
from neper.ops.common.variants import compile_all
from neper.ops.logprobs.api import TokenLogprobs
from neper.ops.logprobs.token_sets import TokenSets


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor | None,
    top_k: int = 0,
    *,
    row_top_k: Tensor | None = None,
    temperature: Tensor | None = None,
    allowed: TokenSets | Sequence[Sequence[int]] | None = None,
    logprob_token_ids: TokenSets | Sequence[Sequence[int]] | None = None,
    rows: Tensor | None = None,
    out: LogprobBuffers | None = None,
) -> TokenLogprobs:
    """Logprob and rank of one token per row, and the row's top k.

    Args:
        logits: [N, V] float32, bfloat16 or float16, any row stride.
        token_ids: [R] int32 or int64, the token of each row, 0 <= id < V; -1 = the row's best (the greedy token).
            None = every row's best, which is the first of its list, `top_ids[:, 0]`, and costs nothing beyond it;
            needs top_k >= 1. On the CPU an id beyond the vocabulary is an error; a GPU would have to be waited for
            to notice, so there it scores as a masked id does (-inf).
        top_k: alternatives to list; more than V lists V, and -1 lists all V in order. Ids at -inf are never listed.
        row_top_k: [R] int32 or int64, fewer alternatives for some rows: row r lists min(top_k, row_top_k[r]). A row
            with 0 takes no part in the search.
        temperature: [R] float32. Scores of the tempered view: log-softmax of logits / temperature; order and rank stay
            those of the logits. Below 1e-5 = greedy, whose scores are the raw ones. NaN makes the row invalid. None =
            the raw view.
        allowed: a set of ids a row. Where it is not empty, logprob, rank and list are those of the distribution
            renormalised over exactly these ids; up to 1,024 of them are listed whole, whatever top_k is, also those
            at -inf. A token outside the set has logprob -inf.
        logprob_token_ids: a set of ids a row. Where it is not empty, it is listed in place of the top k: all of it, at
            full-vocabulary values, best first, also ids at -inf. A row has one kind of set at most.
        rows: [R] int32 or int64, the rows of `logits` to score, 0 <= row < N (which a GPU does not check), without
            copying them; None = all (R = N).
        out: memory to write to (see LogprobBuffers); the result is a view of it.

    Returns:
        TokenLogprobs; its lists have max(top_k, the longest set that is listed whole) places. A row's bits depend on
        that row and V alone (and on its set, where it has one), never on top_k, R or its neighbours.

    Raises:
        InvalidRequestError: on shapes that do not fit, ids of sets beyond the vocabulary, or buffers too small.
    """
    check_logits(logits)
    top_k = check_top_k(top_k)
    vocab = logits.shape[1]
    if vocab == 0:
        raise InvalidRequestError("logits must have a vocabulary of at least 1 id")
    if top_k < -1:
        raise InvalidRequestError(f"top_k must be at least 0, or -1 for all ids, got {top_k}", param="top_k")
    if token_ids is None and top_k == 0:
        raise InvalidRequestError("without token_ids top_k must be at least 1", param="top_k")
    if top_k == -1:
        top_k = vocab
    check_tensors(rows=rows)
    count = len(logits) if rows is None else rows.numel()
    check_per_row(count, logits.device, token_ids=token_ids, row_top_k=row_top_k, temperature=temperature, rows=rows)
    allowed = token_sets("allowed", allowed, count, vocab, logits.device)
    named = token_sets("logprob_token_ids", logprob_token_ids, count, vocab, logits.device)
    if allowed is not None and named is not None and ((allowed.lengths > 0) & (named.lengths > 0)).any():
        raise InvalidRequestError("a row has an allowed set or logprob_token_ids, not both")
    width = list_width(top_k, allowed, named)
    if out is not None:
        check_buffers(out, count, width, vocab, logits.device)
    if rows is not None and rows.device.type == "cpu":
        wrong = rows[(rows < 0) | (rows >= len(logits))]
        if len(wrong):
            raise InvalidRequestError(f"rows holds {int(wrong[0])}, but there are {len(logits)} rows of logits")
    scores = TokenLogprobs.empty(count, width, logits.device) if out is None else out.view(count, width)
    backends.scoring_of(logits).token_logprobs(
        logits,
        token_ids,
        top_k,
        out=scores,
        scratch=out.scratch if out is not None else None,
        row_top_k=row_top_k,
        temperature=temperature,
        allowed=allowed,
        named=named,
        rows=rows,
    )
    return scores


_ROW_DTYPES = {
    "token_ids": (torch.int64, torch.int32),
    "row_top_k": (torch.int32, torch.int64),
    "temperature": (torch.float32,),
    "rows": (torch.int64, torch.int32),
}


def check_logits(logits: Tensor) -> None:
    """Raise InvalidRequestError where `logits` are not [rows, vocabulary] of a dtype that is scored."""
    check_tensors(logits=logits)
    if logits.dim() != 2:
        raise InvalidRequestError(
            f"logits must be [rows, vocabulary], got {list(logits.shape)}"
            + "; logits[None] is one row" * (logits.dim() == 1)
        )
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InvalidRequestError(f"logits must be float32, bfloat16 or float16, got {_short(logits.dtype)}")


def check_top_k(top_k: int) -> int:
    """`top_k` as an int; InvalidRequestError where it is none, or so large that only memory would say so."""
    try:
        number = index(top_k)
    except TypeError:
        raise InvalidRequestError(f"top_k must be an integer, got {top_k!r}", param="top_k") from None
    if number > backends.MAX_KERNEL_VOCAB:
        raise InvalidRequestError(f"top_k {number} is beyond every vocabulary; -1 lists all ids", param="top_k")
    return number


def check_tensors(**values: Tensor | None) -> None:
    """Raise InvalidRequestError where one of these arguments is given and is no torch tensor."""
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor):
            raise InvalidRequestError(
                f"{name} must be a torch tensor, got {type(value).__name__}: torch.as_tensor(...)"
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_per_row(count: int, device: torch.device, **values: Tensor | None) -> None:
    """Raise InvalidRequestError where one of these arguments is given and is not [count], of its dtype, on `device`."""
    check_tensors(**values)
    for name, per_row in values.items():
        if per_row is None:
            continue
        if per_row.shape != (count,):
            one = "id" if name == "token_ids" else "value"
            raise InvalidRequestError(f"{name} must hold one {one} per row: got {list(per_row.shape)} for {count} rows")
        if per_row.dtype not in _ROW_DTYPES[name]:
            wanted = " or ".join(map(_short, _ROW_DTYPES[name]))
            raise InvalidRequestError(f"{name} must be {wanted}, got {_short(per_row.dtype)}")
        if per_row.device != device:
            raise InvalidRequestError(f"{name} is on {per_row.device}, but the logits are on {device}")


def list_width(top_k: int, allowed: TokenSets | None, named: TokenSets | None) -> int:
    """Places of a row's list that hold every list of a call."""
    return max(top_k, allowed.longest_listed if allowed is not None else 0, named.longest if named is not None else 0)


def check_buffers(out: LogprobBuffers, count: int, width: int, vocab: int, device: torch.device) -> None:
    """Raise InvalidRequestError where `out` is too small for `count` rows of `width` places, or not on `device`."""
    if not isinstance(out, LogprobBuffers):
        raise InvalidRequestError(f"out must be LogprobBuffers (see LogprobBuffers.allocate), got {type(out).__name__}")
    if out.scores.rank.device != device:
        raise InvalidRequestError(f"out is on {out.scores.rank.device}, but the logits are on {device}")
    places, columns = out.scores.top_ids.shape
    if places < count or columns < width or out.vocab_size < vocab:
        raise InvalidRequestError(
            f"out holds {places} rows of {columns} ids for a vocabulary of {out.vocab_size}, "
            f"but {count} rows of {width} for {vocab} are asked for"
        )


def token_sets(
    name: str, sets: TokenSets | Sequence[Sequence[int]] | None, count: int, vocab: int, device: torch.device
) -> TokenSets | None:
    """The sets of a call, None where all are empty."""
    if sets is None:
        return None
    if not isinstance(sets, TokenSets):
        sets = TokenSets.of(sets, device)
    if len(sets.lengths) != count:
        raise InvalidRequestError(f"{name} must hold one set per row: got {len(sets.lengths)} for {count} rows")
    if sets.max_id >= vocab:
        raise InvalidRequestError(f"{name} holds id {sets.max_id}, beyond the vocabulary of {vocab}")
    if sets.ids.device != device:
        raise InvalidRequestError(
            f"{name} is on {sets.ids.device}, but the logits are on {device}: TokenSets.of(sets, device)"
        )
    return sets if sets.longest else None


def warm_up(*, vocab_size: int, dtype: torch.dtype, max_top_k: int, device: torch.device | str) -> None:
    """Compile every kernel variant that serving such logits needs, so that no request waits for the compiler.

    Of token ids int32, as an engine passes them; other integers are variants of their own.
    Compiled kernels are kept on disk by Triton. Returns at once where the reference computes.
    """
    device = torch.device(device)
    ops = backends.scoring_of(torch.empty(1, vocab_size, dtype=dtype, device=device))
    compile_all([ops.variants(vocab_size, dtype, max_top_k, device)], device)
