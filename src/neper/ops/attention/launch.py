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

from neper.ops.attention.api import QUERY_TILE, AttentionGroup, AttentionInputs, AttentionScratch
from neper.ops.attention.kernels import decode_kernel, prefill_kernel, write_kernel
from neper.ops.common.launching import launch_options, traits
from neper.ops.common.variants import Variants

# Programs of `decode_kernel` that a multiprocessor is to hold, and the warps of one.
_DECODES_PER_PROCESSOR = 2
_DECODE_WARPS = 8
# Bytes of K and V that a thread of `decode_kernel` loads at a time: 32 registers, and as many more on their way.
_DECODE_THREAD_BYTES = 128
# Fewest tokens of a part of a context: below, joining parts takes longer than another tile.
_LEAST_PART = 64
# Most parts of a context: one program joins them.
_MOST_PARTS = 128
# Parts that are loaded at a time when they are joined.
_WAVE = 8
# Heads of a program of `write_kernel`.
_WRITTEN_HEADS = 8
# Registers a thread, so that as many programs of 16-bit values as above fit. A few 16-bit spills are the price.
_DECODE_REGISTERS = 65_536 // (32 * _DECODE_WARPS * _DECODES_PER_PROCESSOR)
# No window is one longer than any context.
_NO_WINDOW = 2**30


def decode_sizes(num_heads: int, num_kv_heads: int, head_dim: int, item_bytes: int) -> dict[str, Any]:
    """Sizes and options that `decode_kernel` is compiled with, for values of so many bytes."""
    share = num_heads // num_kv_heads
    width = max(16, triton.next_power_of_2(head_dim))
    heads = triton.next_power_of_2(share)
    half = max(16, triton.next_power_of_2(head_dim // 2))
    tile = 32 * _DECODE_WARPS * _DECODE_THREAD_BYTES // (4 * half * item_bytes)
    return {
        "ROWS": max(16, heads),
        "HALF": half,
        "WIDTH": width,
        "TILE": min(max(tile, 16), 64),
        "LEAST": _LEAST_PART,
        "HEADS": heads,
        "WAVE": _WAVE,
        "num_warps": _DECODE_WARPS,
        "num_stages": 1,
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


def num_parts(num_decodes: int, num_kv_heads: int, processors: int) -> int:
    """Into how many parts contexts are cut at most. It follows from device and rows, so captured grids stay valid."""
    return min(max(_DECODES_PER_PROCESSOR * processors // (num_decodes * num_kv_heads), 1), _MOST_PARTS)


def allocate_scratch(
    max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> AttentionScratch:
    """See `AttentionOps.allocate_scratch`."""
    records = _DECODES_PER_PROCESSOR * traits(device).processors
    return AttentionScratch(
        partials=torch.empty(records * 2 * num_heads // num_kv_heads * head_dim, dtype=torch.float32, device=device),
        # Where there are more pairs than records, contexts are not cut.
        tickets=torch.zeros(min(max_rows * num_kv_heads, records), dtype=torch.int32, device=device),
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
    decodes = inputs.num_decodes
    if inputs.tiles is None and len(inputs.groups) > bool(decodes):
        raise ValueError("longer chunks need tiles")
    able = traits(qkv.device)
    out = torch.empty(qkv.shape[0], num_heads * dim, dtype=qkv.dtype, device=qkv.device)
    normed = q_norm is not None and k_norm is not None
    shape = {"KV_HEADS": kv_heads, "SHARE": num_heads // kv_heads, "D": dim}
    weights = (rotary, q_norm, k_norm, eps) if normed else (rotary, rotary, rotary, eps)
    window = _NO_WINDOW if window is None else min(window, _NO_WINDOW)
    if decodes:
        scratch, parts = inputs.scratch, 1
        registers = _DECODE_REGISTERS if qkv.element_size() == 2 and dim <= 128 else None
        partials, tickets = rotary, inputs.context_lens  # stand-ins
        if scratch is not None:
            parts = num_parts(decodes, kv_heads, able.processors)
            partials, tickets = scratch.partials, scratch.tickets
        decode_kernel[(kv_heads, parts, decodes)](
            qkv, qkv.stride(0), k_cache, v_cache, out, partials, tickets,
            inputs.positions, inputs.slot_mapping, inputs.context_lens, inputs.block_tables, inputs.table_stride,
            *weights, scale, window,
            BLOCK=inputs.block_size, NORMED=normed, **shape,
            **decode_sizes(num_heads, kv_heads, dim, qkv.element_size()), **launch_options(qkv.device, registers),
        )  # fmt: skip
    if inputs.tiles is not None and len(inputs.tiles):
        groups = triton.cdiv(num_heads + 2 * kv_heads, _WRITTEN_HEADS)
        write_kernel[(qkv.shape[0] - decodes, groups)](
            qkv, qkv.stride(0), k_cache, v_cache, out, decodes, inputs.positions, inputs.slot_mapping, *weights,
            NORMED=normed, HEADS=_WRITTEN_HEADS, HALF=max(16, triton.next_power_of_2(dim // 2)), **shape,
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
    qkv = torch.zeros(2, width, dtype=dtype, device=device)
    caches = torch.zeros(2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)
    weight = torch.ones(head_dim, dtype=dtype, device=device) if normed else None
    rotary = torch.zeros(1, head_dim, dtype=torch.float32, device=device)
    scratch = allocate_scratch(1, num_heads, num_kv_heads, head_dim, device)

    def ints(*values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    launches: list[Callable[[], Any]] = []
    for tokens in (1, 2):
        # Padding rows: they read the null block and write nothing.
        inputs = AttentionInputs(
            positions=ints(*[0] * tokens),
            slot_mapping=ints(*[-1] * tokens),
            context_lens=ints(0),
            block_tables=ints([0]),
            table_stride=ints(1),
            block_size=block_size,
            groups=(AttentionGroup(start=0, first_seq=0, num_seqs=1, query_len=tokens, context_len=0),),
            tiles=ints([0, 0, tokens]) if tokens > 1 else None,
            scratch=scratch,
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
