"""The kernels that choose a token of each row: the best one, or a seeded Gumbel draw among what the filters leave.

They compute what `reference` defines, without sorting. A draw is the argmax of noisy logits over the set K
that top-k, top-p and min-p leave, and K is a prefix of the order (logit descending, id ascending). So the argmax over
all ids is the answer if it is in K; else whatever stands after it is outside K too, and the argmax over the ids before
it is the next candidate. An id is in top-p's set iff the mass before it is less than top_p of all mass.

Kernels of a draw, in order: `best_kernel` leaves the best id of each tile of a row; `draw_kernel` the noisiest id of
each tile and the tile's mass, or lists the few ids that top-k can leave; `weigh_kernel` weighs what precedes the first
two candidates; `finish_kernel`, one program a row, decides, and goes on to further candidates where it must.
`best_kernel` also leaves moments of tiles. The others make top-n-sigma's floor of them, and read -inf below it.

Masses are sums of integers (units of 2^-40 of the best id's), so they have the same bits however a row is split.
"""

from __future__ import annotations

import triton
import triton.language as tl

from neper.ops.common.device_functions import await_turn, count_digits, digit_of, kth_largest, unsigned
from neper.ops.sampling.device_functions import (
    best_key,
    best_of_row,
    floor_of,
    key_id,
    key_value,
    load_left,
    load_tile,
    noisy_of,
    order_key,
    power_scale,
    precedes,
    share_of,
    store_moments,
    units,
)

TILE_IDS = 1024
LIST_IDS = 1024
"""Ids that a row with top-k lists at most; rows that would list more are searched."""

_TILE = tl.constexpr(TILE_IDS)
_LIST = tl.constexpr(LIST_IDS)
_GROUP = tl.constexpr(8)  # tiles that `finish_kernel` reads at once
_GREEDY = tl.constexpr(1e-5)
_NONE = tl.constexpr(-float("inf"))
_DEAD = tl.constexpr(-(2**63))  # below every key
_NAN = tl.constexpr(2**63 - 1)  # above every key: the value in it is a NaN
# What varies from launch to launch must not be a compile key.
_COUNTS = ["num_tiles", "tiles_per_program", "num_sums"]
_PER_ROW = ["temperature", "top_p", "top_k", "top_n_sigma"]


@triton.jit
def _moments(words, num_tiles):
    """The part of a row's scratch that top-n-sigma has."""
    return words + 11 * num_tiles + 16 + _LIST


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=["top_n_sigma"])
def best_kernel(
    logits, row_step, top_n_sigma, scratch, row_words, V, num_tiles, tiles_per_program,
    VEC: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    # Whatever is before this kernel may still be writing the logits or reading the scratch.
    await_turn(PDL)
    base = logits + row * row_step * UNIT
    words = scratch + row * row_words
    keys = words.to(tl.pointer_type(tl.int64))
    if program == 0:
        tl.store(words + 11 * num_tiles, 0)  # the list is empty
    begin = program * tiles_per_program
    for tile in range(begin, tl.minimum(begin + tiles_per_program, num_tiles)):
        x, ids = load_tile(base, tile * _TILE, V, _TILE // VEC, VEC, UNIT)
        strange = tl.max(tl.max((x != x).to(tl.int32), axis=1))
        key = best_key(x, ids)
        tl.store(keys + tile, tl.where(strange > 0, tl.full((), _NAN, tl.int64), key))
        if top_n_sigma is not None:  # noqa: SIM102 - this is known when the kernel is compiled, the other is not
            if tl.load(top_n_sigma + row) > 0:
                store_moments(_moments(words, num_tiles), tile, num_tiles, x, key_value(key))


@triton.jit
def _lists(k, V, num_tiles):
    """True where a row with top-k lists what the k-th largest of the tiles' maxima leaves.

    That bounds the k-th best logit from below, and leaves about k ids where k is not close to the number of tiles.
    """
    return (k > 0) & (k < V) & (k * 8 <= num_tiles * 7) & (k <= 400)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=[*_PER_ROW, "noise"])
def draw_kernel(
    logits, row_step, temperature, top_p, top_k, top_n_sigma, noise,
    scratch, row_words, V, num_tiles, tiles_per_program,
    PP: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, SPARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    # The parameters are no kernel's work.
    t = tl.load(temperature + row)
    p = tl.load(top_p + row)
    k = tl.load(top_k + row)
    n = tl.load(top_n_sigma + row)
    first = tl.load(noise + row * 2).to(tl.uint32, bitcast=True)
    second = tl.load(noise + row * 2 + 1).to(tl.uint32, bitcast=True)
    await_turn(PDL)
    if t >= _GREEDY:
        base = logits + row * row_step * UNIT
        words = scratch + row * row_words
        keys = words.to(tl.pointer_type(tl.int64))
        place = tl.arange(0, PP)
        best = tl.load(keys + place, mask=place < num_tiles, other=_DEAD)
        maximum = key_value(tl.max(best))
        begin = tl.program_id(0) * tiles_per_program
        end = tl.minimum(begin + tiles_per_program, num_tiles)
        if tl.abs(maximum) < float("inf"):
            floor = floor_of(words, _moments(words, num_tiles), n, maximum, num_tiles, PP)
            if _lists(k, V, num_tiles):
                bound = kth_largest(tl.where(place < num_tiles, unsigned(key_value(best), SPARE), 0), k, 32 - SPARE)
                count = words + 11 * num_tiles
                for tile in range(begin, end):
                    x, ids = load_left(base, tile * _TILE, V, floor, _TILE // VEC, VEC, UNIT)
                    member = (unsigned(x, SPARE) >= bound) & (x > _NONE)
                    # In any order: what is made of the list does not depend on it.
                    at = tl.atomic_add(count + tl.zeros_like(ids), 1, mask=member, sem="relaxed")
                    tl.store(count + 16 + at, ids, mask=member & (at < _LIST))
            else:
                scale = power_scale(t)
                values = (words + 10 * num_tiles).to(tl.pointer_type(tl.float32))
                mass = tl.zeros([_TILE // VEC], tl.int64)
                for tile in range(begin, end):
                    x, ids = load_left(base, tile * _TILE, V, floor, _TILE // VEC, VEC, UNIT)
                    key = best_key(noisy_of(x, ids, maximum, scale, first, second), ids)
                    tl.store(keys + num_tiles + tile, key)
                    id = key_id(key)
                    tl.store(values + tile, tl.load(base + id, mask=id < V, other=_NONE).to(tl.float32))
                    if p < 1.0:
                        mass += units(tl.sum(share_of(x, maximum, scale), axis=1))
                if p < 1.0:
                    tl.store(keys + 2 * num_tiles + tl.program_id(0), tl.sum(mass))


@triton.jit
def _mass_limit(p, total):
    """The bound of the mass before an id of top-p's set, float64."""
    return tl.where(p < 1.0, p.to(tl.float64) * total.to(tl.float64), float("inf"))


@triton.jit
def _needs_no_sum(share, id, best_id, total, p, min_p):
    """True where a candidate is surely in K: the best id always is, and no more can precede it than is not its own."""
    sure = (total - units(share)).to(tl.float64) < _mass_limit(p, total)
    return (id == best_id) | (sure & (share >= min_p))


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=[*_PER_ROW, "min_p"])
def weigh_kernel(
    logits, row_step, temperature, top_p, min_p, top_k, top_n_sigma,
    scratch, row_words, V, num_tiles, tiles_per_program,
    PP: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    t = tl.load(temperature + row)
    p = tl.load(top_p + row)
    m = tl.load(min_p + row)
    k = tl.load(top_k + row)
    n = tl.load(top_n_sigma + row)
    await_turn(PDL)
    if (t >= _GREEDY) & (p < 1.0) & ((k <= 0) | (k >= V)):
        base = logits + row * row_step * UNIT
        words = scratch + row * row_words
        keys = words.to(tl.pointer_type(tl.int64))
        place = tl.arange(0, PP)
        there = place < num_tiles
        best = tl.max(tl.load(keys + place, mask=there, other=_DEAD))
        noisy = tl.load(keys + num_tiles + place, mask=there, other=_DEAD)
        total = tl.sum(tl.load(keys + 2 * num_tiles + place, mask=place < tl.num_programs(0), other=0))
        values = (words + 10 * num_tiles).to(tl.pointer_type(tl.float32))
        value = tl.load(values + place, mask=there, other=_NONE)
        maximum = key_value(best)
        if tl.abs(maximum) < float("inf"):
            scale = power_scale(t)
            id = key_id(tl.max(noisy))
            cut = tl.load(base + id).to(tl.float32)
            if ~_needs_no_sum(share_of(cut, maximum, scale), id, key_id(best), total, p, m):
                # The second candidate, but for what else its predecessor's tile and its like hold.
                other = key_id(tl.max(tl.where(precedes(value, key_id(noisy), cut, id), noisy, _DEAD)))
                next_cut = tl.load(base + other, mask=(other >= 0) & (other < V), other=float("inf")).to(tl.float32)
                floor = floor_of(words, _moments(words, num_tiles), n, maximum, num_tiles, PP)
                mass = tl.zeros([_TILE // VEC], tl.int64)
                next_mass = tl.zeros([_TILE // VEC], tl.int64)
                program = tl.program_id(0)
                begin = program * tiles_per_program
                for tile in range(begin, tl.minimum(begin + tiles_per_program, num_tiles)):
                    x, ids = load_left(base, tile * _TILE, V, floor, _TILE // VEC, VEC, UNIT)
                    share = share_of(x, maximum, scale)
                    mass += units(tl.sum(tl.where(precedes(x, ids, cut, id), share, 0.0), axis=1))
                    next_mass += units(tl.sum(tl.where(precedes(x, ids, next_cut, other), share, 0.0), axis=1))
                tl.store(keys + 3 * num_tiles + program, tl.sum(mass))
                tl.store(keys + 4 * num_tiles + program, tl.sum(next_mass))


@triton.jit
def _mass_before(base, V, floor, cut, cut_id, maximum, scale, VEC: tl.constexpr, UNIT: tl.constexpr):
    """The mass of the ids before (cut, cut_id), in one pass over the row."""
    mass = tl.zeros([_GROUP * _TILE // VEC], tl.int64)
    for begin in range(0, V, _GROUP * _TILE):
        x, ids = load_left(base, begin, V, floor, _GROUP * _TILE // VEC, VEC, UNIT)
        share = tl.where(precedes(x, ids, cut, cut_id), share_of(x, maximum, scale), 0.0)
        mass += units(tl.sum(share, axis=1))
    return tl.sum(mass)


@triton.jit
def _end_of_top_k(base, V, floor, k, VEC: tl.constexpr, UNIT: tl.constexpr, SPARE: tl.constexpr):
    """The cut before which exactly the k best stand: (the k-th best logit, 1 + its id). All stand before (-inf, V)."""
    ROWS: tl.constexpr = _GROUP * _TILE // VEC
    found = tl.full((), 0, tl.uint32)
    unit = tl.full((), 1, tl.uint32) << ((33 - SPARE) // 2 * 2 - 2)
    for _ in range((33 - SPARE) // 2):
        counts = tl.full((), 0, tl.int64)
        for begin in range(0, V, _GROUP * _TILE):
            x, ids = load_left(base, begin, V, floor, ROWS, VEC, UNIT)
            counts += count_digits(tl.where(ids < V, unsigned(x, SPARE), 0), found, unit)
        found += digit_of(counts, k) * unit
        unit = unit >> 2
    above = tl.full((), 0, tl.int32)
    for begin in range(0, V, _GROUP * _TILE):
        x, ids = load_left(base, begin, V, floor, ROWS, VEC, UNIT)
        above += tl.sum(tl.sum((unsigned(x, SPARE) > found).to(tl.int32), axis=1))
    # Of those that are equal to the k-th, the first few: find the group of tiles that holds the last of them.
    wanted = k - above
    needed = tl.full((), 0, tl.int32)
    start = tl.full((), 0, tl.int32)
    for begin in range(0, V, _GROUP * _TILE):
        x, ids = load_left(base, begin, V, floor, ROWS, VEC, UNIT)
        equal = tl.sum(tl.sum(((unsigned(x, SPARE) == found) & (ids < V)).to(tl.int32), axis=1))
        here = (wanted > 0) & (wanted <= equal)
        start = tl.where(here, begin, start)
        needed = tl.where(here, wanted, needed)
        wanted -= equal
    x, ids = load_left(base, start, V, floor, ROWS, VEC, UNIT)
    tied = (unsigned(x, SPARE) == found) & (ids < V)
    place = start
    step = tl.full((), _GROUP * _TILE // 2, tl.int32)
    while step > 0:
        fewer = tl.sum(tl.sum((tied & (ids < place + step)).to(tl.int32), axis=1)) < needed
        place = tl.where(fewer, place + step, place)
        step = step >> 1
    cut = tl.max(tl.max(tl.where(ids == place, x, _NONE), axis=1))
    return cut, tl.where(cut == _NONE, V, place + 1)


@triton.jit
def _draw_listed(base, listed, count, best, scale, p, m, k, first, second):
    """The draw of a row whose top k are among `count` listed ids."""
    maximum = key_value(best)
    place = tl.arange(0, _LIST)
    live = place < count
    ids = tl.load(listed + place, mask=live, other=0)
    x = tl.load(base + ids, mask=live, other=_NONE).to(tl.float32)
    share = share_of(x, maximum, scale)
    rank = tl.zeros([_LIST], tl.int32)
    before = tl.zeros([_LIST], tl.int64)
    for begin in range(0, count, 8):
        one = begin + tl.arange(0, 8)
        other = tl.load(listed + one, mask=one < count, other=0)
        y = tl.load(base + other, mask=one < count, other=_NONE).to(tl.float32)
        better = precedes(y[None, :], other[None, :], x[:, None], ids[:, None])
        mass = units(share_of(y, maximum, scale))
        rank += tl.sum(better.to(tl.int32), axis=1)
        before += tl.sum(tl.where(better, mass[None, :], 0), axis=1)
    in_top_k = live & (rank < k)
    total = tl.sum(tl.where(in_top_k, units(share), 0))
    keep = in_top_k & (before.to(tl.float64) < _mass_limit(p, total)) & (share >= m)
    keep = keep | (live & (rank == 0))
    key = order_key(noisy_of(x, ids, maximum, scale, first, second), ids)
    return key_id(tl.max(tl.where(keep, key, _DEAD)))


@triton.jit
def _draw_searched(
    base, words, V, num_tiles, num_sums, unread, best, floor, scale, p, m, k, first, second,
    PP: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, SPARE: tl.constexpr,
):  # fmt: skip
    """The draw of any row, candidate by candidate.

    `unread`: `draw_kernel` made a list of the row instead, which overflowed. `num_sums`: parts that masses come in.
    """
    maximum = key_value(best)
    keys = words.to(tl.pointer_type(tl.int64))
    tile = tl.arange(0, PP)
    there = tile < num_tiles
    noisy = tl.load(keys + num_tiles + tile, mask=there & ~unread, other=_DEAD)
    value = tl.load((words + 10 * num_tiles).to(tl.pointer_type(tl.float32)) + tile, mask=there, other=_NONE)
    # A tile's noisiest id bounds what can be found in it. Of tiles that were not read nothing is known.
    noisy = tl.where(there & unread, order_key(tl.full([PP], float("inf"), tl.float32), tile * _TILE), noisy)
    there = there & (noisy > _DEAD)
    limited = (k > 0) & (k < V)
    cut = tl.full((), _NONE, tl.float32)
    cut_id = tl.zeros((), tl.int32) + V
    total = tl.full((), 0, tl.int64)
    if limited:
        cut, cut_id = _end_of_top_k(base, V, floor, k, VEC, UNIT, SPARE)
    if p < 1.0:
        if limited:
            total = _mass_before(base, V, floor, cut, cut_id, maximum, scale, VEC, UNIT)
        else:
            total = tl.sum(tl.load(keys + 2 * num_tiles + tile, mask=tile < num_sums, other=0))
    turn = tl.where(limited, 2, 0)
    id = tl.full((), 0, tl.int32)
    searching = tl.full((), 1, tl.int32)
    while searching > 0:
        # Tiles whose noisiest id is cut off are read again, as long as they may hold a better one than is known.
        fresh = there & precedes(value, key_id(noisy), cut, cut_id) & ~unread
        known = tl.max(tl.where(fresh, noisy, _DEAD))
        candidate = known
        pending = there & ~fresh
        bound = tl.max(tl.where(pending, noisy, _DEAD))
        while bound > candidate:
            group = key_id(bound) // (_GROUP * _TILE)
            x, ids = load_left(base, group * (_GROUP * _TILE), V, floor, _GROUP * _TILE // VEC, VEC, UNIT)
            x = tl.where(precedes(x, ids, cut, cut_id), x, _NONE)
            candidate = tl.maximum(candidate, best_key(noisy_of(x, ids, maximum, scale, first, second), ids))
            pending = pending & (tile // _GROUP != group)
            bound = tl.max(tl.where(pending, noisy, _DEAD))
        id = key_id(candidate)
        logit = tl.load(base + id, mask=id < V, other=_NONE).to(tl.float32)
        share = share_of(logit, maximum, scale)
        kept = _needs_no_sum(share, id, key_id(best), total, p, m)
        if ~kept & (share >= m):
            mass = tl.full((), 0, tl.int64)
            if (turn < 2) & (candidate == known):
                mass = tl.sum(tl.load(keys + (3 + turn) * num_tiles + tile, mask=tile < num_sums, other=0))
            else:
                mass = _mass_before(base, V, floor, logit, id, maximum, scale, VEC, UNIT)
            kept = mass.to(tl.float64) < _mass_limit(p, total)
        cut = logit
        cut_id = id
        turn += 1
        searching = tl.where(kept, 0, 1)
    return id


@triton.jit(
    do_not_specialize=_COUNTS, do_not_specialize_on_alignment=[*_PER_ROW, "min_p", "noise", "out_ids", "out_valid"]
)
def finish_kernel(
    logits, row_step, temperature, top_p, min_p, top_k, top_n_sigma, noise, scratch, row_words, out_ids, out_valid,
    V, num_tiles, num_sums,
    PP: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr, SPARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + row)
    p = tl.load(top_p + row)
    m = tl.load(min_p + row)
    k = tl.load(top_k + row)
    n = tl.load(top_n_sigma + row)
    first = tl.load(noise + row * 2).to(tl.uint32, bitcast=True)
    second = tl.load(noise + row * 2 + 1).to(tl.uint32, bitcast=True)
    await_turn(PDL)
    base = logits + row * row_step * UNIT
    words = scratch + row * row_words
    best = best_of_row(scratch, row, row_words, num_tiles, PP)
    valid = tl.abs(key_value(best)) < float("inf")
    id = key_id(best)
    if valid & (t >= _GREEDY):
        scale = power_scale(t)
        listing = _lists(k, V, num_tiles)
        count = tl.load(words + 11 * num_tiles)
        if listing & (count <= _LIST):
            listed = words + 11 * num_tiles + 16
            id = _draw_listed(base, listed, count, best, scale, p, m, k, first, second)
        else:
            floor = floor_of(words, _moments(words, num_tiles), n, key_value(best), num_tiles, PP)
            id = _draw_searched(
                base,
                words,
                V,
                num_tiles,
                num_sums,
                listing,
                best,
                floor,
                scale,
                p,
                m,
                k,
                first,
                second,
                PP,
                VEC,
                UNIT,
                SPARE,
            )
    tl.store(out_ids + row, tl.where(valid, id, 0))
    tl.store(out_valid + row, valid)
