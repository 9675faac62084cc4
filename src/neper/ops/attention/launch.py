"""Launches the attention kernels: what they are compiled for, how contexts are split, and their scratch.

It satisfies `neper.ops.attention.api.AttentionOps`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from neper.ops.attention import parts
from neper.ops.attention.api import MAX_WINDOW, QUERY_TILE, AttentionGroup, AttentionInputs, AttentionScratch
from neper.ops.attention.kernels import ROW_BLOCK, decode_kernel, prefill_kernel, write_kernel
from neper.ops.attention.parts import Planner
from neper.ops.common.launching import launch_options, traits
from neper.ops.common.variants import Variants

# Programs of `decode_kernel` that a multiprocessor is to hold, and the warps of one.
_DECODES_PER_PROCESSOR = 2
_DECODE_WARPS = 4
# Most tokens of a tile; its bytes of K and V, and the stages of its loop, with much and with little shared memory.
_DECODE_TILE = 64
_DECODE_ROOMY, _DECODE_NARROW = {"bytes": 32_768, "stages": 3}, {"bytes": 16_384, "stages": 2}
# Contexts of the most parts that there are records for.
_RECORDS = 32
# Parts that are loaded at a time when they are joined.
_WAVE = 8
# Heads of a program of `write_kernel`.
_WRITTEN_HEADS = 8
# No window is one longer than any context.
_NO_WINDOW = 2**30


def decode_sizes(head_dim: int, item_bytes: int, share: int, roomy: bool) -> dict[str, Any]:
    """Sizes and options that `decode_kernel` is compiled with, for values of so many bytes; roomy: see `Traits`.

    Args:
        share: query heads of a KV head.
    """
    width, room = max(16, triton.next_power_of_2(head_dim)), _DECODE_ROOMY if roomy else _DECODE_NARROW
    return {
        "HEADS": min(triton.next_power_of_2(share), ROW_BLOCK),
        "WIDTH": width,
        "TILE": min(max(room["bytes"] // (2 * width * item_bytes), 16), _DECODE_TILE),
        "STAGES": room["stages"],
        "LEAST": parts.LEAST,
        "WAVE": _WAVE,
        "num_warps": _DECODE_WARPS,
    }


def prefill_sizes(head_dim: int, item_bytes: int, roomy: bool) -> dict[str, Any]:
    """Sizes and options that `prefill_kernel` is compiled with, for values of so many bytes; roomy: see `Traits`."""
    width, registers = max(16, triton.next_power_of_2(head_dim)), None
    if item_bytes == 4:  # not on tensor cores: registers for both factors of a product
        rows, tile, warps, stages = 32, 32 if width <= 64 else 16, 4, 2
    elif roomy and head_dim == 128:
        # Two programs a multiprocessor: on an H200 435 TFLOP/s at 8,192 tokens of 8,192 where one program with five
        # stages has 347, 449 for 370 at 2,048 of 32,768, and 182 for 192 at 1,024.
        rows, tile, warps, stages, registers = 128, 64, 8, 3, 128
    elif roomy:
        # Five stages keep two tiles on their way: one stage looks up where they are.
        rows, tile, warps, stages = 128, 128 if width <= 64 else 64 if width <= 128 else 32, 8, 5
    else:
        rows, tile, warps, stages = 128 if width <= 128 else 64, 32, 8 if width <= 128 else 4, 3
    return {
        **({} if registers is None else {"maxnreg": registers}),
        "WIDTH": width,
        "ROWS": rows,
        "PIECES": QUERY_TILE // rows,
        "TILE": tile,
        "num_warps": warps,
        "num_stages": stages,
    }


def planner(num_kv_heads: int, device: torch.device, queries: int = 1) -> Planner:
    """The planner of a device; its scratch is for sequences of so many query rows."""
    lanes = max(_DECODES_PER_PROCESSOR * traits(device).processors // num_kv_heads, 1)
    most = min(lanes, parts.MOST)  # a part of a context alone for each lane
    return Planner(lanes, most, _RECORDS * most * queries)


def allocate_scratch(
    max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device, queries: int = 1
) -> AttentionScratch:
    """See `AttentionOps.allocate_scratch`."""
    plan = planner(num_kv_heads, device, queries)
    floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
    row_groups = triton.cdiv(MAX_WINDOW * num_heads // num_kv_heads, ROW_BLOCK)
    return AttentionScratch(
        planner=plan,
        sums=torch.empty(plan.record_rows, num_heads, head_dim, **floats),
        maxima=torch.empty(plan.record_rows, num_heads, **floats),
        weights=torch.empty(plan.record_rows, num_heads, **floats),
        tickets=torch.zeros(max_rows * num_kv_heads * row_groups, dtype=torch.int32, device=device),
    )


def attend(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    inputs: AttentionInputs,
    *,
    num_heads: int,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """See `AttentionOps.attend`; scale > 0, even head_dim <= 256."""
    kv_heads, dim = k_cache.shape[1:]
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and qkv.stride(1) == 1):
        raise ValueError("the caches must be contiguous, and qkv along its last dimension")
    few_rows = inputs.few_rows
    if inputs.tiles is None and few_rows < qkv.shape[0]:
        raise ValueError("longer chunks need tiles")
    able = traits(qkv.device)
    out = torch.empty(qkv.shape[0], num_heads * dim, dtype=qkv.dtype, device=qkv.device)
    normed = q_norm is not None and k_norm is not None
    shape = {"KV_HEADS": kv_heads, "SHARE": num_heads // kv_heads, "D": dim}
    weights = (rotary, q_norm, k_norm, eps) if normed else (rotary, rotary, rotary, eps)
    window = _NO_WINDOW if window is None else min(window, _NO_WINDOW)
    if few_rows:
        assert inputs.items is not None
        assert inputs.num_items is not None
        scratch, plan = inputs.scratch, planner(kv_heads, qkv.device)
        records = (rotary, rotary, rotary, inputs.num_items)  # stand-ins
        if scratch is not None:
            records = (scratch.sums, scratch.maxima, scratch.weights, scratch.tickets)
        sizes = decode_sizes(dim, qkv.element_size(), shape["SHARE"], able.roomy)
        row_groups = triton.cdiv(inputs.max_queries * shape["SHARE"], ROW_BLOCK)
        decode_kernel[(row_groups * kv_heads, len(inputs.items))](
            qkv, qkv.stride(0), k_cache, v_cache, out, *records,
            inputs.slot_mapping, inputs.items, inputs.num_items, inputs.block_tables, inputs.table_stride,
            *weights, scale, window, row_groups,
            BLOCK=inputs.block_size, NORMED=normed, MOST=plan.most_parts, **shape, **sizes,
            **launch_options(qkv.device),
        )  # fmt: skip
    if inputs.tiles is not None and len(inputs.tiles):
        groups = triton.cdiv(num_heads + 2 * kv_heads, _WRITTEN_HEADS)
        write_kernel[(qkv.shape[0] - few_rows, groups)](
            qkv, qkv.stride(0), k_cache, v_cache, out, few_rows, inputs.positions, inputs.slot_mapping, *weights,
            NORMED=normed, HEADS=_WRITTEN_HEADS, WIDTH=max(16, triton.next_power_of_2(dim)), **shape,
            num_warps=2, **launch_options(qkv.device),
        )  # fmt: skip
        sizes = prefill_sizes(dim, qkv.element_size(), able.roomy)
        prefill_kernel[(num_heads, len(inputs.tiles) * sizes["PIECES"])](
            k_cache, v_cache, out, inputs.tiles, inputs.positions, inputs.block_tables, inputs.table_stride,
            scale, window, BLOCK=inputs.block_size, **shape, **sizes, **launch_options(qkv.device),
        )  # fmt: skip
    return out


def variants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    normed: bool,
) -> Variants:
    """See `AttentionOps.variants`."""
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.zeros(MAX_WINDOW + 1, width, dtype=dtype, device=device)
    caches = torch.zeros(2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)
    weight = torch.ones(head_dim, dtype=dtype, device=device) if normed else None
    rotary = torch.zeros(MAX_WINDOW + 1, head_dim, dtype=torch.float32, device=device)
    scratch = allocate_scratch(1, num_heads, num_kv_heads, head_dim, device)

    def ints(*values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    launches: list[Callable[[], Any]] = []
    for tokens in (1, MAX_WINDOW + 1):
        few = tokens <= MAX_WINDOW
        # Padding rows: they read the null block and write nothing.
        inputs = AttentionInputs(
            positions=ints(*[0] * tokens),
            slot_mapping=ints(*[-1] * tokens),
            context_lens=ints(0),
            block_tables=ints([0] * tokens),
            table_stride=ints(1),
            block_size=block_size,
            groups=(AttentionGroup(start=0, first_seq=0, num_seqs=1, query_len=tokens, context_len=0),),
            tiles=None if few else ints([0, 0, tokens]),
            scratch=scratch,
            items=ints([0, 0, tokens, 0, 0, 1, 0]),
            num_items=ints(1),
            max_queries=min(tokens, MAX_WINDOW),
        )
        launches.append(
            partial(
                attend,
                qkv[:tokens],
                caches[0],
                caches[1],
                inputs,
                num_heads=num_heads,
                rotary=rotary,
                q_norm=weight,
                k_norm=weight,
                eps=1e-6,
                scale=1.0,
            )
        )
    return Variants((decode_kernel, write_kernel, prefill_kernel), launches)
