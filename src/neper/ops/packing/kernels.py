"""The kernels that pack a step's results, and keep tokens for the next step."""

from __future__ import annotations

import triton
import triton.language as tl

from neper.ops.common.device_functions import await_turn
from neper.ops.sampling.device_functions import best_of_row, key_id, key_value

_BLOCK = tl.constexpr(64)  # listed ids at once
# Read and written a word at a time: how they are aligned must not be a compile key.
_ROWS = ["offsets", "listed", "slots", "words", "last_tokens"]
_KEPT = ["kept_offsets", "kept_listed", "kept_slots"]
_RESULTS = ["ids", "valid", "rank", "logprob", "top_ids", "top_logprobs", "scores_valid"]


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
