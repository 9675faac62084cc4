"""Products of a step's rows with a weight matrix: torch's, or where few rows make them a matter of reading, kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from neper.ops import backends
from neper.ops.fused.reference import silu_mul

if TYPE_CHECKING:
    from neper.ops.linear.launch import LinearScratch

# The kernels' own limit, known here so that nobody else needs Triton.
_MAX_ROWS = 64


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    scratch: LinearScratch | None = None,
) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias [N] → [T, N], in `out` where it is given.

    The last bits of a row may depend on how many rows there are: in the kernels on which of 1, 16, 32 or 64 they are
    padded to.

    Args:
        scratch: of the kernels, see `allocate_scratch`; without it torch multiplies.
    """
    if scratch is not None and x.shape[0] <= _MAX_ROWS:
        from neper.ops.linear import launch as linear_triton

        config = linear_triton.choose(x.shape[0], *weight.shape)
        if config is not None and linear_triton.supports(x, weight):
            return linear_triton.skinny_linear(x, weight, bias, out, scratch=scratch, config=config)
    if out is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def gate_up_silu(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scratch: LinearScratch | None = None
) -> Tensor:
    """silu(gate) * up of `linear(x, weight, bias)`, whose first half of columns is the gate: [T, K] → [T, N / 2]."""
    if scratch is not None and bias is None and x.shape[0] <= _MAX_ROWS:
        from neper.ops.linear import launch as linear_triton

        if linear_triton.supports(x, weight):
            return linear_triton.skinny_gate_up(x, weight, scratch=scratch)
    return silu_mul(linear(x, weight, bias, scratch=scratch))


def allocate_scratch(max_n: int, dtype: torch.dtype, device: torch.device) -> LinearScratch | None:
    """Scratch for products with weights of up to `max_n` rows in `dtype`; None where torch does them all.

    Products that share it must run one after the other.
    """
    if dtype not in (torch.bfloat16, torch.float16) or backends.linear(device).name != "triton":
        return None
    from neper.ops.linear import launch as linear_triton

    return linear_triton.allocate_scratch(_MAX_ROWS, max_n, device)
