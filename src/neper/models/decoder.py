"""The decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3): token ids to hidden states over a paged cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from neper.models.kv_cache import KVCache
from neper.models.layers import MLP, Attention, Linear, RMSNorm, Rotary, RotaryEmbedding
from neper.models.model_config import ModelConfig
from neper.ops.attention import AttentionInputs


class DecoderLayer:
    """Attention and MLP, each on the normalised residual stream and added back to it."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(config.hidden_size, eps, dtype=dtype, device=device)
        self.self_attn = Attention(config, layer, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype=dtype, device=device)

    def __call__(
        self, hidden: Tensor, rotary: Rotary, k_cache: Tensor, v_cache: Tensor, attention: AttentionInputs
    ) -> Tensor:
        """hidden [T, hidden_size] → [T, hidden_size]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, k_cache, v_cache, attention)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder:
    """A model without its sampling: ids → hidden states, and hidden states → logits.

    A new decoder's weights are uninitialised memory: `neper.models.weights.load_weights` fills `weight_slots()` and
    calls `prepack()`. Inference only: call it under `torch.inference_mode()`.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embed_tokens = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [DecoderLayer(config, layer, dtype=dtype, device=device) for layer in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.rotary_emb = RotaryEmbedding(config, dtype=dtype, device=device)
        self.lm_head = Linear(
            config.hidden_size,
            {"lm_head": config.vocab_size},
            bias=False,
            dtype=dtype,
            device=device,
            weight=self.embed_tokens if config.tie_word_embeddings else None,
        )

    def forward(self, input_ids: Tensor, positions: Tensor, kv_cache: KVCache, attention: AttentionInputs) -> Tensor:
        """Hidden states of a step's tokens, after the final norm; their keys and values stay in `kv_cache`.

        Args:
            input_ids: [T] int64, the tokens of all sequences of the step, one after the other.
            positions: [T] int64, each token's position in its own sequence.
            attention: where each token's keys and values go, and what it sees.

        Returns:
            [T, hidden_size] in the model's dtype.
        """
        hidden = F.embedding(input_ids, self.embed_tokens)
        rotary = self.rotary_emb(positions)
        for layer, (k_cache, v_cache) in zip(self.layers, kv_cache.layers, strict=True):
            hidden = layer(hidden, rotary, k_cache, v_cache, attention)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden_size] from `forward` → [R, vocab_size] in the model's dtype."""
        return self.lm_head(hidden)

    def weight_slots(self) -> dict[str, Tensor]:
        """The Hugging Face name of every weight → the tensor to copy it into. Gone after `prepack`."""
        slots = {"model.embed_tokens.weight": self.embed_tokens}
        for number, layer in enumerate(self.layers):
            prefix = f"model.layers.{number}"
            slots.update(layer.input_layernorm.slots(f"{prefix}.input_layernorm"))
            slots.update(layer.self_attn.slots(f"{prefix}.self_attn"))
            slots.update(layer.post_attention_layernorm.slots(f"{prefix}.post_attention_layernorm"))
            slots.update(layer.mlp.slots(f"{prefix}.mlp"))
        slots.update(self.norm.slots("model.norm"))
        if not self.config.tie_word_embeddings:
            slots.update(self.lm_head.slots(""))
        return slots

    def prepack(self) -> None:
        """Reorder the loaded linear weights for the device, one at a time; see `Linear`."""
        for layer in self.layers:
            layer.self_attn.prepack()
            layer.mlp.prepack()
        self.lm_head.prepack()
