"""Launches the kernels that choose tokens: what they are compiled for, how work is split, and their scratch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from neper.ops.common import SPARE_BITS
from neper.ops.launch import Variants, launch_options
from neper.ops.sampling.kernels import LIST_IDS, TILE_IDS, best_kernel, draw_kernel, finish_kernel, weigh_kernel

# Tiles of all rows up to which a program takes one, two; beyond, it takes four.
_BEST_TILES = (1200, 20_000)
_DRAW_TILES = (1500, 3000)


@dataclass(frozen=True)
class DrawRows:
    """How the tokens of S rows are chosen, on the device of the logits; all contiguous.

    Attributes:
        temperature: [S] float32; a row below 1e-5 takes its best token, whatever its other parameters.
        top_p: [S] float32; 1 = off.
        min_p: [S] float32; 0 = off.
        top_k: [S] int32; off where <= 0 or >= V.
        keys: [S, 2] int32, the 32 bits of the row's two numbers from `neper.ops.sampling.reference.noise_keys`.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    keys: Tensor


def scratch_words(rows: int, vocab_size: int) -> int:
    """int32 words that `choose` and `best` need for `rows` rows of logits."""
    return rows * row_words(vocab_size)


def row_words(vocab_size: int) -> int:
    """Scratch of one row, in words.

    Of each tile: int64 keys of the best and of the noisiest id, its mass, and the masses in it before two candidates
    (a program's sums stand for all of its tiles); then the float32 logit of the noisiest. Then the length of a list,
    the list, and what makes rows begin at 64 bytes.
    """
    return -(-(11 * num_tiles(vocab_size) + 16 + LIST_IDS) // 16) * 16


def num_tiles(vocab_size: int) -> int:
    """Tiles of a row."""
    return -(-vocab_size // TILE_IDS)


def best(logits: Tensor, scratch: Tensor) -> None:
    """Leave the best id of each tile of each row in `scratch`, for `choose` or `packing_triton.pack_best`.

    Args:
        logits: [S, V] float32, bfloat16 or float16, V <= 2^20; unit stride along V, rows at any distance. It is quick
            where rows begin at multiples of 16 bytes and V fills such units.
        scratch: flat int32 from a multiple of 16 bytes on, at least `scratch_words(S, V)`. What was in it is no matter.
    """
    rows, vocab = logits.shape
    if rows:
        tiles, each, programs = _split(rows, vocab, _BEST_TILES)
        best_kernel[(programs, rows)](
            logits, _row_step(logits), scratch, row_words(vocab), vocab, tiles, each, num_warps=1, **_options(logits)
        )


def choose(logits: Tensor, draws: DrawRows, scratch: Tensor, out_ids: Tensor, out_valid: Tensor) -> None:
    """Choose a token for each row, as `reference.sample` does; allocates nothing and waits for nothing.

    A row's token depends on its logits and parameters alone. It is that of `sample` but for ties to within float32's
    rounding: between the two noisiest ids, or at the edge of what top-p or min-p leave.

    Args:
        logits, scratch: as in `best`.
        out_ids: [S] int32, written: the token; 0 in an invalid row.
        out_valid: [S] bool, written: False where the row holds NaN or +inf, or nothing above -inf.
    """
    best(logits, scratch)
    if len(logits):
        _draw(logits, draws, scratch)
        _weigh(logits, draws, scratch)
        _finish(logits, draws, scratch, out_ids, out_valid)


def variants(vocab_size: int, dtype: torch.dtype, device: torch.device) -> Variants:
    """What choosing from logits of `dtype`, or from edited ones in float32, needs."""
    scratch = torch.zeros(scratch_words(1, vocab_size), dtype=torch.int32, device=device)
    zeros = torch.zeros(1, dtype=torch.float32, device=device)
    ints = torch.zeros(1, 2, dtype=torch.int32, device=device)
    draws = DrawRows(temperature=zeros, top_p=zeros, min_p=zeros, top_k=ints[0, :1], keys=ints)
    out = ints.clone()[0, :1], torch.zeros(1, dtype=torch.bool, device=device)
    launches: list[Callable[[], Any]] = []
    for kind in dict.fromkeys((dtype, torch.float32)):
        both = torch.zeros(2, vocab_size, dtype=kind, device=device)
        # Where rows begin at odd places, those whose first row happens not to are variants of their own.
        for logits in (both[:1], both[1:]) if vocab_size * kind.itemsize % 16 else (both[:1],):
            launches.insert(0, partial(_finish, logits, draws, scratch, *out))
            launches += [partial(kernel, logits, draws, scratch) for kernel in (_draw, _weigh)]
            launches.append(partial(best, logits, scratch))
    return Variants((best_kernel, draw_kernel, weigh_kernel, finish_kernel), launches)


def _draw(logits: Tensor, draws: DrawRows, scratch: Tensor) -> None:
    rows, vocab = logits.shape
    tiles, each, programs = _split(rows, vocab, _DRAW_TILES)
    draw_kernel[(programs, rows)](
        logits, _row_step(logits), draws.temperature, draws.top_p, draws.top_k, draws.keys,
        scratch, row_words(vocab), vocab, tiles, each,
        num_warps=4, **_sizes(logits), **_bits(logits), **_options(logits),
    )  # fmt: skip


def _weigh(logits: Tensor, draws: DrawRows, scratch: Tensor) -> None:
    rows, vocab = logits.shape
    tiles, each, programs = _split(rows, vocab, _DRAW_TILES)
    weigh_kernel[(programs, rows)](
        logits, _row_step(logits), draws.temperature, draws.top_p, draws.min_p, draws.top_k,
        scratch, row_words(vocab), vocab, tiles, each,
        num_warps=4, **_sizes(logits), **_options(logits),
    )  # fmt: skip


def _finish(logits: Tensor, draws: DrawRows, scratch: Tensor, out_ids: Tensor, out_valid: Tensor) -> None:
    rows, vocab = logits.shape
    tiles, _, programs = _split(rows, vocab, _DRAW_TILES)
    finish_kernel[(rows,)](
        logits, _row_step(logits), draws.temperature, draws.top_p, draws.min_p, draws.top_k, draws.keys,
        scratch, row_words(vocab), out_ids, out_valid, vocab, tiles, programs,
        num_warps=16, **_sizes(logits), **_bits(logits), **_options(logits),
    )  # fmt: skip


def _split(rows: int, vocab_size: int, limits: tuple[int, int]) -> tuple[int, int, int]:
    """Tiles of a row, tiles that a program takes, and programs for a row."""
    tiles = num_tiles(vocab_size)
    each = 1 if rows * tiles <= limits[0] else 2 if rows * tiles <= limits[1] else 4
    return tiles, each, -(-tiles // each)


def _unit(logits: Tensor) -> int:
    """Logits of a 16-byte word where all rows consist of such words, else 1."""
    unit = 16 // logits.element_size()
    whole = logits.data_ptr() % 16 == 0 and logits.stride(0) % unit == 0 and logits.shape[1] % unit == 0
    return unit if whole else 1


def _row_step(logits: Tensor) -> int:
    """Units from one row to the next."""
    return logits.stride(0) // _unit(logits)


def _options(logits: Tensor) -> dict[str, Any]:
    """What all of the kernels are compiled with. Not fused, so that a number has the same bits wherever it is made."""
    unit = {"VEC": 16 // logits.element_size(), "UNIT": _unit(logits)}
    return {**unit, "enable_fp_fusion": False, **launch_options(logits.device)}


def _sizes(logits: Tensor) -> dict[str, Any]:
    return {"PP": triton.next_power_of_2(num_tiles(logits.shape[1]))}


def _bits(logits: Tensor) -> dict[str, Any]:
    return {"SPARE": SPARE_BITS[logits.dtype]}
