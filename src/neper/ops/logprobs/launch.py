"""Launches the kernels of the reduction: what they are compiled for, how work is split, and their scratch.

It satisfies `neper.ops.logprobs.api.ScoringOps`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from neper.ops.common.device_functions import SPARE_BITS
from neper.ops.common.launching import launch_options, on
from neper.ops.common.variants import Variants
from neper.ops.logprobs import reference
from neper.ops.logprobs.api import LIST_SIZES, TokenLogprobs, list_sizes
from neper.ops.logprobs.kernels import TILE_IDS, read_kernel, select_kernel
from neper.ops.logprobs.rows import Given, Norms
from neper.ops.logprobs.set_kernels import list_kernel, restrict_kernel
from neper.ops.logprobs.set_launch import score_sets
from neper.ops.logprobs.token_sets import TokenSets

# Rows of one launch; more take several, so that scratch stays small beside the logits.
_MAX_ROWS = 4096
# Words of scratch for the lists of `select_kernel`: chunks, then ids.
_LISTS = 256


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor | None,
    top_k: int,
    *,
    out: TokenLogprobs,
    scratch: Tensor | None = None,
    row_top_k: Tensor | None = None,
    temperature: Tensor | None = None,
    allowed: TokenSets | None = None,
    named: TokenSets | None = None,
    rows: Tensor | None = None,
) -> None:
    """See `ScoringOps.token_logprobs`; V <= 2^20, unit stride along V.

    Lists of more than 64 ids are found by the reference; all else is the kernels', so a row's bits stay the same.
    """
    count, vocab = (logits.shape[0] if rows is None else rows.shape[0]), logits.shape[1]
    if scratch is None or scratch.numel() < scratch_words(count, vocab):  # too small: made for the reference
        scratch = torch.empty(scratch_words(count, vocab), dtype=torch.int32, device=logits.device)
    norms = _norms(scratch, vocab)
    with on(logits.device):
        for begin in range(0, count, _MAX_ROWS):
            part = slice(begin, min(begin + _MAX_ROWS, count))
            here, ids, t, k = (None if x is None else x[part] for x in (rows, token_ids, temperature, row_top_k))
            given = Given.of(out.take(part), here, ids, t, k)
            taken = logits[part] if rows is None else logits
            _read(taken, given, scratch)
            if top_k <= LIST_SIZES[-1]:
                _select(taken, given, scratch, top_k)
            else:
                _select(taken, given, scratch, 0)
                maximum, log_sum = norms.read(len(given.scores.valid))
                reference.list_top_k(
                    taken,
                    top_k,
                    row_top_k=k,
                    temperature=t,
                    rows=here,
                    maximum=maximum,
                    log_sum=log_sum,
                    scores=given.scores,
                )
            for sets, restrict in ((allowed, True), (named, False)):
                if sets is not None:
                    score_sets(taken, sets.take(part), restrict, given, norms, top_k)


def variants(vocab_size: int, dtype: torch.dtype, max_top_k: int, device: torch.device) -> Variants:
    """See `ScoringOps.variants`."""
    both = torch.zeros(2, vocab_size, dtype=dtype, device=device)
    ids = torch.zeros(1, dtype=torch.int32, device=device)
    sets = TokenSets.of([[0]], device)
    scratch = torch.zeros(scratch_words(1, vocab_size), dtype=torch.int32, device=device)
    given = Given.of(TokenLogprobs.empty(1, LIST_SIZES[-1], device), None, ids, None, None)
    sizes = list_sizes(max_top_k)
    launches: list[Callable[[], Any]] = []
    # Where rows begin at odd places, those whose first row happens not to are variants of their own.
    for logits in (both[:1], both[1:]) if vocab_size * dtype.itemsize % 16 else (both[:1],):
        launches[:0] = [partial(_select, logits, given, scratch, size) for size in reversed(sizes)]
        launches.append(partial(_read, logits, given, scratch))
        launches.append(partial(score_sets, logits, sets, True, given, _norms(scratch, vocab_size), 0))
    return Variants((read_kernel, select_kernel, restrict_kernel, list_kernel), launches)


def _norms(scratch: Tensor, vocab_size: int) -> Norms:
    return Norms(scratch[_row_words(vocab_size) - 16 :], _row_words(vocab_size))


def _tiles(vocab_size: int, count: int) -> tuple[int, int, int]:
    """Tiles of a row, tiles that one program of `read_kernel` reads, and programs for a row, of `count` rows.

    A program reads more than one tile where there are enough programs for all of the device anyway.
    """
    tiles = -(-vocab_size // TILE_IDS)
    each = 1 if count * tiles <= 1200 else 2 if count * tiles <= 20_000 else 4
    return tiles, each, -(-tiles // each)


def _read(logits: Tensor, given: Given, scratch: Tensor) -> None:
    count, vocab = len(given.scores.logprob), logits.shape[1]
    num_tiles, tiles_per_program, num_programs = _tiles(vocab, count)
    step, unit = given.row_step(logits)
    read_kernel[(num_programs, count)](
        logits, step, given.rows, given.token_ids, given.temperature, given.flags, scratch, _row_words(vocab),
        vocab, num_tiles, tiles_per_program,
        VEC=16 // logits.element_size(), UNIT=unit,
        # `tl.fma` is one operation, but for the interpreter, the only case of kernels on a CPU.
        FUSED=logits.device.type != "cpu", num_warps=1, **launch_options(logits.device),
    )  # fmt: skip


def _select(logits: Tensor, given: Given, scratch: Tensor, top_k: int) -> None:
    scores = given.scores
    count, width = scores.top_ids.shape
    vocab = logits.shape[1]
    num_tiles, _, num_programs = _tiles(vocab, count)
    step, unit = given.row_step(logits)
    chunk_places = max(32, triton.next_power_of_2(num_tiles * 8))
    bucket = next(size for size in LIST_SIZES if top_k <= size)
    select_kernel[(count,)](
        logits, step, given.rows, given.token_ids, given.temperature, given.row_top_k, given.flags,
        scratch, _row_words(vocab),
        scores.logprob, scores.rank, scores.top_ids, scores.top_logprobs, scores.top_ids.stride(0), scores.valid,
        vocab, num_tiles, num_programs, top_k, width,
        CP=chunk_places, GROUPS=min(256 if bucket == 64 else 128, chunk_places), PP=triton.next_power_of_2(num_tiles),
        KP=bucket, SPARE=SPARE_BITS[logits.dtype], UNIT=unit,
        # Not tuned by size: the layout of 8 warps decides in which order a row's chunks are added. Not fused, so that
        # a listed value has the bits that the same arithmetic gives elsewhere.
        num_warps=8, enable_fp_fusion=False, **launch_options(logits.device, 128 if bucket == 64 else 64),
    )  # fmt: skip


def scratch_words(rows: int, vocab_size: int) -> int:
    """See `ScoringOps.scratch_words`."""
    return min(rows, _MAX_ROWS) * _row_words(vocab_size)


def _row_words(vocab_size: int) -> int:
    """Scratch of one row: maxima, sums and first ids of the chunks, counts of the programs, lists, and 16 words.

    A multiple of 16 words, so that rows stay aligned for wide loads.
    """
    tiles = -(-vocab_size // TILE_IDS)
    return -(-(3 * 8 * tiles + tiles + _LISTS) // 16) * 16 + 16
