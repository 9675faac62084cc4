"""Products of a step's rows with a weight matrix, by torch. They satisfy `neper.ops.linear.api.LinearOps`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neper.ops.common.variants import Variants
from neper.ops.fused.reference import silu_mul


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None, scratch: object = None
) -> Tensor:
    """See `LinearOps.linear`."""
    if out is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def gate_up_silu(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scratch: object = None) -> Tensor:
    """See `LinearOps.gate_up_silu`."""
    return silu_mul(linear(x, weight, bias))


def allocate_scratch(*_: Any, **__: Any) -> None:
    """Torch needs none."""


def variants(*_: Any, **__: Any) -> Variants:
    """Nothing is compiled."""
    return Variants((), [])
