"""The kernels of paged attention: one for sequences of few rows, which takes contexts in parts; two for longer chunks.

`decode_kernel` does all of the op for sequences of up to `MAX_WINDOW` tokens. A program takes one KV head of some parts
of a context. It streams their K and V, norms and rotates the queries, and keeps a sum with its weight and its maximum.
Each part is summed by itself, and the sums are folded in the parts' order. A program with all parts folds them in its
registers. Otherwise it leaves a record of each, and the last program of a sequence and head folds the records. Both
fold the same values with the same operations, so the bits do not depend on that choice. The step's own tokens are
folded first. They never leave the registers of the program that writes them, so nothing that the kernel writes is read
by it, and K and V stream in before the previous kernel has ended.

`write_kernel` norms and rotates the tokens of longer chunks, queries into the output's own memory; `prefill_kernel`
reads a tile of them there, attends over the paged cache with an online softmax, and leaves the result in their place.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from neper.ops.attention.device_functions import angles, load_pairs, norm_heads, norm_weights, row_mask
from neper.ops.attention.parts import ITEM_WORDS

_LOG2E = tl.constexpr(1.4426950408889634)
_ITEM_WORDS = tl.constexpr(ITEM_WORDS)
# Rows of a product, each a query head of a token. The number is fixed, so a row's bits follow from the row alone.
ROW_BLOCK = 16
_ROWS = tl.constexpr(ROW_BLOCK)
# Views of one buffer of a step's inputs, and what such a view stands in for: their alignment must not be a compile key.
_INPUTS = [
    "positions", "slot_mapping", "items", "num_items", "block_tables", "table_stride", "tiles", "tickets",
]  # fmt: skip


@triton.jit
def _fold(maximum, weight, total, part_maximum, part_weight, part_total):
    """Two sums as one. Each is the sum of values times exp2(score - maximum); maxima and weights are [R, 1].

    Fused products are written out: the compiler must not choose them differently in two places.
    """
    highest = tl.maximum(maximum, part_maximum)
    safe = tl.where(highest == -float("inf"), 0.0, highest)  # a query may see nothing of either
    kept, new = tl.exp2(maximum - safe), tl.exp2(part_maximum - safe)
    return highest, tl.fma(weight, kept, part_weight * new), tl.fma(total, kept, part_total * new)


@triton.jit
def _blocks(table, tile, older, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks of a tile's positions; from `older` on the null block, whose keys and values are 0."""
    place = tl.arange(0, TILE)
    if TILE % BLOCK == 0:
        block = tile * (TILE // BLOCK) + place // BLOCK
    else:
        block = (tile * TILE + place) // BLOCK
    return tl.load(table + block, mask=tile * TILE + place < older, other=0)


@triton.jit
def _load_kv(k_head, v_head, blocks, tile, TILE: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
             D: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """K and V of one head at a tile's positions, [TILE, WIDTH] each."""
    column, place = tl.arange(0, WIDTH), tl.arange(0, TILE)
    inside = place % BLOCK if TILE % BLOCK == 0 else (tile * TILE + place) % BLOCK
    local = blocks.to(tl.int64)[:, None] * (BLOCK * STRIDE) + (inside[:, None] * STRIDE + column[None, :])
    if D == WIDTH:
        return tl.load(k_head + local), tl.load(v_head + local)
    mask = (place >= 0)[:, None] & (column < D)[None, :]
    return tl.load(k_head + local, mask=mask, other=0.0), tl.load(v_head + local, mask=mask, other=0.0)


@triton.jit
def _rows(row, first_row, queries, kv_head, KV_HEADS: tl.constexpr, SHARE: tl.constexpr):
    """The query of each of a sequence's rows, its place among all heads of all flat rows, and whether it is there.

    Row r is head r % SHARE of query r // SHARE; rows behind the last one stand for the last query's.
    """
    query = tl.minimum(row // SHARE, queries - 1)
    place = ((first_row + query).to(tl.int64) * KV_HEADS + kv_head) * SHARE + row % SHARE
    return query, place, row < queries * SHARE


@triton.jit
def _begin(
    qkv, qkv_stride, k_head, v_head, slot_mapping, rotary, q_norm, k_norm, eps, scale2, window,
    group, first_row, queries, older, kv_head, owner,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, NORMED: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Queries ready to be multiplied, and their first sums: over the step's own tokens for the owner, else of nothing.

    The owner of the first rows writes the own tokens' K and V to the cache.
    """
    STRIDE: tl.constexpr = KV_HEADS * D
    dtype: tl.constexpr = qkv.dtype.element_ty
    column, token = tl.arange(0, WIDTH), tl.arange(0, _ROWS)
    every = row_mask(token < _ROWS, column, D, WIDTH)
    row = group * _ROWS + token
    query, _place, there = _rows(row, first_row, queries, kv_head, KV_HEADS, SHARE)
    mask = row_mask(there, column, D, WIDTH)
    slot = tl.load(slot_mapping + first_row + token, mask=token < queries, other=-1)
    cos, sin = angles(rotary, older + query, column, mask, D)
    if NORMED:
        w, u = norm_weights(q_norm, column, every, D)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    heads = qkv + (first_row + query).to(tl.int64)[:, None] * qkv_stride
    x, y = load_pairs(heads + (kv_head * SHARE + row % SHARE)[:, None] * D, column, mask, D)
    # Rows behind the last token stand for it.
    last, own = tl.minimum(token, queries - 1), every & owner
    tokens = qkv + (first_row + last).to(tl.int64)[:, None] * qkv_stride + (KV_HEADS * SHARE + kv_head) * D
    own_x, own_y = load_pairs(tokens, column, own, D)
    v = tl.load(tokens + STRIDE + column[None, :], mask=own, other=0.0)
    if NORMED:
        x, y = norm_heads(x, y, w, u, eps, D)
    q = (x * cos + y * sin).to(dtype)
    maximum = tl.full([_ROWS, 1], -float("inf"), tl.float32)
    weight = tl.zeros([_ROWS, 1], tl.float32)
    total = tl.zeros([_ROWS, WIDTH], tl.float32)
    if owner:
        own_cos, own_sin = angles(rotary, older + last, column, own, D)
        if NORMED:
            own_w, own_u = norm_weights(k_norm, column, every, D)
            own_x, own_y = norm_heads(own_x, own_y, own_w, own_u, eps, D)
        k = (own_x * own_cos + own_y * own_sin).to(dtype)
        written = every & ((slot >= 0) & (group == 0))[:, None]
        into = slot.to(tl.int64)[:, None] * STRIDE + column[None, :]
        tl.store(k_head + into, k, mask=written)
        tl.store(v_head + into, v, mask=written)
        if queries == 1:  # the rows of one token meet its key and value in registers
            maximum = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1, keep_dims=True) * scale2
            weight = tl.full([_ROWS, 1], 1.0, tl.float32)
            total = v.to(tl.float32)
        else:
            seen = (token[None, :] <= query[:, None]) & (token[None, :] > query[:, None] - window)
            weights = tl.zeros([_ROWS, _ROWS], tl.float32)
            maximum, weights, total = _attend(q, k, v, seen, scale2, maximum, weights, total)
            weight = tl.sum(weights, axis=1, keep_dims=True)
    return q, maximum, weight, total


@triton.jit
def _attend(q, k, v, seen, scale2, maximum, weights, total):
    """One more tile of keys and values in a part's sum; `weights` are added up at its end.

    Scores are in units of log2: weights are exp2(score - maximum).
    """
    x = tl.dot(q, tl.trans(k), input_precision="ieee")
    x = tl.where(seen, x * scale2, -float("inf"))
    highest = tl.maximum(maximum, tl.max(x, axis=1, keep_dims=True))
    safe = tl.where(highest == -float("inf"), 0.0, highest)  # a query may see nothing of this tile
    kept, p = tl.exp2(maximum - safe), tl.exp2(x - safe)
    total = tl.dot(p.to(v.dtype), v, acc=total * kept, input_precision="ieee")
    return highest, weights * kept + p, total


@triton.jit
def _merge(
    sums, maxima, weights, out, row, first_row, record, queries, kv_head, parts,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, WAVE: tl.constexpr,
):  # fmt: skip
    """Fold the records of all parts, for ROWS rows from `row` on, in their order; WAVE are loaded at a time."""
    row, column = row + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    _query, place, there = _rows(row, first_row, queries, kv_head, KV_HEADS, SHARE)
    _query, first, there = _rows(row, record, queries, kv_head, KV_HEADS, SHARE)
    mask, there, first = row_mask(there, column, D, WIDTH), there[:, None], first[:, None]
    maxima, weights, sums = maxima + first, weights + first, sums + (first * D + column[None, :])
    step = queries * (KV_HEADS * SHARE)
    maximum = tl.full([ROWS, 1], -float("inf"), tl.float32)
    weight = tl.zeros([ROWS, 1], tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, parts, WAVE):
        for i in tl.static_range(WAVE):
            at, inside = (start + i) * step, start + i < parts
            # Past the L1 cache, where what other multiprocessors wrote does not show.
            part_maximum = tl.load(maxima + at, mask=there & inside, other=-float("inf"), cache_modifier=".cg")
            part_weight = tl.load(weights + at, mask=there & inside, other=0.0, cache_modifier=".cg")
            part_total = tl.load(sums + at * D, mask=mask & inside, other=0.0, cache_modifier=".cg")
            maximum, weight, total = _fold(maximum, weight, total, part_maximum, part_weight, part_total)
    tl.store(out + place[:, None] * D + column[None, :], (total / weight).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["window", "row_groups"], do_not_specialize_on_alignment=_INPUTS)
def decode_kernel(
    qkv, qkv_stride, k_cache, v_cache, out, sums, maxima, weights, tickets,
    slot_mapping, items, num_items, block_tables, table_stride,
    rotary, q_norm, k_norm, eps, scale, window, row_groups,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, WAVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (KV heads x row groups, most items). A row group is `ROW_BLOCK` of a sequence's rows.

    See `neper.ops.attention.launch` for the sizes.
    """
    kv_head, group = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    item = items + tl.program_id(1) * _ITEM_WORDS
    count, stride = tl.load(num_items), tl.load(table_stride)
    seq, first_row, queries, context = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    part, behind, record = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    older = tl.maximum(context - queries, 0)
    oldest = tl.maximum(older - window + 1, 0)
    parts = tl.maximum(tl.minimum(tl.cdiv(older - oldest, LEAST), MOST), 1)
    # Of a window there are fewer parts than of the context.
    behind = tl.minimum(behind, parts)
    # The stride is never negative: named here, it is loaded together with the item, not after it.
    if (tl.program_id(1) >= count) | (part >= behind) | (group * _ROWS >= queries * SHARE) | (stride < 0):
        return
    number, whole = behind - part, behind - part == parts
    begin = oldest // TILE
    tiles = tl.maximum(tl.cdiv(older, TILE) - begin, 1)
    boundary, last = begin + (part + 1) * tiles // parts, begin + behind * tiles // parts
    table = block_tables + seq.to(tl.int64) * stride
    k_head, v_head = k_cache + kv_head * D, v_cache + kv_head * D
    column, key = tl.arange(0, WIDTH), tl.arange(0, TILE)
    row = group * _ROWS + tl.arange(0, _ROWS)
    query = tl.minimum(row // SHARE, queries - 1)
    scale2 = scale * _LOG2E
    q = tl.zeros([_ROWS, WIDTH], qkv.dtype.element_ty)
    maximum = tl.full([_ROWS, 1], -float("inf"), tl.float32)
    weight = tl.zeros([_ROWS, 1], tl.float32)
    total = tl.zeros([_ROWS, WIDTH], tl.float32)
    part_maximum = tl.full([_ROWS, 1], -float("inf"), tl.float32)
    part_weights = tl.zeros([_ROWS, TILE], tl.float32)
    part_total = tl.zeros([_ROWS, WIDTH], tl.float32)
    first = begin + part * tiles // parts
    blocks = _blocks(table, first, older, TILE, BLOCK)
    for tile in tl.range(first, last, num_stages=STAGES):
        # No kernel of this step writes what is loaded here, and those of the last one have ended.
        k, v = _load_kv(k_head, v_head, blocks, tile, TILE, BLOCK, KV_HEADS * D, D, WIDTH)
        blocks = _blocks(table, tile + 1, older, TILE, BLOCK)
        if tile <= first:  # in the loop, so that its first tiles are loaded before
            # The added 0 looks variable: what follows from it is not computed, and kept in registers, outside the loop.
            zero = tile - first
            q, maximum, weight, total = _begin(
                qkv, qkv_stride, k_head, v_head, slot_mapping, rotary, q_norm, k_norm, eps, scale2, window,
                group + zero, first_row + zero, queries + zero, older + zero, kv_head + zero, part == 0,
                KV_HEADS, SHARE, D, NORMED, WIDTH, PDL,
            )  # fmt: skip
        position = tile * TILE + key
        seen = (position < older)[None, :] & (position[None, :] > (older + query - window)[:, None])
        part_maximum, part_weights, part_total = _attend(q, k, v, seen, scale2, part_maximum, part_weights, part_total)
        if tile + 1 >= boundary:
            part_weight = tl.sum(part_weights, axis=1, keep_dims=True)
            maximum, weight, total = _fold(maximum, weight, total, part_maximum, part_weight, part_total)
            if not whole:
                zero = tile + 1 - boundary
                first_record = record + part * queries
                query, place, there = _rows(row + zero, first_record, queries + zero, kv_head, KV_HEADS, SHARE)
                mask = row_mask(there, column, D, WIDTH)
                tl.store(sums + place[:, None] * D + column[None, :], total, mask=mask)
                tl.store(maxima + place[:, None], maximum, mask=there[:, None])
                tl.store(weights + place[:, None], weight, mask=there[:, None])
                maximum = tl.full([_ROWS, 1], -float("inf"), tl.float32)
                weight = tl.zeros([_ROWS, 1], tl.float32)
                total = tl.zeros([_ROWS, WIDTH], tl.float32)
            part_maximum = tl.full([_ROWS, 1], -float("inf"), tl.float32)
            part_weights = tl.zeros([_ROWS, TILE], tl.float32)
            part_total = tl.zeros([_ROWS, WIDTH], tl.float32)
            part += 1
            boundary = begin + (part + 1) * tiles // parts
    if whole:
        result = tl.where(context > 0, total / weight, 0.0).to(out.dtype.element_ty)
        query, place, there = _rows(row, first_row, queries, kv_head, KV_HEADS, SHARE)
        tl.store(out + place[:, None] * D + column[None, :], result, mask=row_mask(there, column, D, WIDTH))
    else:
        tl.debug_barrier()  # the ticket releases what all threads have stored
        ticket = tickets + (seq * row_groups + group) * KV_HEADS + kv_head
        if tl.atomic_add(ticket, number, sem="acq_rel", scope="gpu") == parts - number:
            tl.store(ticket, 0)
            if queries * SHARE <= HEADS:
                _merge(
                    sums, maxima, weights, out, 0, first_row, record, queries, kv_head, parts,
                    KV_HEADS, SHARE, D, WIDTH, HEADS, WAVE,
                )  # fmt: skip
            else:
                _merge(
                    sums, maxima, weights, out, group * _ROWS, first_row, record, queries, kv_head, parts,
                    KV_HEADS, SHARE, D, WIDTH, _ROWS, WAVE // 2,
                )  # fmt: skip


@triton.jit(do_not_specialize=["first_row"], do_not_specialize_on_alignment=_INPUTS)
def write_kernel(
    qkv, qkv_stride, k_cache, v_cache, out, first_row, positions, slot_mapping, rotary, q_norm, k_norm, eps,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, NORMED: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows from first_row on, groups of HEADS query, key and value heads)."""
    row = first_row + tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, WIDTH)
    is_q, is_v = head < KV_HEADS * SHARE, head >= KV_HEADS * (SHARE + 1)
    mask = row_mask(head < KV_HEADS * (SHARE + 2), column, D, WIDTH)
    cos, sin = angles(rotary, tl.load(positions + row) + head * 0, column, mask, D)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    if NORMED:
        qw, qu = norm_weights(q_norm, column, mask, D)
        kw, ku = norm_weights(k_norm, column, mask, D)
        w, u = tl.where(is_q[:, None], qw, kw), tl.where(is_q[:, None], qu, ku)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x, y = load_pairs(qkv + row * qkv_stride + head[:, None] * D, column, mask, D)
    value = x
    if NORMED:
        x, y = norm_heads(x, y, w, u, eps, D)
    x = (x * cos + y * sin).to(qkv.dtype.element_ty)
    q = out + row * (KV_HEADS * SHARE * D) + head[:, None] * D + column[None, :]
    tl.store(q, x, mask=mask & is_q[:, None])
    into = slot * (KV_HEADS * D) + column[None, :]
    k = k_cache + into + (head - KV_HEADS * SHARE)[:, None] * D
    tl.store(k, x, mask=mask & (~is_q & ~is_v & (slot >= 0))[:, None])
    v = v_cache + into + (head - KV_HEADS * (SHARE + 1))[:, None] * D
    tl.store(v, value.to(qkv.dtype.element_ty), mask=mask & (is_v & (slot >= 0))[:, None])


@triton.jit
def _slots(table, keys, inside, BLOCK: tl.constexpr):
    """The cache slots of a sequence's positions, int64; where not inside, some slot of the null block."""
    block = tl.load(table + keys // BLOCK, mask=inside, other=0)
    return block.to(tl.int64) * BLOCK + keys % BLOCK


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=_INPUTS)
def prefill_kernel(
    k_cache, v_cache, out, tiles, positions, block_tables, table_stride, scale, window,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, tiles * PIECES), a piece being ROWS rows of a tile."""
    STRIDE: tl.constexpr = KV_HEADS * D
    head = tl.program_id(0)
    # The last tiles of a chunk see most: they begin first.
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    tile, skipped = tiles + index // PIECES * 3, index % PIECES * ROWS
    seq, first_row, rows = tl.load(tile), tl.load(tile + 1) + skipped, tl.load(tile + 2) - skipped
    if rows <= 0:
        return
    rows = tl.minimum(rows, ROWS)
    first_query = tl.load(positions + first_row)
    table = block_tables + seq.to(tl.int64) * tl.load(table_stride)
    k_head, v_head = k_cache + head // SHARE * D, v_cache + head // SHARE * D
    end = first_query + rows
    begin = tl.maximum(first_query - window + 1, 0) // TILE * TILE
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row, column, place = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    local = out + (first_row.to(tl.int64) * SHARE * STRIDE + head * D)
    local = local + row.to(tl.int64)[:, None] * (SHARE * STRIDE) + column[None, :]
    mask = row_mask(row < rows, column, D, WIDTH)
    q = tl.load(local, mask=mask, other=0.0)
    query = (first_query + row)[:, None]
    scale2 = scale * _LOG2E
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(begin, end, TILE):
        keys = start + place
        inside = keys < end
        local_kv = (_slots(table, keys, inside, BLOCK) * STRIDE)[:, None] + column[None, :]
        mask_kv = row_mask(inside, column, D, WIDTH)
        k = tl.load(k_head + local_kv, mask=mask_kv, other=0.0)
        v = tl.load(v_head + local_kv, mask=mask_kv, other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision="ieee")
        # Most tiles are seen by all queries.
        if (start + TILE > first_query + 1) | (start < end - window):
            key = keys[None, :]
            x = tl.where((key <= query) & (key > query - window), x, -float("inf"))
        highest = tl.maximum(maximum, tl.max(x, axis=1) * scale2)
        safe = tl.where(highest == -float("inf"), 0.0, highest)  # a query may see nothing of this tile
        kept = tl.exp2(maximum - safe)
        p = tl.exp2(x * scale2 - safe[:, None])
        weight = weight * kept + tl.sum(p, axis=1)
        total = tl.dot(p.to(v.dtype), v, acc=total * kept[:, None], input_precision="ieee")
        maximum = highest
    tl.store(local, (total / weight[:, None]).to(q.dtype), mask=mask)
