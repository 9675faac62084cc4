"""The layers of a decoder, for inference: plain objects that hold weights and are called with a step's flat tokens.

Weights are allocated here and filled by `neper.models.weights` through `slots()`: the Hugging Face name of every
weight and the tensor (often a view of a fused one) that it is copied into.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from neper.models.model_config import ModelConfig
from neper.ops import backends
from neper.ops.attention.api import AttentionInputs
from neper.ops.linear.api import LinearScratch

Slots = Iterator[tuple[str, Tensor]]


@cache
def can_prepack() -> bool:
    """True where this CPU build of torch has oneDNN's linear with a prepacked bfloat16 weight, and it works."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        weight = torch.ones(16, 16, dtype=torch.bfloat16)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        out = torch.ops.mkldnn._linear_pointwise(weight[:1], packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool((out == 16).all())


class RMSNorm:
    """x / rms(x) in float32, cast to x's dtype, times the weight: two roundings, as transformers does it."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps
        self._ops = backends.fused(device)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, size] → the same shape and dtype."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """Add delta to hidden in place. Returns the norm of the sum."""
        return self._ops.add_rms_norm(hidden, delta, self.weight, self.eps)

    def slots(self, prefix: str) -> Slots:
        yield f"{prefix}.weight", self.weight


class Linear:
    """x @ weight.T + bias, for one checkpoint layer or several stacked by rows (`parts`: name → rows).

    `prepack` reorders a bfloat16 weight on a CPU once for oneDNN. A decode step of a 135M model then took 12 ms instead
    of 17.5 ms with one row, and 13 ms instead of 22 ms with eight.

    Attributes:
        scratch: memory for the kernels that multiply few rows. Without it torch multiplies.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight: Tensor | None = None,
    ) -> None:
        rows = sum(parts.values())
        self.parts = dict(parts)
        self.num_rows = rows
        self.weight = torch.empty(rows, in_features, dtype=dtype, device=device) if weight is None else weight
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None
        self.prepacked = False
        self.scratch: LinearScratch | None = None
        self._ops = backends.linear(device)
        self._fused = backends.fused(device)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, in_features] → [T, rows]; in `out` where it is given."""
        if self.prepacked:
            made: Any = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            packed: Tensor = made
            return packed if out is None else out.copy_(packed)
        return self._ops.linear(x, self.weight, self.bias, out=out, scratch=self.scratch)

    def gate_up_silu(self, x: Tensor) -> Tensor:
        """silu(gate) * up of the product, whose first half of rows is the gate: [T, in_features] → [T, rows / 2]."""
        if self.prepacked:
            return self._fused.silu_mul(self(x))
        return self._ops.gate_up_silu(x, self.weight, self.bias, scratch=self.scratch)

    def slots(self, prefix: str) -> Slots:
        start = 0
        for part, rows in self.parts.items():
            name = f"{prefix}.{part}" if prefix else part
            yield f"{name}.weight", self.weight[start : start + rows]
            if self.bias is not None:
                yield f"{name}.bias", self.bias[start : start + rows]
            start += rows

    def prepack(self) -> None:
        """Replace the loaded weight by its reordered form, if there is one. The plain one is dropped."""
        if not self.prepacked and self.weight.dtype == torch.bfloat16 and self.weight.is_cpu and can_prepack():
            # The batch size is a hint for the layout; 1, 8 and 32 measured alike, also for 512 rows.
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, 8)
            self.prepacked = True


def rotary_table(config: ModelConfig, num_positions: int, device: torch.device) -> Tensor:
    """[num_positions, head_dim] float32: the cosines of a position's head_dim / 2 angles, then their sines."""
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inverse_frequencies(config)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """[head_dim / 2] float32: radians per position; low frequencies are stretched as Llama 3.1 does where asked."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    turns = scaling.original_max_position_embeddings / (2 * math.pi / plain)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * plain / scaling.factor + smooth * plain
    scaled = torch.where(turns < scaling.low_freq_factor, plain / scaling.factor, blended)
    return torch.where(turns > scaling.high_freq_factor, plain, scaled)


class Attention:
    """Grouped-query attention over the paged cache, with one linear layer for queries, keys and values."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.eps = config.rms_norm_eps
        self.window = config.sliding_windows[layer]
        self._ops = backends.attention(device, config.head_dim)
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        self.qkv_proj = Linear(config.hidden_size, parts, bias=config.qkv_bias, dtype=dtype, device=device)
        self.o_proj = Linear(heads, {"o_proj": config.hidden_size}, bias=config.o_bias, dtype=dtype, device=device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)

    def __call__(
        self, x: Tensor, rotary: Tensor, k_cache: Tensor, v_cache: Tensor, attention: AttentionInputs
    ) -> Tensor:
        """x [T, hidden_size] → [T, hidden_size]; the tokens' keys and values are written to the cache first."""
        out = self._ops.attend(
            self.qkv_proj(x),
            k_cache,
            v_cache,
            attention,
            num_heads=self.num_heads,
            rotary=rotary,
            q_norm=self.q_norm.weight if self.q_norm is not None else None,
            k_norm=self.k_norm.weight if self.k_norm is not None else None,
            eps=self.eps,
            scale=self.scale,
            window=self.window,
        )
        return self.o_proj(out)

    def slots(self, prefix: str) -> Slots:
        yield from self.qkv_proj.slots(prefix)
        yield from self.o_proj.slots(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.slots(f"{prefix}.q_norm")
            yield from self.k_norm.slots(f"{prefix}.k_norm")

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv_proj, self.o_proj


class MLP:
    """down(silu(gate(x)) * up(x)), with one linear layer for gate and up."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        size, bias = config.intermediate_size, config.mlp_bias
        parts = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = Linear(config.hidden_size, parts, bias=bias, dtype=dtype, device=device)
        self.down_proj = Linear(size, {"down_proj": config.hidden_size}, bias=bias, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        return self.down_proj(self.gate_up_proj.gate_up_silu(x))

    def slots(self, prefix: str) -> Slots:
        yield from self.gate_up_proj.slots(prefix)
        yield from self.down_proj.slots(prefix)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up_proj, self.down_proj
