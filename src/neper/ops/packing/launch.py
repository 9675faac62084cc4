"""Packs a step's results as kernels: rows of any width at places that the host knows, and the table of last tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from neper.ops.common import await_turn
from neper.ops.launch import Variants, launch_options
from neper.ops.logprobs.results import TokenLogprobs
from neper.ops.sampling.common import best_of_row, key_id, key_value
from neper.ops.sampling.launch import num_tiles, row_words, scratch_words

_BLOCK = tl.constexpr(64)  # listed ids at once
# Read and written a word at a time: how they are aligned must not be a compile key.
_ROWS = ["offsets", "listed", "slots", "words", "last_tokens"]
_KEPT = ["kept_offsets", "kept_listed", "kept_slots"]
_RESULTS = ["ids", "valid", "rank", "logprob", "top_ids", "top_logprobs", "scores_valid"]


@dataclass(frozen=True)
class PackRows:
    """Where the results of S rows go, on the device of the logits; all [S] int32 and contiguous.

    Attributes:
        offsets: the row's first word in `words`; -1 = a padding row, for which nothing is written.
        listed: alternatives of the row; -1 = a row without scores.
        slots: the row's place in `last_tokens`.
    """

    offsets: Tensor
    listed: Tensor
    slots: Tensor


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=_ROWS)
def pack_best_kernel(
    offsets, slots, words, last_tokens, scratch, row_words, tiles, PP: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0)
    # The places are no kernel's work.
    offset = tl.load(offsets + row)
    slot = tl.load(slots + row)
    await_turn(PDL)
    best = best_of_row(scratch, row, row_words, tiles, PP)
    valid = tl.abs(key_value(best)) < float("inf")
    id = tl.where(valid, key_id(best), 0)
    if offset >= 0:
        tl.store(words + offset, id)
        tl.store(words + offset + 1, valid.to(tl.int32))
        tl.store(last_tokens + slot, id)


@triton.jit(do_not_specialize=["tiles", "chosen"], do_not_specialize_on_alignment=[*_ROWS, *_RESULTS, *_KEPT])
def keep_kernel(
    offsets, listed, slots, kept_offsets, kept_listed, kept_slots, last_tokens, ids, valid,
    scratch, row_words, tiles, chosen, PP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`chosen`: ids and valid are there; else they are the best, and are written."""
    row = tl.program_id(0)
    offset = tl.load(offsets + row)
    count = tl.load(listed + row)
    slot = tl.load(slots + row)
    await_turn(PDL)
    tl.store(kept_offsets + row, offset)
    tl.store(kept_listed + row, count)
    tl.store(kept_slots + row, slot)
    id = tl.full((), 0, tl.int32)
    if chosen:
        id = tl.load(ids + row)
    else:
        best = best_of_row(scratch, row, row_words, tiles, PP)
        good = tl.abs(key_value(best)) < float("inf")
        id = tl.where(good, key_id(best), 0)
        tl.store(ids + row, id)
        tl.store(valid + row, good)
    if offset >= 0:
        tl.store(last_tokens + slot, id)


@triton.jit(do_not_specialize=["list_stride", "given"], do_not_specialize_on_alignment=[*_ROWS, *_RESULTS])
def pack_chosen_kernel(
    offsets, listed, slots, words, last_tokens,
    ids, valid, rank, logprob, top_ids, top_logprobs, scores_valid, list_stride, given, PDL: tl.constexpr,
):  # fmt: skip
    """`given`: there are scores. logprob and top_logprobs are read as bits."""
    row = tl.program_id(0)
    offset = tl.load(offsets + row)
    count = tl.load(listed + row)
    slot = tl.load(slots + row)
    await_turn(PDL)
    top_ids += row.to(tl.int64) * list_stride
    top_logprobs += row.to(tl.int64) * list_stride
    if offset >= 0:
        good = tl.load(valid + row) != 0
        if (count >= 0) & (given != 0):
            good = good & (tl.load(scores_valid + row) != 0)
        id = tl.where(good, tl.load(ids + row), 0)
        out = words + offset
        tl.store(out, id)
        tl.store(last_tokens + slot, id)
        if count < 0:
            tl.store(out + 1, good.to(tl.int32))
        else:
            tl.store(out + 1, tl.where(good, tl.load(rank + row), 0))
            tl.store(out + 2, tl.load(logprob + row))
            for begin in range(0, count, _BLOCK):
                place = begin + tl.arange(0, _BLOCK)
                inside = place < count
                tl.store(out + 3 + place, tl.load(top_ids + place, mask=inside), mask=inside)
                tl.store(out + 3 + count + place, tl.load(top_logprobs + place, mask=inside), mask=inside)


def pack_best(rows: PackRows, words: Tensor, last_tokens: Tensor, scratch: Tensor, vocab_size: int) -> None:
    """Write each row's best token, of which `sampling_triton.best` left the parts in `scratch`: `[id, valid]`.

    Args:
        rows: none of them has scores; `listed` is not read.
        words: flat int32.
        last_tokens: [slots] int32; the row's slot gets its token too, 0 in an invalid row.
        scratch: as given to `best`, whose logits were [S, vocab_size].
    """
    count, tiles = len(rows.offsets), num_tiles(vocab_size)
    places = triton.next_power_of_2(tiles)
    if count:
        pack_best_kernel[(count,)](
            rows.offsets, rows.slots, words, last_tokens, scratch, row_words(vocab_size), tiles,
            PP=places, num_warps=max(1, places // 256), **launch_options(words.device),
        )  # fmt: skip


def keep(
    rows: PackRows,
    kept: PackRows,
    last_tokens: Tensor,
    ids: Tensor,
    valid: Tensor,
    scratch: Tensor,
    vocab_size: int,
    *,
    chosen: bool,
) -> None:
    """Keep the tokens for the next step, and what `pack_chosen` needs when the rows' own fields may be others'.

    Args:
        kept: where the fields of `rows` are copied to.
        last_tokens: [slots] int32; the slot of each row that is no padding gets its token.
        ids, valid: [S] int32 and [S] bool: what was chosen, or where each row's best token and its validity go.
        scratch: of `best`, whose logits were [S, vocab_size]; not read if `chosen`.
    """
    count, tiles = len(rows.offsets), num_tiles(vocab_size)
    places = triton.next_power_of_2(tiles)
    if count:
        keep_kernel[(count,)](
            rows.offsets, rows.listed, rows.slots, kept.offsets, kept.listed, kept.slots, last_tokens, ids, valid,
            scratch, row_words(vocab_size), tiles, int(chosen),
            PP=places, num_warps=max(1, places // 256), **launch_options(ids.device),
        )  # fmt: skip


def pack_chosen(
    rows: PackRows, words: Tensor, last_tokens: Tensor, ids: Tensor, valid: Tensor, scores: TokenLogprobs | None
) -> None:
    """Write each row's token, and what it has of scores, as `neper.types.PackedRows` describes.

    A row with scores is invalid, rank 0, where either `valid` or its scores say so; one without where `valid` does.

    Args:
        words: flat int32.
        last_tokens: [slots] int32; the row's slot gets its token too, 0 in an invalid row.
        ids, valid: [S] int32 and [S] bool.
        scores: fields [S, ...] int32, float32 and bool, lists at least as long as the longest listed; None where no
            row has scores.
    """
    # A pointer that is never followed stands in for what is not there.
    results = (rows.offsets, rows.offsets, rows.offsets, rows.offsets, valid)
    stride = 0
    if scores is not None:
        bits = scores.logprob.view(torch.int32), scores.top_logprobs.view(torch.int32)
        results = (scores.rank, bits[0], scores.top_ids, bits[1], scores.valid)
        stride = scores.top_ids.stride(0)
    count = len(rows.offsets)
    if count:
        pack_chosen_kernel[(count,)](
            rows.offsets, rows.listed, rows.slots, words, last_tokens, ids, valid, *results, stride,
            int(scores is not None), num_warps=1, **launch_options(words.device),
        )  # fmt: skip


def variants(vocab_size: int, device: torch.device) -> Variants:
    """What packing tokens of a vocabulary needs."""
    ints = torch.full((1,), -1, dtype=torch.int32, device=device)
    rows = PackRows(offsets=ints, listed=ints, slots=ints)
    valid = torch.zeros(1, dtype=torch.bool, device=device)
    scratch = torch.zeros(scratch_words(1, vocab_size), dtype=torch.int32, device=device)
    launches: list[Callable[[], Any]] = [
        partial(pack_best, rows, ints, ints, scratch, vocab_size),
        partial(keep, rows, rows, ints, ints.clone(), valid, scratch, vocab_size, chosen=False),
        partial(pack_chosen, rows, ints, ints, ints, valid, None),
    ]
    return Variants((pack_best_kernel, keep_kernel, pack_chosen_kernel), launches)
