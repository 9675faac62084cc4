"""Launches the kernels that choose tokens: what they are compiled for, how work is split, and their scratch.

It satisfies `neper.ops.sampling.api.SamplingKernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from neper.ops.common.device_functions import SPARE_BITS
from neper.ops.common.launching import launch_options
from neper.ops.common.variants import Variants
from neper.ops.sampling.api import DrawRows
from neper.ops.sampling.kernels import LIST_IDS, TILE_IDS, best_kernel, draw_kernel, finish_kernel, weigh_kernel

# Tiles of all rows up to which a program takes one, two; beyond, it takes four.
_BEST_TILES = (1200, 20_000)
_DRAW_TILES = (1500, 3000)


def scratch_words(rows: int, vocab_size: int) -> int:
    """See `SamplingKernels.scratch_words`."""
    return rows * row_words(vocab_size)


def row_words(vocab_size: int) -> int:
    """Scratch of one row, in words.

    Of each tile: int64 keys of the best and of the noisiest id, its mass, and the masses in it before two candidates
    (a program's sums stand for all of its tiles); then the float32 logit of the noisiest. Then the length of a list
    and the list. Then of each tile the count, mean and squares that top-n-sigma needs, and what makes rows begin at 64
    bytes.
    """
    return -(-(14 * num_tiles(vocab_size) + 16 + LIST_IDS) // 16) * 16


def num_tiles(vocab_size: int) -> int:
    """Tiles of a row."""
    return -(-vocab_size // TILE_IDS)


def best(logits: Tensor, scratch: Tensor, top_n_sigma: Tensor | None = None) -> None:
    """See `SamplingKernels.best`."""
    rows, vocab = logits.shape
    if rows:
        tiles, each, programs = _split(rows, vocab, _BEST_TILES)
        best_kernel[(programs, rows)](
            logits,
            _row_step(logits),
            top_n_sigma,
            scratch,
            row_words(vocab),
            vocab,
            tiles,
            each,
            num_warps=1,
            **_options(logits),
        )


def choose(logits: Tensor, draws: DrawRows[Tensor], scratch: Tensor, out_ids: Tensor, out_valid: Tensor) -> None:
    """See `SamplingKernels.choose`."""
    best(logits, scratch, draws.top_n_sigma)
    if len(logits):
        _draw(logits, draws, scratch)
        _weigh(logits, draws, scratch)
        _finish(logits, draws, scratch, out_ids, out_valid)


def variants(vocab_size: int, dtype: torch.dtype, device: torch.device) -> Variants:
    """See `SamplingKernels.variants`."""
    scratch = torch.zeros(scratch_words(1, vocab_size), dtype=torch.int32, device=device)
    zeros = torch.zeros(1, dtype=torch.float32, device=device)
    ints = torch.zeros(1, 2, dtype=torch.int32, device=device)
    draws = DrawRows(temperature=zeros, top_p=zeros, min_p=zeros, top_n_sigma=zeros, top_k=ints[0, :1], keys=ints)
    out = ints.clone()[0, :1], torch.zeros(1, dtype=torch.bool, device=device)
    launches: list[Callable[[], Any]] = []
    for kind in dict.fromkeys((dtype, torch.float32)):
        both = torch.zeros(2, vocab_size, dtype=kind, device=device)
        # Where rows begin at odd places, those whose first row happens not to are variants of their own.
        for logits in (both[:1], both[1:]) if vocab_size * kind.itemsize % 16 else (both[:1],):
            launches.insert(0, partial(_finish, logits, draws, scratch, *out))
            launches += [partial(kernel, logits, draws, scratch) for kernel in (_draw, _weigh)]
            launches += [partial(best, logits, scratch), partial(best, logits, scratch, zeros)]
    return Variants((best_kernel, draw_kernel, weigh_kernel, finish_kernel), launches)


def _draw(logits: Tensor, draws: DrawRows[Tensor], scratch: Tensor) -> None:
    rows, vocab = logits.shape
    tiles, each, programs = _split(rows, vocab, _DRAW_TILES)
    draw_kernel[(programs, rows)](
        logits, _row_step(logits), draws.temperature, draws.top_p, draws.top_k, draws.top_n_sigma, draws.keys,
        scratch, row_words(vocab), vocab, tiles, each,
        num_warps=4, **_sizes(logits), **_bits(logits), **_options(logits),
    )  # fmt: skip


def _weigh(logits: Tensor, draws: DrawRows[Tensor], scratch: Tensor) -> None:
    rows, vocab = logits.shape
    tiles, each, programs = _split(rows, vocab, _DRAW_TILES)
    weigh_kernel[(programs, rows)](
        logits, _row_step(logits), draws.temperature, draws.top_p, draws.min_p, draws.top_k, draws.top_n_sigma,
        scratch, row_words(vocab), vocab, tiles, each,
        num_warps=4, **_sizes(logits), **_options(logits),
    )  # fmt: skip


def _finish(logits: Tensor, draws: DrawRows[Tensor], scratch: Tensor, out_ids: Tensor, out_valid: Tensor) -> None:
    rows, vocab = logits.shape
    tiles, _, programs = _split(rows, vocab, _DRAW_TILES)
    finish_kernel[(rows,)](
        logits, _row_step(logits), draws.temperature, draws.top_p, draws.min_p, draws.top_k, draws.top_n_sigma,
        draws.keys, scratch, row_words(vocab), out_ids, out_valid, vocab, tiles, programs,
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
    """Options that all of the kernels are compiled with. Not fused, so that a number has the same bits everywhere."""
    unit = {"VEC": 16 // logits.element_size(), "UNIT": _unit(logits)}
    return {**unit, "enable_fp_fusion": False, **launch_options(logits.device)}


def _sizes(logits: Tensor) -> dict[str, Any]:
    return {"PP": triton.next_power_of_2(num_tiles(logits.shape[1]))}


def _bits(logits: Tensor) -> dict[str, Any]:
    return {"SPARE": SPARE_BITS[logits.dtype]}
