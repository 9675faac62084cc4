"""The small operations between a decoder's matrix products: embedding, norms with their residual, and SiLU times up."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from neper.ops.common.variants import Variants


class FusedOps(Protocol):
    """An implementation of the operations.

    In kernels a row's values must lie side by side; rows may be any distance apart.
    """

    def embed(self, token_ids: Tensor, table: Tensor, last_tokens: Tensor | None = None) -> Tensor:
        """The rows of `table` for `token_ids`.

        Args:
            token_ids: [T] int32 or int64. With `last_tokens`, an id below 0 is -1 - slot: the token last sampled there.
            table: [V, D].
            last_tokens: [slots] int32, each a row of the table.

        Returns:
            [T, D] in the table's dtype.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

        Plain torch rounds twice, as transformers does: to x's dtype before the weight and after.

        Args:
            x: [T, D].
            weight: [D], of x's dtype.

        Returns:
            [T, D] in x's dtype.
        """

    def add_rms_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """hidden += delta in place, and the norm of what `hidden` then holds.

        Args:
            hidden: [T, D], the residual stream; the sum is rounded to its dtype.
            delta: [T, D], of the same dtype.
            weight: [D], of the same dtype.

        Returns:
            [T, D]: `rms_norm` of the new `hidden`.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, for [T, 2 I] whose first I columns are the gate → [T, I]."""

    def variants(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device) -> Variants:
        """All that a model of these sizes needs."""
