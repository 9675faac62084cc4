"""Sampling: penalties, bias, temperature, top-n-sigma / top-k / top-p / min-p, and a seeded Gumbel draw per row.

A row's draw depends on its own logits, parameters, seed and position only. The noise of (seed, position, id) is a hash,
not a stream: no state is kept, a preempted request repeats its draws, and any device can compute the same number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from neper.ops.common.order import greedy_tokens, ordered_top_k
from neper.ops.logprobs.reference import row_normaliser
from neper.ops.sampling.api import FARTHEST, SIGMA_SLACK, Bias, DrawInputs, Masks, Penalties

# Rows with top-k or top-p look at this many best ids first; the few rows that need more are sorted whole.
_CANDIDATES = 1024


def edit_logits(
    logits: Tensor, penalties: Penalties | None = None, bias: Bias | None = None, masks: Masks | None = None
) -> Tensor:
    """A copy of logits [R, V] as float32 with penalties, then bias, then masks applied.

    Repetition: a seen id (prompt or output) is divided by the factor when positive, multiplied when negative
    (Keskar et al. 2019). Frequency and presence: minus factor times count, minus factor if generated (OpenAI's).
    """
    x = logits.float().clone()
    if penalties is not None:
        edited = x.index_select(0, penalties.rows)
        generated = penalties.output_counts > 0
        repeated = torch.where(edited > 0, edited / penalties.repetition, edited * penalties.repetition)
        edited = torch.where(generated | penalties.in_prompt, repeated, edited)
        edited = edited - penalties.frequency * penalties.output_counts - penalties.presence * generated
        x.index_copy_(0, penalties.rows, edited)
    if bias is not None:
        x.index_put_((bias.rows, bias.ids), bias.values, accumulate=True)
    if masks is not None:
        kept = x.index_select(0, masks.rows).masked_fill_(~masks.allowed(x.shape[1]), -torch.inf)
        x.index_copy_(0, masks.rows, kept)
    return x


def sample(logits: Tensor, *, edited: Tensor | None = None, draws: DrawInputs | None = None) -> tuple[Tensor, Tensor]:
    """One token per row: the greedy one, or a seeded draw for the rows named in `draws`.

    Args:
        logits: [R, V] float, the model's own.
        edited: [R, V] float32, from `edit_logits`, to choose from; None = the model's own.

    Returns:
        ids [R] int64 (0 in an invalid row); valid [R] bool, decided on the model's own logits and, where the edits
        leave nothing above -inf, on the edited ones too.
    """
    ids, valid = greedy_tokens(logits)
    if edited is not None:
        ids, still_valid = greedy_tokens(edited)
        valid = valid & still_valid
    if draws is not None:
        source = logits if edited is None else edited
        drawn = _draw(source.index_select(0, draws.rows).float(), draws)
        ids = ids.index_copy(0, draws.rows, drawn)
    return ids.masked_fill(~valid, 0), valid


def processed_logits(
    logits: Tensor,
    *,
    penalties: Penalties | None = None,
    bias: Bias | None = None,
    masks: Masks | None = None,
    draws: DrawInputs | None = None,
) -> Tensor:
    """The logits that `sample` chooses from: those of the processed_logprobs view, before temperature.

    Args:
        logits: [R, V] float, the model's own.

    Returns:
        [R, V] float32: edited by penalties, bias and masks, -inf where the filters of a row in `draws` drop an id.
        With the row's temperature, token_logprobs renormalises over what is left. A row that is not valid stays as
        edited, so that it shows.
    """
    x = edit_logits(logits, penalties, bias, masks)
    return x if draws is None else filter_logits_(x, draws)


def filter_logits_(x: Tensor, draws: DrawInputs) -> Tensor:
    """-inf in logits x [R, V] float32, in place, where the filters of a row in `draws` drop an id."""
    if not draws.filtered:
        return x
    drawn = _cut_by_sigma(x.index_select(0, draws.rows), draws)
    dropped = torch.ones_like(drawn, dtype=torch.bool)
    for part in _filtered(drawn, draws):
        # amax, since ids at -inf may be named twice
        kept = drawn.new_zeros((len(part.rows), drawn.shape[1]), dtype=torch.uint8)
        kept.scatter_reduce_(1, part.ids.long(), part.keep.byte(), "amax")
        dropped.index_copy_(0, part.rows, kept == 0)
    dropped &= drawn.amax(-1, keepdim=True).isfinite()
    return x.index_copy_(0, draws.rows, drawn.masked_fill_(dropped, -torch.inf))


def _draw(x: Tensor, draws: DrawInputs) -> Tensor:
    """Draw one id [D] int64 per row of logits x [D, V] float32."""
    count, vocab = x.shape
    if not draws.filtered:
        tempered = _temper(x, x.amax(-1, keepdim=True), draws)
        return (tempered + gumbel(draws.keys, torch.arange(vocab, device=x.device).expand(count, -1))).argmax(-1)
    x = _cut_by_sigma(x, draws)
    drawn = torch.zeros(count, dtype=torch.int64, device=x.device)
    for part in _filtered(x, draws):
        noisy = part.values.masked_fill(~part.keep, -torch.inf) + gumbel(draws.keys[part.rows], part.ids.long())
        # Of equals the lowest id, as without filters: a row's draw must not depend on whether its company has filters.
        best = noisy.amax(-1, keepdim=True)
        drawn.index_copy_(0, part.rows, part.ids.masked_fill(noisy < best, vocab).amin(-1).long())
    return drawn


def _temper(x: Tensor, maximum: Tensor, draws: DrawInputs) -> Tensor:
    """Logits over temperature, the best of the row ([D, 1] `maximum`) at 0.

    Shifted first, so that neither a large common offset nor a low temperature eats the low bits of what is compared
    with noise of size 1 (logits of 100 at 1e-5 would be multiples of 1), and nothing overflows.
    """
    return (x - maximum) / draws.temperature.unsqueeze(1)


def _cut_by_sigma(x: Tensor, draws: DrawInputs) -> Tensor:
    """Logits x [D, V] float32, -inf where they are more than n standard deviations below the row's best.

    n is top_n_sigma, and the deviation that of all logits above -inf. Before temperature, which changes nothing: best,
    deviation and logits are all divided by it. A row that is not valid is left as it is. (Tang et al. 2024,
    arXiv 2411.07641, and llama.cpp's sampler of this name.)
    """
    rows = torch.arange(len(x), device=x.device)
    if x.device.type == "cpu":  # elsewhere, to know which rows have it would be to wait for the device
        rows = torch.from_numpy(np.flatnonzero(draws.top_n_sigma.numpy()))
        if not len(rows):
            return x
    some, n = x[rows].double(), draws.top_n_sigma[rows].double().unsqueeze(1)
    best, there = some.amax(-1, keepdim=True), some > -torch.inf
    gap = (best - some).clamp(max=FARTHEST).masked_fill(~there, 0.0)
    # Sums by cumsum: they must not depend on how many rows there are.
    count = there.sum(-1, keepdim=True)
    mean = gap.cumsum(-1)[:, -1:] / count
    variance = (gap - mean).square().masked_fill(~there, 0.0).cumsum(-1)[:, -1:] / count
    below = (gap > n * variance.sqrt() * SIGMA_SLACK) & best.isfinite() & (n > 0)
    return x.index_copy(0, rows, x[rows].masked_fill(below, -torch.inf))


class _Candidates(NamedTuple):
    """The W best ids of n rows.

    Attributes:
        rows: [n] int64, which rows of the draw.
        values: [n, W] float32, tempered, the row's best at 0.
        ids: [n, W] int32, best first.
        keep: [n, W] bool, whether the filters leave the id.
        more: [n] bool, whether more ids must be looked at: the filters may leave others too, or top-p cannot be told.
    """

    rows: Tensor
    values: Tensor
    ids: Tensor
    keep: Tensor
    more: Tensor


def _filtered(x: Tensor, draws: DrawInputs) -> Iterator[_Candidates]:
    """The ids that the filters leave of logits x [D, V] float32: every row, then again, whole, those that need to be.

    On the CPU few rows need more than the best `_CANDIDATES`; elsewhere all are taken whole, since to know would be to
    wait for the device.
    """
    count, vocab = x.shape
    maximum = x.amax(-1, keepdim=True)
    log_sum = row_normaliser(_temper(x, maximum, draws))[1].unsqueeze(1)  # the maximum is 0
    index = torch.arange(count, device=x.device)
    width = min(_CANDIDATES, vocab) if x.device.type == "cpu" else vocab
    best = _among_best(index, x, maximum, log_sum, draws, width)
    yield best
    if width < vocab:
        unresolved = best.more.numpy().nonzero()[0]
        if len(unresolved):
            index = torch.from_numpy(unresolved)
            yield _among_best(index, x[index], maximum[index], log_sum[index], draws.take(index), vocab)


def _among_best(
    rows: Tensor, x: Tensor, maximum: Tensor, log_sum: Tensor, draws: DrawInputs, width: int
) -> _Candidates:
    """Filter the `width` best ids of `rows` of the draw, whose logits are x.

    top-k first; top-p over what it left, renormalised; min-p against the best id's probability. `log_sum` [D, 1] is of
    the tempered row; the order is that of the logits themselves, since tempering can merge neighbours.
    """
    values, ids = ordered_top_k(x, width)
    values = _temper(values, maximum, draws)
    top_k = torch.where(draws.top_k > 0, draws.top_k, x.shape[1]).unsqueeze(1)
    place = torch.arange(width, device=x.device)
    in_top_k = place < top_k
    probability = torch.exp(values - log_sum).masked_fill(~in_top_k, 0.0)
    mass = probability.double().cumsum(-1)
    # For top-p the whole is the mass that top-k left. Where that is of more ids than these, but not of all, it is not
    # known here; 1 bounds it from above.
    total = torch.where(top_k <= width, mass[:, -1:], 1.0)
    before = mass - probability
    top_p = draws.top_p.unsqueeze(1)
    # Off keeps all: the mass of rounded probabilities can pass 1 before its last members.
    keep = in_top_k & ((before < top_p * total) | (top_p >= 1.0))
    keep &= probability >= draws.min_p.unsqueeze(1) * probability[:, :1]
    keep[:, 0] = True
    unweighed = (top_k < x.shape[1]) & (top_p < 1.0)
    more = (top_k.squeeze(1) > width) & (keep[:, -1] | unweighed.squeeze(1))
    return _Candidates(rows, values, ids, keep, more)


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise, a pure function of (key, id).

    Args:
        keys: [D, 2], as in `DrawRows`.
        ids: [D, N] int64.

    Returns:
        [D, N] float32, from `gumbel_of_bits`.
    """
    first = _wrap(keys[:, :1])
    second = _wrap(keys[:, 1:])
    low = _mix(ids.int() + first)
    return gumbel_of_bits(_mix(low ^ second), low)


def gumbel_of_bits(high: Tensor, low: Tensor) -> Tensor:
    """Standard Gumbel noise from two hashed words, -log(-log(1 - u)).

    The largest noise comes of the smallest u, so that a float32 resolves it: the chance of an id is right however far
    it is below the best, up to the largest noise, 37.4. The least noise is -2.8.

    Args:
        high, low: int32, from `gumbel`.
    """
    return uniform_of_bits(high, low).neg_().log1p_().neg_().log_().neg_()


def uniform_of_bits(high: Tensor, low: Tensor) -> Tensor:
    """u in (0, 1), float32: an odd multiple of 2^-54 before it is rounded.

    Its first 23 bits are the inverted upper ones of `high`, its last 31 the lower ones of `low`, the last of them set.
    The kernels compute with the same bits of u where u is less than 1/3 (noise above 0.9), and beyond with 1 - u to
    2^-24, which is what a float32 close to 1 can tell.
    """
    part = ((high >> 9) & 0x7FFFFF).float().mul_(-(2.0**-23)).add_(1.0 - 2.0**-23)
    fraction = ((low & 0x7FFFFFFF) | 1).float().mul_(2.0**-54)
    return part.add_(fraction).clamp_(max=1.0 - 2.0**-24)


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys for the draw at `position` (number of tokens generated before it) under `seed` (64 bits)."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    a = _mix_int((low + 0x9E3779B9) & 0xFFFFFFFF)
    b = _mix_int(a ^ high)
    first = _mix_int((b + position) & 0xFFFFFFFF)
    return first, _mix_int(first ^ 0x85EBCA6B ^ a)


def _wrap(x: Tensor) -> Tensor:
    """The lower 32 bits as an int32."""
    return ((x.long() + 2**31) & 0xFFFFFFFF).sub_(2**31).int()


# A 32-bit integer hash of two multiply-xorshift rounds. Constants: Wellons' "lowbias32" search, as published.
def _mix(x: Tensor) -> Tensor:
    """The hash on int32 bits, elementwise; multiplication wraps, shifts are made logical by the masks."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x21F0AAAD
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x735A2D97
    x ^= (x >> 15) & 0x1FFFF
    return x


def _mix_int(x: int) -> int:
    x ^= x >> 16
    x = (x * 0x21F0AAAD) & 0xFFFFFFFF
    x ^= x >> 15
    x = (x * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)
