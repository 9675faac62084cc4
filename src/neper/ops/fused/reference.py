"""The small operations in plain torch: their definition, and what a CPU runs. They satisfy `neper.ops.fused.api`.

The kernels do the same in float32 and round once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neper.ops.common.variants import Variants


def embed(token_ids: Tensor, table: Tensor, last_tokens: Tensor | None = None) -> Tensor:
    """See `FusedOps.embed`."""
    if last_tokens is not None:
        slots = (-1 - token_ids).clamp_(min=0)
        token_ids = torch.where(token_ids < 0, last_tokens[slots].to(token_ids.dtype), token_ids)
    return F.embedding(token_ids, table)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `FusedOps.rms_norm`."""
    return F.rms_norm(x, weight.shape, None, eps) * weight


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `FusedOps.add_rms_norm`."""
    return F.rms_norm(hidden.add_(delta), weight.shape, None, eps) * weight


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `FusedOps.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def variants(*_: Any, **__: Any) -> Variants:
    """Nothing is compiled."""
    return Variants((), [])
