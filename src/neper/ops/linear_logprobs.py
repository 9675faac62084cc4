"""linear_logprobs: token_logprobs for hidden states and a head weight, with few logits in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from neper.errors import InvalidRequestError
from neper.ops.buffers import LogprobBuffers
from neper.ops.logprobs.api import TokenLogprobs
from neper.ops.logprobs.token_sets import TokenSets
from neper.ops.token_logprobs import (
    check_buffers,
    check_per_row,
    check_tensors,
    check_top_k,
    list_width,
    token_logprobs,
    token_sets,
)


@torch.no_grad()
def linear_logprobs(
    hidden: Tensor,
    head: Tensor | Callable[[Tensor], Tensor],
    token_ids: Tensor | None,
    top_k: int = 0,
    *,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    soft_cap: float | None = None,
    temperature: Tensor | None = None,
    row_top_k: Tensor | None = None,
    allowed: TokenSets | Sequence[Sequence[int]] | None = None,
    logprob_token_ids: TokenSets | Sequence[Sequence[int]] | None = None,
    max_logits_bytes: int = 256 * 2**20,
    out: LogprobBuffers | None = None,
) -> TokenLogprobs:
    """Results of token_logprobs for the logits of T positions, which are made and scored a few rows at a time.

    The product is in the weights' dtype, scale and soft cap in float32:

        x = hidden @ head.T + bias;    x = logit_scale * x;    x = soft_cap * tanh(x / soft_cap)

    Scores are exact for these logits. The logits themselves are a matrix product's: their last bits may depend on how
    many rows it is given at once, so on max_logits_bytes. No gradients are recorded.

    Args:
        hidden: [T, D] float.
        head: [V, D] in the dtype of `hidden`, or a function of hidden [n, D] that returns logits [n, V] float (a packed
            or quantised head), before scale and soft cap.
        vocab_size: V of a function `head` whose logits are in the dtype of `hidden`; None = call it with one row first,
            to learn both.
        token_ids, top_k, temperature, row_top_k, allowed, logprob_token_ids, out: as for token_logprobs, a row being a
            position.
        bias: [V] in the dtype of `head`, which must be a weight.
        logit_scale: > 0.
        soft_cap: > 0; None = none. It makes +inf finite, so only NaN makes such a row invalid.
        max_logits_bytes: how much memory logits may take: the product, and the float32 copy of it that is scaled or
            capped. One row is always made, however large. What the reduction itself needs comes on top (64 MiB in plain
            torch).

    Raises:
        InvalidRequestError: on shapes or dtypes that do not fit, a scale, cap or limit out of range, and as
            token_logprobs does.
    """
    _check(hidden, head, bias, logit_scale, soft_cap, max_logits_bytes)
    top_k = check_top_k(top_k)
    count = len(hidden)
    check_per_row(count, hidden.device, token_ids=token_ids, row_top_k=row_top_k, temperature=temperature)
    if isinstance(head, Tensor):
        vocab, dtype = len(head), head.dtype
    elif vocab_size is not None:
        vocab, dtype = vocab_size, hidden.dtype
    else:
        probe = _product(hidden[:1], head, bias)
        vocab, dtype = probe.shape[1], probe.dtype
        del probe
    allowed = token_sets("allowed", allowed, count, vocab, hidden.device)
    named = token_sets("logprob_token_ids", logprob_token_ids, count, vocab, hidden.device)
    width = list_width(vocab if top_k == -1 else top_k, allowed, named)

    scaled = logit_scale != 1.0 or soft_cap is not None
    # What a function returned is not ours to write to: it may keep it.
    in_place = isinstance(head, Tensor) and dtype == torch.float32
    row_bytes = vocab * (dtype.itemsize + (4 if scaled and not in_place else 0))
    tile = max(1, min(count, max_logits_bytes // max(1, row_bytes)))
    if out is None:
        scratch = LogprobBuffers.allocate(tile, vocab, 0, hidden.device)
        out = replace(scratch, scores=TokenLogprobs.empty(count, width, hidden.device))
    else:
        check_buffers(out, count, width, vocab, hidden.device)
    result = out.view(count, width)
    for begin in range(0, max(count, 1), tile):  # without rows, one empty tile: token_logprobs checks its arguments
        part = slice(begin, begin + tile)
        scores = token_logprobs(  # no name here holds the logits, so they are gone before the next product
            _scale(_product(hidden[part], head, bias, vocab), logit_scale, soft_cap, in_place),
            token_ids[part] if token_ids is not None else None,
            top_k,
            row_top_k=row_top_k[part] if row_top_k is not None else None,
            temperature=temperature[part] if temperature is not None else None,
            allowed=allowed.take(part) if allowed is not None else None,
            logprob_token_ids=named.take(part) if named is not None else None,
            out=replace(out, scores=out.scores.take(part)),
        )
        used = scores.top_ids.shape[1]  # a tile without the longest sets has fewer places
        result.top_ids[part, used:].fill_(-1)
        result.top_logprobs[part, used:].fill_(-torch.inf)
    return result


def _product(
    hidden: Tensor, head: Tensor | Callable[[Tensor], Tensor], bias: Tensor | None, vocab: int | None = None
) -> Tensor:
    """Logits [n, V] before scale and soft cap."""
    if isinstance(head, Tensor):
        return F.linear(hidden, head, bias)
    logits = head(hidden)
    if not isinstance(logits, Tensor):
        raise InvalidRequestError(f"what head returns must be a torch tensor, got {type(logits).__name__}")
    if logits.dim() != 2 or len(logits) != len(hidden) or not logits.is_floating_point():
        raise InvalidRequestError(
            f"head must return [{len(hidden)}, vocabulary] float logits, got {list(logits.shape)} {logits.dtype}"
        )
    if vocab is not None and logits.shape[1] != vocab:
        raise InvalidRequestError(f"vocab_size is {vocab}, but head returned logits of {logits.shape[1]} ids")
    return logits


def _scale(logits: Tensor, logit_scale: float, soft_cap: float | None, in_place: bool) -> Tensor:
    """Scaled and capped logits, float32; `logits` themselves where there is nothing to do.

    tanh may be used: torch's CPU kernel computes an element alike wherever it stands (torch 2.11, unlike exp2).
    """
    if logit_scale == 1.0 and soft_cap is None:
        return logits
    x = logits if in_place else logits.to(torch.float32, copy=True)
    if logit_scale != 1.0:
        x.mul_(logit_scale)
    if soft_cap is not None:
        x.div_(soft_cap).tanh_().mul_(soft_cap)
    return x


def _check(
    hidden: Tensor,
    head: Tensor | Callable[[Tensor], Tensor],
    bias: Tensor | None,
    logit_scale: float,
    soft_cap: float | None,
    max_logits_bytes: int,
) -> None:
    check_tensors(hidden=hidden, bias=bias, **({} if callable(head) else {"head": head}))
    if hidden.dim() != 2 or not hidden.is_floating_point():
        raise InvalidRequestError(f"hidden must be a [positions, size] float tensor, got {list(hidden.shape)}")
    if isinstance(head, Tensor):
        if head.dim() != 2 or head.shape[1] != hidden.shape[1]:
            raise InvalidRequestError(
                f"head must be [vocabulary, {hidden.shape[1]}] for hidden states of that size, got {list(head.shape)}"
            )
        if head.device != hidden.device or (bias is not None and bias.device != hidden.device):
            raise InvalidRequestError(f"head and bias must be on {hidden.device}, where hidden is")
        if head.dtype != hidden.dtype:
            raise InvalidRequestError(f"hidden is {hidden.dtype} but head is {head.dtype}: convert one of them")
        if bias is not None and (bias.shape != head.shape[:1] or bias.dtype != head.dtype):
            raise InvalidRequestError(
                f"bias must be [{head.shape[0]}] {head.dtype} as head is, got {list(bias.shape)} {bias.dtype}"
            )
    elif bias is not None:
        raise InvalidRequestError("bias is for a head weight: a function adds its own")
    if not 0 < logit_scale < math.inf:
        raise InvalidRequestError(f"logit_scale must be above 0 and finite, got {logit_scale}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise InvalidRequestError(f"soft_cap must be above 0 and finite, got {soft_cap}")
    if max_logits_bytes < 1:
        raise InvalidRequestError(f"max_logits_bytes must be at least 1, got {max_logits_bytes}")
