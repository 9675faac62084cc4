"""The one order of ids, (logit descending, id ascending): the best id of a row, and its k best, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

# Ids are looked at in chunks of this many where that saves looking at most of them.
_CHUNK = 128
KEY_BYTES = 48
"""Bytes of working memory that `top_k_by_key` takes per element, its input included."""


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
    """The k best of each row.

    Args:
        x: [R, V] float32; rows with NaN come out in no particular order.
        k: 0 <= k <= V.

    Returns:
        values [R, k] float32, ids [R, k] int32. Which ids stand at -inf is not defined.
    """
    vocab = x.shape[1]
    if k == 0:
        return x.new_empty((len(x), 0)), x.new_empty((len(x), 0), dtype=torch.int32)
    if sorts_whole_rows(k, vocab):
        return top_k_by_key(x, torch.arange(vocab, device=x.device), k)
    # Every member of the top k lies in one of the k best chunks by (maximum descending, chunk ascending): any other
    # element is preceded by those k maxima.
    chunks = _chunks(x)
    _, best = top_k_by_key(chunks.amax(-1), torch.arange(chunks.shape[1], device=x.device), k)
    chunk = best.long().unsqueeze(-1)
    members = chunks.gather(1, chunk.expand(-1, -1, _CHUNK)).flatten(1)
    ids = (chunk * _CHUNK + torch.arange(_CHUNK, device=x.device)).flatten(1)
    values, ids = top_k_by_key(members, ids, k)
    return values, ids.clamp_(max=vocab - 1)


def sorts_whole_rows(k: int, vocab: int) -> bool:
    """True where `ordered_top_k` makes keys of all logits: k chunks would be a good part of the row."""
    return k * _CHUNK * 4 > vocab


def top_k_by_key(x: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of x [R, N] float32, whose ids are `ids` [R, N] or [N] int64, 0 <= id < 2^31 and distinct in a row.

    One top-k over 64-bit keys: the float's bits made monotonic, then the inverted id, so -inf has an order too. Returns
    values [R, k] float32 and ids [R, k] int32.
    """
    best = ((monotonic(x).long() << 32) | (0xFFFFFFFF - ids)).topk(k).values
    high = (best >> 32).int()
    values = (high ^ ((high >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return values, (0xFFFFFFFF - (best & 0xFFFFFFFF)).int()


def monotonic(x: Tensor) -> Tensor:
    """float32 -> int32 of the same shape and in the same order; both zeros are one value, so their ids decide."""
    bits = (x + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into +0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _chunks(x: Tensor) -> Tensor:
    """x [R, V] as [R, ceil(V / 128), 128], the last chunk filled up with -inf."""
    missing = -x.shape[1] % _CHUNK
    if missing:
        x = torch.nn.functional.pad(x, (0, missing), value=-torch.inf)
    return x.unflatten(1, (x.shape[1] // _CHUNK, _CHUNK))  # type: ignore[no-untyped-call, no-any-return]
