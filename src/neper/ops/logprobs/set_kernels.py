"""The kernels of named sets of ids: a row's scores renormalised over its set, and sets listed in order."""

from __future__ import annotations

import triton
import triton.language as tl

from neper.ops.logprobs.rows import load_factor, load_logit, load_token, row_base

_LOG2E = tl.constexpr(1.4426950408889634)
_BLOCK = tl.constexpr(1024)  # of a set's terms, added lane by lane: a row's bits depend on the row and its set alone
PART_IDS = 128
"""Ids of a set that one program of `list_kernel` places in order."""
_PART = tl.constexpr(PART_IDS)
_MIN = tl.constexpr(-float("inf"))
# Read a word at a time: how they are aligned must not be a compile key.
_PER_ROW = ["rows", "temperature", "set_ids", "set_offsets", "norms"]


@triton.jit
def _load_members(base, ids, begin, end, V, SIZE: tl.constexpr):
    """SIZE members from place `begin` on: their ids, logits (-inf beyond the set), and which exist."""
    place = begin + tl.arange(0, SIZE)
    inside = place < end
    id = tl.load(ids + place, mask=inside, other=0)
    x = tl.load(base + id, mask=inside & (id >= 0) & (id < V), other=_MIN).to(tl.float32)
    return id, x, inside


@triton.jit(
    do_not_specialize=["given", "norm_stride"],
    do_not_specialize_on_alignment=[*_PER_ROW, "token_ids", "out_logprob", "out_rank", "out_valid"],
)
def restrict_kernel(
    logits, row_step, rows, token_ids, temperature, given, set_ids, set_offsets, norms, norm_stride,
    out_logprob, out_rank, out_valid, V, UNIT: tl.constexpr,
):  # fmt: skip
    """Scores over the row's set alone; leaves its maximum and log-sum in `norms`."""
    row = tl.program_id(0)
    begin = tl.load(set_offsets + row)
    end = tl.load(set_offsets + row + 1)
    valid = tl.load(out_valid + row) != 0
    if valid & (end > begin):
        base = row_base(logits, row_step, UNIT, rows, row, given)
        factor = load_factor(temperature, row, given)
        token = load_token(token_ids, row, given)
        target = load_logit(base, token, V)
        best = tl.full([_BLOCK], _MIN, tl.float32)
        for place in range(begin, end, _BLOCK):
            _, x, _ = _load_members(base, set_ids, place, end, V, _BLOCK)
            best = tl.maximum(best, x)
        maximum = tl.max(best)
        target = tl.where(token < 0, maximum, target)
        terms = tl.zeros([_BLOCK], tl.float32)
        above = tl.zeros([_BLOCK], tl.int32)
        member = tl.zeros([_BLOCK], tl.int32)
        for place in range(begin, end, _BLOCK):
            id, x, inside = _load_members(base, set_ids, place, end, V, _BLOCK)
            terms += tl.where(inside, tl.exp2((x - maximum) * (factor * _LOG2E)), 0.0)
            above += (x > target).to(tl.int32)
            member = tl.maximum(member, (inside & (id == token)).to(tl.int32))
        possible = maximum > _MIN
        log_sum = tl.maximum(tl.log(tl.sum(terms)), 0.0)
        known = possible & ((tl.max(member) > 0) | (token < 0))
        tl.store(out_logprob + row, tl.where(known, (target - maximum) * factor - log_sum, _MIN))
        tl.store(out_rank + row, tl.where(possible, tl.sum(above) + 1, 0))
        tl.store(out_valid + row, possible)
        norm = norms + row.to(tl.int64) * norm_stride
        tl.store(norm, maximum.to(tl.int32, bitcast=True))
        tl.store(norm + 1, log_sum.to(tl.int32, bitcast=True))


@triton.jit(
    do_not_specialize=["given", "norm_stride", "out_stride", "width"],
    do_not_specialize_on_alignment=[*_PER_ROW, "out_top_ids", "out_top_logprobs", "out_valid"],
)
def list_kernel(
    logits, row_step, rows, temperature, given, set_ids, set_offsets, norms, norm_stride,
    out_top_ids, out_top_logprobs, out_stride, out_valid, V, width, UNIT: tl.constexpr,
):  # fmt: skip
    """Place _PART members of the row's set in its list: as many come before one as are better."""
    row = tl.program_id(1)
    begin = tl.load(set_offsets + row)
    end = tl.load(set_offsets + row + 1)
    mine = begin + tl.program_id(0) * _PART
    if mine < end:
        top_ids = out_top_ids + row.to(tl.int64) * out_stride
        top_logprobs = out_top_logprobs + row.to(tl.int64) * out_stride
        listed = tl.where(tl.load(out_valid + row) != 0, end - begin, 0)
        base = row_base(logits, row_step, UNIT, rows, row, given)
        id, x, inside = _load_members(base, set_ids, mine, end, V, _PART)
        place = mine + tl.arange(0, _PART)
        rank = tl.zeros([_PART], tl.int32)
        for other in range(begin, end, 32):
            _, y, there = _load_members(base, set_ids, other, end, V, 32)
            # Members stand in ascending order of ids.
            before = (other + tl.arange(0, 32))[None, :] < place[:, None]
            better = (y[None, :] > x[:, None]) | ((y[None, :] == x[:, None]) & before)
            rank += tl.sum((better & there[None, :]).to(tl.int32), axis=1)
        norm = norms + row.to(tl.int64) * norm_stride
        maximum = tl.load(norm).to(tl.float32, bitcast=True)
        log_sum = tl.load(norm + 1).to(tl.float32, bitcast=True)
        value = (x - maximum) * load_factor(temperature, row, given) - log_sum
        tl.store(top_ids + rank, id, mask=inside & (rank < listed))
        tl.store(top_logprobs + rank, value, mask=inside & (rank < listed))
        if mine == begin:
            for start in range(0, width, 128):
                column = start + tl.arange(0, 128)
                unused = (column >= listed) & (column < width)
                tl.store(top_ids + column, -1, mask=unused)
                tl.store(top_logprobs + column, _MIN, mask=unused)
