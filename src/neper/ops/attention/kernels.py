"""The kernels of paged attention: decodes in one, in parts of their contexts; longer chunks in two.

`decode_kernel` does all of the op for sequences of one token. A program norms and rotates the queries of one KV head,
attends to one part of the context, and leaves an unnormalised sum with its maximum and weight; the last program of a
sequence and head joins the parts in their order. The newest token never leaves the registers of the program that holds
it, so nothing that the kernel writes is read by it, and older K and V are loaded before the kernel ahead has ended.

`write_kernel` norms and rotates the tokens of longer chunks, queries into the output's own memory; `prefill_kernel`
reads a tile of them there, attends over the paged cache with an online softmax, and leaves the result in their place.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOG2E = tl.constexpr(1.4426950408889634)
# Views of one buffer of a step's inputs, and what such a view stands in for: their alignment must not be a compile key.
_INPUTS = ["positions", "slot_mapping", "context_lens", "block_tables", "table_stride", "tiles", "tickets"]


@triton.jit
def _row_mask(rows, columns, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """[R, WIDTH]: the rows that are there, and of their columns the first COUNT."""
    mask = rows[:, None]
    if COUNT < WIDTH:
        mask = mask & (columns < COUNT)[None, :]
    return mask


@triton.jit
def _load_vector(pointer, columns, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """[WIDTH] float32, 0 from COUNT on."""
    if COUNT < WIDTH:
        return tl.load(pointer + columns, mask=columns < COUNT, other=0.0).to(tl.float32)
    return tl.load(pointer + columns).to(tl.float32)


@triton.jit
def _slots(table, keys, inside, BLOCK: tl.constexpr):
    """The cache slots of a sequence's positions, int64; where not inside, some slot of the null block."""
    block = tl.load(table + keys // BLOCK, mask=inside, other=0)
    return block.to(tl.int64) * BLOCK + keys % BLOCK


@triton.jit
def _load_halves(pointers, mask, D: tl.constexpr):
    """The two halves of heads, each [R, HALF]; 0 outside the mask."""
    return tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + D // 2, mask=mask, other=0.0)


@triton.jit
def _load_vectors(pointer, columns, D: tl.constexpr, HALF: tl.constexpr):
    """The two halves of a vector of D values, each [1, HALF] float32."""
    first = _load_vector(pointer, columns, D // 2, HALF)
    return first[None, :], _load_vector(pointer + D // 2, columns, D // 2, HALF)[None, :]


@triton.jit
def _store_halves(pointers, x1, x2, mask, D: tl.constexpr):
    dtype = pointers.dtype.element_ty
    tl.store(pointers, x1.to(dtype), mask=mask)
    tl.store(pointers + D // 2, x2.to(dtype), mask=mask)


@triton.jit
def _norm(x1, x2, w1, w2, eps, D: tl.constexpr):
    """RMSNorm of heads given as halves [R, HALF], with the weights' halves; float32."""
    inverse = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / D + eps)[:, None]
    return x1 * inverse * w1, x2 * inverse * w2


@triton.jit
def _rotate(x1, x2, cos, sin, dtype: tl.constexpr):
    """Heads rotated and rounded, as the cache holds them."""
    return (x1 * cos - x2 * sin).to(dtype), (x2 * cos + x1 * sin).to(dtype)


@triton.jit
def _load_kv(k_head, v_head, table, start, end, TILE: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
             D: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """K and V of positions start.. of one head, in halves, [TILE, HALF] each; 0 from `end` on.

    Halves throughout: so all tiles have one layout, and a thread looks up few slots.
    """
    keys, half = start + tl.arange(0, TILE), tl.arange(0, HALF)
    inside = keys < end
    local = (_slots(table, keys, inside, BLOCK) * STRIDE)[:, None] + half[None, :]
    mask = _row_mask(inside, half, D // 2, HALF)
    k1, k2 = _load_halves(k_head + local, mask, D)
    v1, v2 = _load_halves(v_head + local, mask, D)
    return k1, k2, v1, v2


@triton.jit
def _merge(records, out, parts, SHARE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
           WAVE: tl.constexpr):  # fmt: skip
    """Join the records of all parts, WAVE of them on their way at a time, in their order, into `out` [SHARE, D]."""
    head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    mask = _row_mask(head < SHARE, column, D, WIDTH)
    place = head[:, None] * D + column[None, :]
    maximum = tl.full([HEADS, WIDTH], -float("inf"), tl.float32)
    weight = tl.zeros([HEADS, WIDTH], tl.float32)
    total = tl.zeros([HEADS, WIDTH], tl.float32)
    for start in range(0, parts, WAVE):
        for i in tl.static_range(WAVE):
            there = mask & (start + i < parts)
            record = records + (start + i) * (2 * SHARE * D) + place
            # Past the L1 cache, where what other multiprocessors wrote does not show.
            mean = tl.load(record, mask=there, other=0.0, cache_modifier=".cg")
            log_weight = tl.load(record + SHARE * D, mask=there, other=-float("inf"), cache_modifier=".cg")
            highest = tl.maximum(maximum, log_weight)
            kept, new = tl.exp2(maximum - highest), tl.exp2(log_weight - highest)
            weight = weight * kept + new
            total = total * kept + mean * new
            maximum = highest
    tl.store(out + place, (total / weight).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=_INPUTS)
def decode_kernel(
    qkv, qkv_stride, k_cache, v_cache, out, partials, tickets,
    positions, slot_mapping, context_lens, block_tables, table_stride,
    rotary, q_norm, k_norm, eps, scale, window,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WAVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads, parts at most, sequences); see `neper.ops.attention.launch` for the sizes."""
    kv_head, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    STRIDE: tl.constexpr = KV_HEADS * D
    dtype: tl.constexpr = qkv.dtype.element_ty
    context = tl.load(context_lens + seq)
    stride = tl.load(table_stride)
    newest = context - 1
    oldest = tl.maximum(context - window, 0)
    older = tl.maximum(newest - oldest, 0)
    each = tl.maximum(tl.cdiv(tl.cdiv(older, tl.num_programs(1)), TILE) * TILE, LEAST)
    skipped = split * each
    # The stride is never negative: named here, it is loaded together with the context, not after it.
    if (skipped >= tl.maximum(older, 1)) | (stride < 0):
        return
    # The last part has the fewest tokens, so the newest one is its.
    owner = skipped + each >= older
    begin = oldest + skipped
    end = tl.minimum(begin + each, newest)
    table = block_tables + seq.to(tl.int64) * stride
    position, slot = tl.load(positions + seq), tl.load(slot_mapping + seq)
    k_head, v_head = k_cache + kv_head * D, v_cache + kv_head * D
    half, row = tl.arange(0, HALF), tl.arange(0, ROWS)
    # No kernel of this step writes what is loaded up to the wait, and those of the last one have ended.
    k1, k2, v1, v2 = _load_kv(k_head, v_head, table, begin, end, TILE, BLOCK, STRIDE, D, HALF)
    cos, sin = _load_vectors(rotary + position.to(tl.int64) * D, half, D, HALF)
    if NORMED:
        qw1, qw2 = _load_vectors(q_norm, half, D, HALF)
        kw1, kw2 = _load_vectors(k_norm, half, D, HALF)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = qkv + seq.to(tl.int64) * qkv_stride + half[None, :]
    mask = _row_mask(row < SHARE, half, D // 2, HALF)
    q1, q2 = _load_halves(token + (kv_head * SHARE + row)[:, None] * D, mask, D)
    # The newest key and value once for each query, so that they meet in registers.
    same = token + (KV_HEADS * SHARE + kv_head + row * 0)[:, None] * D
    n1, n2 = _load_halves(same, mask, D)
    u1, u2 = _load_halves(same + STRIDE, mask, D)
    q1, q2, n1, n2 = q1.to(tl.float32), q2.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32)
    if NORMED:
        q1, q2 = _norm(q1, q2, qw1, qw2, eps, D)
        n1, n2 = _norm(n1, n2, kw1, kw2, eps, D)
    q1, q2 = _rotate(q1, q2, cos, sin, dtype)
    n1, n2 = _rotate(n1, n2, cos, sin, dtype)
    written = mask & ((row == 0) & owner & (slot >= 0))[:, None]
    into = slot.to(tl.int64) * STRIDE + (row * 0)[:, None] + half[None, :]
    _store_halves(k_head + into, n1, n2, written, D)
    _store_halves(v_head + into, u1, u2, written, D)

    # Scores are in units of log2: weights are exp2(score - maximum).
    scale2 = scale * _LOG2E
    score = tl.sum(q1.to(tl.float32) * n1.to(tl.float32) + q2.to(tl.float32) * n2.to(tl.float32), axis=1) * scale2
    score = tl.where(owner, score, -float("inf"))
    place = tl.arange(0, TILE)
    maximum = tl.full([ROWS], -float("inf"), tl.float32)
    weights = tl.zeros([ROWS, TILE], tl.float32)
    total1 = tl.zeros([ROWS, HALF], tl.float32)
    total2 = tl.zeros([ROWS, HALF], tl.float32)
    for start in range(begin, end, TILE):
        later = _load_kv(k_head, v_head, table, start + TILE, end, TILE, BLOCK, STRIDE, D, HALF)
        x = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        x = tl.dot(q2, tl.trans(k2), acc=x, input_precision="ieee")
        x = tl.where((start + place < end)[None, :], x * scale2, -float("inf"))
        highest = tl.maximum(maximum, tl.max(x, axis=1))
        kept = tl.exp2(maximum - highest)[:, None]
        p = tl.exp2(x - highest[:, None])
        weights = weights * kept + p
        p = p.to(dtype)
        total1 = tl.dot(p, v1, acc=total1 * kept, input_precision="ieee")
        total2 = tl.dot(p, v2, acc=total2 * kept, input_precision="ieee")
        maximum = highest
        k1, k2, v1, v2 = later
    highest = tl.maximum(maximum, score)
    kept, newest_weight = tl.exp2(maximum - highest), tl.exp2(score - highest)
    weight = tl.sum(weights, axis=1) * kept + newest_weight
    kept, newest_weight = (kept / weight)[:, None], (newest_weight / weight)[:, None]
    total1 = total1 * kept + u1.to(tl.float32) * newest_weight
    total2 = total2 * kept + u2.to(tl.float32) * newest_weight
    local = row[:, None] * D + half[None, :]
    heads = out + seq.to(tl.int64) * (STRIDE * SHARE) + kv_head * SHARE * D
    if older <= each:
        there = context > 0
        _store_halves(heads + local, tl.where(there, total1, 0.0), tl.where(there, total2, 0.0), mask, D)
    else:
        parts = tl.cdiv(older, each)
        pair = seq * KV_HEADS + kv_head
        # A record: the heads' means over a part, then their weights as logarithms, as wide as the means so that whoever
        # joins the parts holds both in one layout.
        records = partials + pair * tl.num_programs(1) * (2 * SHARE * D)
        record = records + split * (2 * SHARE * D) + local
        log_weight = tl.broadcast_to((highest + tl.log2(weight))[:, None], [ROWS, HALF])
        _store_halves(record, total1, total2, mask, D)
        _store_halves(record + SHARE * D, log_weight, log_weight, mask, D)
        tl.debug_barrier()  # the ticket releases what all threads have stored
        if tl.atomic_add(tickets + pair, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.store(tickets + pair, 0)
            _merge(records, heads, parts, SHARE, HEADS, D, WIDTH, WAVE)


@triton.jit(do_not_specialize=["first_row"], do_not_specialize_on_alignment=_INPUTS)
def write_kernel(
    qkv, qkv_stride, k_cache, v_cache, out, first_row, positions, slot_mapping, rotary, q_norm, k_norm, eps,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, NORMED: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows from first_row on, groups of HEADS query, key and value heads)."""
    row = first_row + tl.program_id(0).to(tl.int64)
    head, half = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    is_q, is_v = head < KV_HEADS * SHARE, head >= KV_HEADS * (SHARE + 1)
    cos, sin = _load_vectors(rotary + tl.load(positions + row).to(tl.int64) * D, half, D, HALF)
    slot = tl.load(slot_mapping + row).to(tl.int64)
    if NORMED:
        qw1, qw2 = _load_vectors(q_norm, half, D, HALF)
        kw1, kw2 = _load_vectors(k_norm, half, D, HALF)
        w1, w2 = tl.where(is_q[:, None], qw1, kw1), tl.where(is_q[:, None], qw2, kw2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mask = _row_mask(head < KV_HEADS * (SHARE + 2), half, D // 2, HALF)
    x1, x2 = _load_halves(qkv + row * qkv_stride + head[:, None] * D + half[None, :], mask, D)
    y1, y2 = x1.to(tl.float32), x2.to(tl.float32)
    if NORMED:
        y1, y2 = _norm(y1, y2, w1, w2, eps, D)
    y1, y2 = _rotate(y1, y2, cos, sin, qkv.dtype.element_ty)
    q = out + row * (KV_HEADS * SHARE * D) + head[:, None] * D + half[None, :]
    _store_halves(q, y1, y2, mask & is_q[:, None], D)
    into = slot * (KV_HEADS * D) + half[None, :]
    k = k_cache + into + (head - KV_HEADS * SHARE)[:, None] * D
    _store_halves(k, y1, y2, mask & (~is_q & ~is_v & (slot >= 0))[:, None], D)
    v = v_cache + into + (head - KV_HEADS * (SHARE + 1))[:, None] * D
    _store_halves(v, x1, x2, mask & (is_v & (slot >= 0))[:, None], D)


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
    mask = _row_mask(row < rows, column, D, WIDTH)
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
        mask_kv = _row_mask(inside, column, D, WIDTH)
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
