"""The decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3): token ids to hidden states over a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from neper.models.kv_cache import KVCache
from neper.models.layers import MLP, Attention, Linear, RMSNorm, Slots, rotary_table
from neper.models.model_config import ModelConfig
from neper.ops import backends
from neper.ops.attention.api import AttentionInputs
from neper.ops.common.variants import Variants


class DecoderLayer:
    """Attention and MLP, each on the normalised residual stream and added back to it."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps, dtype=dtype, device=device)
        self.self_attn = Attention(config, layer, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype=dtype, device=device)

    def __call__(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        rotary: Tensor,
        cache: tuple[Tensor, Tensor],
        attention: AttentionInputs,
    ) -> Tensor:
        """One layer over the residual stream `hidden` [T, hidden_size], which it changes in place.

        `delta`: the output of the layer before, to be added first; None before the first layer. Returns this layer's.
        """
        norm = self.input_layernorm
        x = norm(hidden) if delta is None else norm.add(hidden, delta)
        delta = self.self_attn(x, rotary, *cache, attention)
        return self.mlp(self.post_attention_layernorm.add(hidden, delta))

    def slots(self, prefix: str) -> Slots:
        yield from self.input_layernorm.slots(f"{prefix}.input_layernorm")
        yield from self.self_attn.slots(f"{prefix}.self_attn")
        yield from self.post_attention_layernorm.slots(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.slots(f"{prefix}.mlp")


class Decoder:
    """A model without its sampling: ids → hidden states, and hidden states → logits.

    A new decoder's weights are uninitialised memory: `neper.models.weights.load_weights` fills `weight_slots()` and
    calls `prepack()`. Inference only: call it under `torch.inference_mode()`.

    Args:
        shares: the decoder whose embedding and head it uses; None = it has its own.

    Attributes:
        residual: [rows, hidden_size], its first rows the hidden states of the last `forward` before the final norm;
            None where nobody reads them.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, shares: Decoder | None = None
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.residual: Tensor | None = None
        self.embed_tokens: Tensor = (
            torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
            if shares is None
            else shares.embed_tokens
        )
        self.layers = [DecoderLayer(config, layer, dtype=dtype, device=device) for layer in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self._fused = backends.fused(device)
        self._rotary = torch.empty(0, config.head_dim, device=device)
        self._kept: list[Tensor] = []
        self.lm_head: Linear = (
            Linear(
                config.hidden_size,
                {"lm_head": config.vocab_size},
                bias=False,
                dtype=dtype,
                device=device,
                weight=self.embed_tokens if config.tie_word_embeddings else None,
            )
            if shares is None
            else shares.lm_head
        )

    def prepare(self, num_positions: int) -> None:
        """Make the rotary table for so many positions, and the scratch memory of the kernels for few rows."""
        if len(self._rotary) < num_positions:
            self._kept.append(self._rotary)  # graphs that were captured with it go on reading it
            self._rotary = rotary_table(self.config, num_positions, self.device)
        linears = self._linears()
        if linears[0].scratch is None:
            max_n = max(linear.num_rows for linear in linears)
            scratch = backends.linear(self.device).allocate_scratch(max_n, self.dtype, self.device)
            for linear in linears:
                linear.scratch = scratch

    def variants(self, block_size: int) -> list[Variants]:
        """The kernels that steps over a cache of such blocks need compiled; none where torch computes."""
        config, first = self.config, self.layers[0]
        gate_up = first.mlp.gate_up_proj
        plain = (first.self_attn.qkv_proj, first.self_attn.o_proj, first.mlp.down_proj, self.lm_head)
        products = [(gate_up.weight, gate_up.bias, gate_up.bias is None)]
        products += [(linear.weight, linear.bias, False) for linear in plain]
        return [
            backends.attention(self.device, config.head_dim).variants(
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                block_size,
                self.dtype,
                self.device,
                normed=config.qk_norm,
            ),
            self._fused.variants(config.hidden_size, config.intermediate_size, self.dtype, self.device),
            backends.linear(self.device).variants(products, self.device),
        ]

    def forward(
        self, token_ids: Tensor, kv_cache: KVCache, attention: AttentionInputs, last_tokens: Tensor | None = None
    ) -> Tensor:
        """Hidden states of a step's tokens, after the final norm; their keys and values stay in `kv_cache`.

        Args:
            token_ids: [T] int32, the tokens of all sequences of the step, one after the other; -1 - slot stands for a
                token in `last_tokens` [slots] int32.
            attention: the places of each token's keys and values, and the tokens that it sees. Positions are below the
                number that `prepare` was given.

        Returns:
            [T, hidden_size] in the model's dtype.
        """
        return self._through_layers(self._fused.embed(token_ids, self.embed_tokens, last_tokens), kv_cache, attention)

    def keep_residual(self, rows: int) -> Tensor:
        """Have each `forward` write its hidden states before the final norm into the first of so many rows.

        Returns: `residual`. The rows behind those of a step are the caller's.
        """
        self.residual = torch.zeros(rows, self.config.hidden_size, dtype=self.dtype, device=self.device)
        return self.residual

    def _through_layers(self, hidden: Tensor, kv_cache: KVCache, attention: AttentionInputs) -> Tensor:
        """The layers and the final norm over `hidden` [T, hidden_size], which they change in place."""
        delta: Tensor | None = None
        for layer, cache in zip(self.layers, kv_cache.layers, strict=True):
            delta = layer(hidden, delta, self._rotary, cache, attention)
        normed = self.norm(hidden) if delta is None else self.norm.add(hidden, delta)
        if self.residual is not None:
            self.residual[: len(hidden)].copy_(hidden)
        return normed

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [R, hidden_size] from `forward` → [R, vocab_size] in the model's dtype; in `out` where it is given."""
        return self.lm_head(hidden, out)

    def weight_slots(self) -> dict[str, Tensor]:
        """The Hugging Face name of every weight → the tensor to copy it into. Gone after `prepack`."""
        slots = {"model.embed_tokens.weight": self.embed_tokens}
        for number, layer in enumerate(self.layers):
            slots.update(layer.slots(f"model.layers.{number}"))
        slots.update(self.norm.slots("model.norm"))
        if not self.config.tie_word_embeddings:
            slots.update(self.lm_head.slots(""))
        return slots

    def prepack(self) -> None:
        """Reorder the loaded linear weights for the device, one at a time; see `Linear`."""
        for linear in self._linears():
            linear.prepack()

    def _linears(self) -> list[Linear]:
        linears = [linear for layer in self.layers for linear in (*layer.self_attn.linears, *layer.mlp.linears)]
        return [*linears, self.lm_head]
