"""Products of a step's rows with a weight matrix: what an implementation of them offers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from neper.ops.common.variants import Variants


@dataclass(frozen=True)
class LinearScratch:
    """Where programs leave their parts of a sum. Zeroed once; each product leaves the tickets at zero.

    Products that share it must run one after the other.

    Attributes:
        partials: float32.
        tickets: int32, one for each tile of columns: how many programs have left their part.
    """

    partials: Tensor
    tickets: Tensor


class LinearOps(Protocol):
    """An implementation of the products."""

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        out: Tensor | None = None,
        scratch: LinearScratch | None = None,
    ) -> Tensor:
        """x [T, K] @ weight [N, K].T + bias [N] → [T, N], in `out` where it is given.

        The last bits of a row may depend on how many rows there are: in the kernels on which of 1, 16, 32 or 64 they
        are padded to.

        Args:
            scratch: of the kernels, see `allocate_scratch`; without it torch multiplies.
        """

    def gate_up_silu(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, scratch: LinearScratch | None = None
    ) -> Tensor:
        """silu(gate) * up of the same product, whose first half of columns is the gate: [T, K] → [T, N / 2]."""

    def allocate_scratch(self, max_n: int, dtype: torch.dtype, device: torch.device) -> LinearScratch | None:
        """Scratch for products with weights of up to `max_n` rows in `dtype`; None where torch does them all.

        Products that share it must run one after the other.
        """

    def variants(self, products: Iterable[tuple[Tensor, Tensor | None, bool]], device: torch.device) -> Variants:
        """All that products of few rows with these weights need, each with its bias and whether it is gated."""
