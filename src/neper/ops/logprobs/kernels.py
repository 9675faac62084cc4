"""The kernels of the reduction of logits to logprobs: each logit is read from memory once.

A row is cut into chunks of 128 ids. `read_kernel` leaves each chunk's maximum and its sum of exponentials, and counts
the logits above the token's; `select_kernel`, one program a row, joins the chunks and finds the top k. Chunks and the
trees of all sums depend on V and dtype alone, so a row's bits are the same for every k, row count, index and company.

Every member of the top k lies in a chunk whose maximum reaches the k-th best logit, and the k-th best of the maxima
over groups of chunks is a lower bound of that: it nearly always leaves about k chunks and a few more than k logits.
Where it leaves more than there is room for (ties, few groups), the k best are found by bisection over their bit
patterns, which takes the same time whatever the row holds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from neper.ops.common.device_functions import kth_largest, monotonic, unsigned
from neper.ops.logprobs.rows import load_factor, load_logit, load_token, row_base

# A tile is 1,024 ids: 8 chunks, each of 4 pieces of 32 ids at a distance of 256. So a warp's 16-byte loads are
# consecutive, and yet each lane holds 32 ids of one chunk: two or three shuffles join the lanes of a chunk, where a
# chunk of consecutive ids would take twelve.
TILE_IDS = 1024
_TILE = tl.constexpr(TILE_IDS)
_LOG2E = tl.constexpr(1.4426950408889634)
_DEAD = tl.constexpr(-(2**63))  # below every key
# Written a word at a time: how they are aligned must not be a compile key.
_OUTPUTS = ["out_logprob", "out_rank", "out_top_ids", "out_top_logprobs", "out_valid"]


@triton.jit
def _last_id(keys, ids, live, kth, k):
    """The largest id, among those whose key is `kth`, that belongs to the k best by (key descending, id ascending)."""
    spare = k - tl.sum((live & (keys > kth)).to(tl.int32))
    inverted = tl.where(live & (keys == kth), 0x1FFFFF - ids, 0).to(tl.uint32)
    return 0x1FFFFF - kth_largest(inverted, spare, 21).to(tl.int32)


@triton.jit
def _popcount(x):
    """Count the bits of uint32 `x` that are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24).to(tl.int32)


@triton.jit
def _write_set(mask, first, out, limit):
    """Write first [W] + column of every true place of mask [W, 32] to `out`, row by row, no more than `limit`.

    Returns how many there are. Few places are set, so only one word of bits a row is looked at again.
    """
    one = tl.full((), 1, tl.uint32)
    bits = tl.sum(tl.where(mask, one << tl.arange(0, 32).to(tl.uint32)[None, :], 0), axis=1).to(tl.uint32)
    count = _popcount(bits)
    end = tl.cumsum(count, axis=0)
    place = end - count
    for _ in range(tl.max(count)):
        rest = bits & (bits - 1)
        column = _popcount((bits ^ rest) - 1)
        tl.store(out + place, first + column, mask=(bits != 0) & (place < limit))
        bits = rest
        place += 1
    return tl.max(end)


@triton.jit
def _load_column(base, tile, V, column, LANES: tl.constexpr, VEC: tl.constexpr):
    """[LANES, 8, 4]: every VEC-th id of a tile, from `column` on."""
    lane = tl.arange(0, LANES)[:, None, None] * VEC
    chunk = tl.arange(0, 8)[None, :, None] * 32
    piece = tl.arange(0, 4)[None, None, :] * 256
    ids = tile * _TILE + lane + chunk + piece + column
    return tl.load(base + ids, mask=ids < V, other=-float("inf")).to(tl.float32)


@triton.jit
def _load_tile(base, tile, V, VEC: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):
    """[32 / VEC, 8, 4, VEC] float32: lane, chunk, piece, and the ids that a lane loads at once. -inf beyond V."""
    LANES: tl.constexpr = 32 // VEC
    if ALIGNED:
        PAIRS: tl.constexpr = WHOLE and base.dtype.element_ty == tl.bfloat16
        UNIT: tl.constexpr = 2 if PAIRS else 1
        lane = tl.arange(0, LANES)[:, None, None, None] * (VEC // UNIT)
        chunk = tl.arange(0, 8)[None, :, None, None] * (32 // UNIT)
        piece = tl.arange(0, 4)[None, None, :, None] * (256 // UNIT)
        ids = tile * (_TILE // UNIT) + lane + chunk + piece + tl.arange(0, VEC // UNIT)[None, None, None, :]
        if PAIRS:  # a shift or a mask a value, where a conversion takes up to two instructions
            pairs = tl.load(base.to(tl.pointer_type(tl.int32)) + ids)
            x = tl.join((pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True))
            x = tl.reshape(x, [LANES, 8, 4, VEC])
        elif WHOLE:
            x = tl.load(base + ids).to(tl.float32)
        else:
            x = tl.load(base + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
    else:
        # Rows that do not begin at 16 bytes: one id at a time, held by the same lanes, so that the sums are the same.
        if VEC == 8:
            low = tl.join(
                tl.join(_load_column(base, tile, V, 0, LANES, VEC), _load_column(base, tile, V, 4, LANES, VEC)),
                tl.join(_load_column(base, tile, V, 2, LANES, VEC), _load_column(base, tile, V, 6, LANES, VEC)),
            )
            high = tl.join(
                tl.join(_load_column(base, tile, V, 1, LANES, VEC), _load_column(base, tile, V, 5, LANES, VEC)),
                tl.join(_load_column(base, tile, V, 3, LANES, VEC), _load_column(base, tile, V, 7, LANES, VEC)),
            )
        else:
            low = tl.join(_load_column(base, tile, V, 0, LANES, VEC), _load_column(base, tile, V, 2, LANES, VEC))
            high = tl.join(_load_column(base, tile, V, 1, LANES, VEC), _load_column(base, tile, V, 3, LANES, VEC))
        x = tl.reshape(tl.join(low, high), [LANES, 8, 4, VEC])
    return x


@triton.jit
def _read_tile(
    base, tile, target, counts, scale, chunk_max, chunk_sum, V,
    VEC: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Store the maxima and sums of a tile's 8 chunks; returns `counts` plus the logits above `target`."""
    x = _load_tile(base, tile, V, VEC, ALIGNED, WHOLE)
    shape: tl.constexpr = x.shape
    maximum = tl.max(tl.max(tl.max(x, axis=3), axis=2), axis=0)
    # Terms are relative to the chunk's maximum. A chunk that is -inf throughout contributes 0; NaN stays NaN in the
    # sum, which is where it is noticed (maxima drop it).
    safe = tl.where(maximum == -float("inf"), 0.0, maximum)
    if FUSED and tl.max(tl.abs(safe)) * scale < 67108864.0:
        # x * scale - product is one operation where x - safe, times scale, is two. What rounding took from the product
        # is the same for all terms of a chunk and is given back to their sum; it stays small for products below 2^26.
        product = safe * scale
        lost = tl.fma(safe, tl.broadcast_to(scale, safe.shape), -product)
        terms = tl.exp2(tl.fma(x, tl.broadcast_to(scale, shape), tl.broadcast_to(-product[None, :, None, None], shape)))
        total = tl.sum(tl.sum(tl.sum(terms, axis=3), axis=2), axis=0) * tl.exp2(-lost)
    else:
        terms = tl.exp2((x - safe[None, :, None, None]) * scale)
        total = tl.sum(tl.sum(tl.sum(terms, axis=3), axis=2), axis=0)
    chunk = tile * 8 + tl.arange(0, 8)
    tl.store(chunk_max + chunk, maximum)
    tl.store(chunk_sum + chunk, total)
    # As floats: one compare-and-set and one addition a logit; integers would be counted through bit masks.
    return counts + tl.sum(tl.sum(tl.where(x > target, 1.0, 0.0), axis=3), axis=2)


@triton.jit(
    do_not_specialize=["given", "num_tiles", "tiles_per_program"],
    do_not_specialize_on_alignment=["rows", "token_ids", "temperature"],
)
def read_kernel(
    logits, row_step, rows, token_ids, temperature, given, scratch, row_words, V, num_tiles, tiles_per_program,
    VEC: tl.constexpr, UNIT: tl.constexpr, FUSED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    program = tl.program_id(0)
    if PDL:
        # Whatever is before this kernel may still be writing the logits or reading the scratch.
        gdc_wait()
        gdc_launch_dependents()
    base = row_base(logits, row_step, UNIT, rows, row, given)
    scale = load_factor(temperature, row, given) * _LOG2E
    token = load_token(token_ids, row, given)
    target = tl.where(token < 0, float("inf"), load_logit(base, token, V))
    chunk_max = scratch.to(tl.pointer_type(tl.float32)) + row.to(tl.int64) * row_words
    chunk_sum = chunk_max + num_tiles * 8
    counts = tl.zeros([32 // VEC, 8], tl.float32)
    begin = program * tiles_per_program
    end = tl.minimum(begin + tiles_per_program, num_tiles)
    whole = tl.minimum(end, V // _TILE)
    for tile in range(begin, whole):
        counts = _read_tile(base, tile, target, counts, scale, chunk_max, chunk_sum, V, VEC, UNIT == VEC, True, FUSED)
    if whole < end:
        counts = _read_tile(base, whole, target, counts, scale, chunk_max, chunk_sum, V, VEC, UNIT == VEC, False, FUSED)
    above = scratch + row.to(tl.int64) * row_words + num_tiles * 24
    tl.store(above + program, tl.sum(counts).to(tl.int32))


@triton.jit
def _first_of(chunk):
    """The first id of a chunk."""
    return (chunk >> 3 << 10) + ((chunk & 7) << 5)


@triton.jit
def _load_chunks(base, chunks, begin, num_chunks, V, COUNT: tl.constexpr):
    """COUNT of the listed chunks: logits [4 COUNT, 32] float32, which of them exist, and the pieces' first ids."""
    piece = tl.arange(0, COUNT * 4)
    place = begin + (piece >> 2)
    chunk = tl.load(chunks + place, mask=place < num_chunks, other=0)
    first = tl.multiple_of(_first_of(chunk) + ((piece & 3) << 8), 32)
    ids = first[:, None] + tl.arange(0, 32)[None, :]
    inside = (place < num_chunks)[:, None] & (ids < V)
    return tl.load(base + ids, mask=inside, other=-float("inf")).to(tl.float32), inside, first


@triton.jit
def _tied_chunks(base, chunk_max, kth, first_ids, C, V, SPARE: tl.constexpr):
    """For every chunk whose maximum is `kth`, the first id that holds it, into first_ids [C]."""
    e = tl.arange(0, 128)
    for begin in range(0, C, 32):
        chunk = begin + tl.arange(0, 32)
        top = tl.load(chunk_max + chunk, mask=chunk < C, other=-float("inf"))
        tied = (chunk < C) & (unsigned(top, SPARE) == kth)
        ids = _first_of(chunk)[:, None] + (((e >> 5) << 8) + (e & 31))[None, :]
        inside = tied[:, None] & (ids < V)
        x = tl.load(base + ids, mask=inside, other=-float("inf")).to(tl.float32)
        first = tl.min(tl.where(inside & (x == top[:, None]), ids, 0x1FFFFF), axis=1)
        tl.store(first_ids + chunk, first, mask=tied)


@triton.jit
def _exactly_k(
    base, chunk_max, cm, chunk, word, k, first_ids, chunks, ids_out, V, C, KP: tl.constexpr, SPARE: tl.constexpr
):
    """Write the ids of the k best, in any order, to `ids_out`; returns how many (fewer where the rest is -inf).

    k <= KP.
    """
    BITS: tl.constexpr = 32 - SPARE
    live = cm > -float("inf")
    keys = tl.where(live, unsigned(cm, SPARE), 0)
    kth = kth_largest(keys, k, BITS)
    num_chunks = _write_set(live & (keys >= kth), word, chunks, KP)
    if num_chunks > KP:
        # Equal maxima: those chunks come first whose first best id is lowest.
        _tied_chunks(base, chunk_max, kth, first_ids, C, V, SPARE)
        tl.debug_barrier()
        tied = live & (keys == kth)
        first = tl.load(first_ids + chunk, mask=tied, other=0)
        last = _last_id(keys, first, live, kth, k)
        num_chunks = _write_set((keys > kth) | (tied & (first <= last)), word, chunks, KP)
    tl.debug_barrier()
    x, inside, first_id = _load_chunks(base, chunks, 0, num_chunks, V, KP)
    inside = inside & (x > -float("inf"))
    ids = first_id[:, None] + tl.arange(0, 32)[None, :]
    xkeys = tl.where(inside, unsigned(x, SPARE), 0)
    xkth = kth_largest(xkeys, k, BITS)
    last_id = _last_id(xkeys, ids, inside, xkth, k)
    return _write_set((xkeys > xkth) | (inside & (xkeys == xkth) & (ids <= last_id)), first_id, ids_out, KP)


@triton.jit
def _select_top_k(
    base, chunk_max, cm, maximum, log_sum, factor, k, first_ids, lists, top_ids, top_logprobs, V, C,
    CP: tl.constexpr, GROUPS: tl.constexpr, KP: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """Write the k best of the row in order; returns how many there are (fewer than k where the rest is -inf)."""
    ROOM: tl.constexpr = 2 * KP
    SLAB: tl.constexpr = 32 if KP > 32 else KP
    groups = tl.max(tl.reshape(cm, [GROUPS, CP // GROUPS]), axis=1)
    better = tl.sum((groups[None, :] > groups[:, None]).to(tl.int32), axis=1)
    threshold = tl.min(tl.where(better < k, groups, float("inf")))  # the k-th largest
    cm = tl.reshape(cm, [CP // 32, 32])
    word = tl.arange(0, CP // 32) * 32
    chunk = word[:, None] + tl.arange(0, 32)[None, :]
    ids = lists + ROOM
    # What is -inf (beyond V, or masked) is never listed: rows with few ids left are quick too.
    num_chunks = _write_set((cm >= threshold) & (cm > -float("inf")), word, lists, ROOM)
    tl.debug_barrier()
    kept = tl.full((), 0, tl.int32)
    if num_chunks <= ROOM:
        for begin in range(0, num_chunks, SLAB):
            x, inside, first_id = _load_chunks(base, lists, begin, num_chunks, V, SLAB)
            kept += _write_set(inside & (x >= threshold) & (x > -float("inf")), first_id, ids + kept, ROOM - kept)
    if (num_chunks > ROOM) | (kept > ROOM):
        tl.debug_barrier()
        kept = _exactly_k(base, chunk_max, cm, chunk, word, k, first_ids, lists, ids, V, C, KP, SPARE)
    tl.debug_barrier()
    # All keys differ, so the number of better ones is a place in the list: no sort.
    j = tl.arange(0, ROOM)
    id = tl.load(ids + j, mask=j < kept, other=0)
    value = tl.load(base + id, mask=j < kept, other=-float("inf")).to(tl.float32)
    key = tl.where(j < kept, (monotonic(value).to(tl.int64) << 32) - id, _DEAD)
    place = tl.sum((key[None, :] > key[:, None]).to(tl.int32), axis=1)
    listed = (place < k) & (value > -float("inf"))
    tl.store(top_ids + place, id, mask=listed)
    tl.store(top_logprobs + place, (value - maximum) * factor - log_sum, mask=listed)
    return tl.sum(listed.to(tl.int32))


@triton.jit(
    do_not_specialize=["given", "out_stride", "num_tiles", "num_programs", "top_k", "width"],
    do_not_specialize_on_alignment=["rows", "token_ids", "temperature", "row_top_k", *_OUTPUTS],
)
def select_kernel(
    logits, row_step, rows, token_ids, temperature, row_top_k, given, scratch, row_words,
    out_logprob, out_rank, out_top_ids, out_top_logprobs, out_stride, out_valid,
    V, num_tiles, num_programs, top_k, width,
    CP: tl.constexpr, GROUPS: tl.constexpr, PP: tl.constexpr, KP: tl.constexpr, SPARE: tl.constexpr, UNIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    # What is loaded before the wait is older than `read_kernel`, which has waited for it before it let this one start.
    base = row_base(logits, row_step, UNIT, rows, row, given)
    factor = load_factor(temperature, row, given)
    token = load_token(token_ids, row, given)
    target = load_logit(base, token, V)
    k = tl.minimum(top_k, V)
    if given & 8:
        k = tl.minimum(k, tl.load(row_top_k + row).to(tl.int32))
    if PDL:
        gdc_wait()
    C = num_tiles * 8
    words = scratch + row.to(tl.int64) * row_words
    chunk_max = words.to(tl.pointer_type(tl.float32))
    chunk = tl.arange(0, CP)
    cm = tl.load(chunk_max + chunk, mask=chunk < C, other=-float("inf"))
    cs = tl.load(chunk_max + C + chunk, mask=chunk < C, other=0.0)
    first_ids = words + 2 * C
    above = words + 3 * C
    lists = above + num_tiles
    norm = (words + row_words - 16).to(tl.pointer_type(tl.float32))
    program = tl.arange(0, PP)
    rank = 1 + tl.sum(tl.load(above + program, mask=program < num_programs, other=0))
    maximum = tl.max(cm)
    safe = tl.where(maximum == -float("inf"), 0.0, maximum)
    total = tl.sum(cs * tl.exp2((cm - safe) * (factor * _LOG2E)))
    valid = (total > 0.0) & (total < float("inf"))
    log_sum = tl.maximum(tl.log(total), 0.0)  # the best alone adds 1, but for a rounding
    target = tl.where(token < 0, maximum, target)
    tl.store(out_logprob + row, tl.where(valid, (target - maximum) * factor - log_sum, -float("inf")))
    tl.store(out_rank + row, tl.where(valid, rank, 0))
    tl.store(out_valid + row, valid)
    tl.store(norm, maximum)
    tl.store(norm + 1, log_sum)
    top_ids = out_top_ids + row.to(tl.int64) * out_stride
    top_logprobs = out_top_logprobs + row.to(tl.int64) * out_stride
    found = tl.full((), 0, tl.int32)
    if valid & (k > 0):
        found = _select_top_k(
            base, chunk_max, cm, maximum, log_sum, factor, k, first_ids, lists, top_ids, top_logprobs, V, C,
            CP, GROUPS, KP, SPARE,
        )  # fmt: skip
    for begin in range(0, width, 64):
        column = begin + tl.arange(0, 64)
        unused = (column >= found) & (column < width)
        tl.store(top_ids + column, -1, mask=unused)
        tl.store(top_logprobs + column, -float("inf"), mask=unused)
