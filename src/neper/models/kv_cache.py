"""The paged KV cache: one K and one V tensor per layer, addressed by slot."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """K and V of every layer, `[num_blocks * block_size, kv_heads, head_dim]` each.

    Block 0 (slots 0..block_size-1) is the null block: padding reads it, nothing owns it, and it stays zero.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks * block_size, num_kv_heads, head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: list[tuple[Tensor, Tensor]] = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(num_layers)
        ]

    @staticmethod
    def bytes_per_block(
        *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one block takes over all layers."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
