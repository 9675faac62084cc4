"""Launches the kernels that pack; they satisfy `neper.ops.packing.api.PackingKernels`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from neper.ops.common.launching import launch_options
from neper.ops.common.variants import Variants
from neper.ops.logprobs.api import TokenLogprobs
from neper.ops.packing.api import PackRows
from neper.ops.packing.kernels import keep_kernel, pack_best_kernel, pack_chosen_kernel
from neper.ops.sampling.launch import num_tiles, row_words, scratch_words


def pack_best(rows: PackRows, words: Tensor, last_tokens: Tensor, scratch: Tensor, vocab_size: int) -> None:
    """See `PackingKernels.pack_best`."""
    count, tiles = len(rows.offsets), num_tiles(vocab_size)
    places = triton.next_power_of_2(tiles)
    if count:
        pack_best_kernel[(count,)](
            rows.offsets, rows.slots, words, last_tokens, scratch, row_words(vocab_size), tiles,
            PP=places, num_warps=max(1, places // 256), **launch_options(words.device),
        )  # fmt: skip


def keep(
    rows: PackRows,
    kept: PackRows,
    last_tokens: Tensor,
    ids: Tensor,
    valid: Tensor,
    scratch: Tensor,
    vocab_size: int,
    *,
    chosen: bool,
) -> None:
    """See `PackingKernels.keep`."""
    count, tiles = len(rows.offsets), num_tiles(vocab_size)
    places = triton.next_power_of_2(tiles)
    if count:
        keep_kernel[(count,)](
            rows.offsets, rows.listed, rows.slots, kept.offsets, kept.listed, kept.slots, last_tokens, ids, valid,
            scratch, row_words(vocab_size), tiles, int(chosen),
            PP=places, num_warps=max(1, places // 256), **launch_options(ids.device),
        )  # fmt: skip


def pack_chosen(
    rows: PackRows, words: Tensor, last_tokens: Tensor, ids: Tensor, valid: Tensor, scores: TokenLogprobs | None
) -> None:
    """See `PackingKernels.pack_chosen`."""
    # A pointer that is never followed stands in for what is not there.
    results = (rows.offsets, rows.offsets, rows.offsets, rows.offsets, valid)
    stride = 0
    if scores is not None:
        bits = scores.logprob.view(torch.int32), scores.top_logprobs.view(torch.int32)
        results = (scores.rank, bits[0], scores.top_ids, bits[1], scores.valid)
        stride = scores.top_ids.stride(0)
    count = len(rows.offsets)
    if count:
        pack_chosen_kernel[(count,)](
            rows.offsets, rows.listed, rows.slots, words, last_tokens, ids, valid, *results, stride,
            int(scores is not None), num_warps=1, **launch_options(words.device),
        )  # fmt: skip


def variants(vocab_size: int, device: torch.device) -> Variants:
    """See `PackingKernels.variants`."""
    ints = torch.full((1,), -1, dtype=torch.int32, device=device)
    rows = PackRows(offsets=ints, listed=ints, slots=ints)
    valid = torch.zeros(1, dtype=torch.bool, device=device)
    scratch = torch.zeros(scratch_words(1, vocab_size), dtype=torch.int32, device=device)
    launches: list[Callable[[], Any]] = [
        partial(pack_best, rows, ints, ints, scratch, vocab_size),
        partial(keep, rows, rows, ints, ints.clone(), valid, scratch, vocab_size, chosen=False),
        partial(pack_chosen, rows, ints, ints, ints, valid, None),
    ]
    return Variants((pack_best_kernel, keep_kernel, pack_chosen_kernel), launches)
