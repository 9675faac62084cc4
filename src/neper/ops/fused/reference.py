"""The small operations between a decoder's matrix products: embedding, norms with their residual, and SiLU times up.

Each is defined here in plain torch, which is also what a CPU runs; elsewhere `neper.ops.fused.launch` does the same in
one kernel, in float32 and rounded once. There a row's values must lie side by side; rows may be any distance apart.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from neper.ops import backends


def embed(token_ids: Tensor, table: Tensor, last_tokens: Tensor | None = None) -> Tensor:
    """The rows of `table` for `token_ids`.

    Args:
        token_ids: [T] int32 or int64. With `last_tokens`, an id below 0 is -1 - slot: the token last sampled there.
        table: [V, D].
        last_tokens: [slots] int32, each a row of the table.

    Returns:
        [T, D] in the table's dtype.
    """
    if backends.fused(table.device).name == "triton":
        from neper.ops.fused import launch as fused_triton

        return fused_triton.embed(token_ids, table, last_tokens)
    if last_tokens is not None:
        slots = (-1 - token_ids).clamp_(min=0)
        token_ids = torch.where(token_ids < 0, last_tokens[slots].to(token_ids.dtype), token_ids)
    return F.embedding(token_ids, table)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    Plain torch rounds twice, as transformers does: to x's dtype before the weight and after.

    Args:
        x: [T, D].
        weight: [D], of x's dtype.

    Returns:
        [T, D] in x's dtype.
    """
    if backends.fused(x.device).name == "triton":
        from neper.ops.fused import launch as fused_triton

        return fused_triton.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, None, eps) * weight


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """hidden += delta in place, and the norm of what `hidden` then holds.

    Args:
        hidden: [T, D], the residual stream; the sum is rounded to its dtype.
        delta: [T, D], of the same dtype.
        weight: [D], of the same dtype.

    Returns:
        [T, D]: `rms_norm` of the new `hidden`.
    """
    if backends.fused(hidden.device).name == "triton":
        from neper.ops.fused import launch as fused_triton

        return fused_triton.add_rms_norm(hidden, delta, weight, eps)
    return F.rms_norm(hidden.add_(delta), weight.shape, None, eps) * weight


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for [T, 2 I] whose first I columns are the gate → [T, I]."""
    if backends.fused(gate_up.device).name == "triton":
        from neper.ops.fused import launch as fused_triton

        return fused_triton.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
