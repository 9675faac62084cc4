"""Launches the attention kernels: what they are compiled for, how contexts are split, and their scratch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from neper.ops.attention import QUERY_TILE, AttentionGroup, AttentionInputs, AttentionScratch
from neper.ops.attention_kernels import decode_kernel, prefill_kernel, write_kernel

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


@dataclass(frozen=True)
class _Device:
    """What of a launch depends on the device.

    Attributes:
        processors: its multiprocessors; the interpreter's CPU counts as a few.
        roomy: a multiprocessor has the shared memory of the data-centre kind (A100, H100 and later).
        pdl: programmatic dependent launch: each kernel starts while the one before it still runs, and waits inside.
        nvidia: options that only this compiler knows can be given.
    """

    processors: int
    roomy: bool = False
    pdl: bool = False
    nvidia: bool = False

    def options(self, registers: int | None = None) -> dict[str, Any]:
        """Further arguments of a launch. `registers` a thread at most, so that several programs fit."""
        options: dict[str, Any] = {"PDL": self.pdl}
        if self.pdl:
            options["launch_pdl"] = True
        if registers is not None and self.nvidia:
            options["maxnreg"] = registers
        return options


@cache
def _device(device: torch.device) -> _Device:
    if device.type == "cpu":
        return _Device(4)
    if device.type == "xpu":
        return _Device(torch.xpu.get_device_properties(device).max_compute_units // 8)
    nvidia = torch.version.hip is None
    pdl = nvidia and torch.cuda.get_device_capability(device) >= (9, 0)
    found = torch.cuda.get_device_properties(device)
    roomy = nvidia and getattr(found, "shared_memory_per_block_optin", 0) > 160_000
    return _Device(found.multi_processor_count, roomy, pdl, nvidia)


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
    """Sizes and options that `prefill_kernel` is compiled with, for values of so many bytes; roomy: see `_Device`."""
    width = max(16, triton.next_power_of_2(head_dim))
    if item_bytes == 4:  # not on tensor cores: registers for both factors of a product
        rows, tile, warps, stages = 32, 32 if width <= 64 else 16, 4, 2
    elif roomy:
        # Five stages keep two tiles on their way: one stage looks up where they are.
        rows, tile, warps, stages = 128, 128 if width <= 64 else 64 if width <= 128 else 32, 8, 5
    else:
        rows, tile, warps, stages = 128 if width <= 128 else 64, 32, 8 if width <= 128 else 4, 3
    return {
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
    """See `neper.ops.attention.allocate_scratch`."""
    records = _DECODES_PER_PROCESSOR * _device(device).processors
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
    num_heads: int,
    rotary: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    *,
    eps: float,
    scale: float,
    window: int | None,
) -> Tensor:
    """See `neper.ops.attention.attend`; scale > 0, even head_dim <= 256."""
    kv_heads, dim = k_cache.shape[1:]
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and qkv.stride(1) == 1):
        raise ValueError("the caches must be contiguous, and qkv along its last dimension")
    decodes = inputs.num_decodes
    if inputs.tiles is None and len(inputs.groups) > bool(decodes):
        raise ValueError("longer chunks need tiles")
    device = _device(qkv.device)
    out = torch.empty(qkv.shape[0], num_heads * dim, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = norms
    normed = q_norm is not None and k_norm is not None
    shape = {"KV_HEADS": kv_heads, "SHARE": num_heads // kv_heads, "D": dim}
    weights = (rotary, q_norm, k_norm, eps) if normed else (rotary, rotary, rotary, eps)
    window = _NO_WINDOW if window is None else min(window, _NO_WINDOW)
    if decodes:
        scratch, parts = inputs.scratch, 1
        registers = _DECODE_REGISTERS if qkv.element_size() == 2 and dim <= 128 else None
        partials, tickets = rotary, inputs.context_lens  # stand-ins
        if scratch is not None:
            parts = num_parts(decodes, kv_heads, device.processors)
            partials, tickets = scratch.partials, scratch.tickets
        decode_kernel[(kv_heads, parts, decodes)](
            qkv, qkv.stride(0), k_cache, v_cache, out, partials, tickets,
            inputs.positions, inputs.slot_mapping, inputs.context_lens, inputs.block_tables, inputs.table_stride,
            *weights, scale, window,
            BLOCK=inputs.block_size, NORMED=normed, **shape,
            **decode_sizes(num_heads, kv_heads, dim, qkv.element_size()), **device.options(registers),
        )  # fmt: skip
    if inputs.tiles is not None and len(inputs.tiles):
        groups = triton.cdiv(num_heads + 2 * kv_heads, _WRITTEN_HEADS)
        write_kernel[(qkv.shape[0] - decodes, groups)](
            qkv, qkv.stride(0), k_cache, v_cache, out, decodes, inputs.positions, inputs.slot_mapping, *weights,
            NORMED=normed, HEADS=_WRITTEN_HEADS, HALF=max(16, triton.next_power_of_2(dim // 2)), **shape,
            num_warps=2, **device.options(),
        )  # fmt: skip
        sizes = prefill_sizes(dim, qkv.element_size(), device.roomy)
        prefill_kernel[(num_heads, len(inputs.tiles) * sizes["PIECES"])](
            k_cache, v_cache, out, inputs.tiles, inputs.positions, inputs.block_tables, inputs.table_stride,
            scale, window, BLOCK=inputs.block_size, **shape, **sizes, **device.options(),
        )  # fmt: skip
    return out


def warm_up(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    normed: bool,
) -> None:
    """Compile what `attend` needs for a model of this shape, whatever its windows: a decode, and a longer chunk."""
    width = (num_heads + 2 * num_kv_heads) * head_dim
    cache = torch.zeros(2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)
    weight = torch.ones(head_dim, dtype=dtype, device=device) if normed else None

    def ints(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    # Padding rows: they read the null block and write nothing.
    inputs = AttentionInputs(
        positions=ints([0, 0, 0]),
        slot_mapping=ints([-1, -1, -1]),
        context_lens=ints([0, 0]),
        block_tables=ints([[0], [0]]),
        table_stride=ints([1]),
        block_size=block_size,
        groups=(AttentionGroup(0, 0, 1, 1, 0), AttentionGroup(1, 1, 1, 2, 0)),
        tiles=ints([[1, 1, 2]]),
        scratch=allocate_scratch(1, num_heads, num_kv_heads, head_dim, device),
    )
    attend(
        torch.zeros(3, width, dtype=dtype, device=device),
        cache[0],
        cache[1],
        inputs,
        num_heads,
        torch.zeros(1, head_dim, dtype=torch.float32, device=device),
        (weight, weight),
        eps=1e-6,
        scale=1.0,
        window=None,
    )
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
