"""The weights that a config asks for: the Hugging Face name and shape of each, known without making any."""

from __future__ import annotations

from collections.abc import Iterator

from neper.models.model_config import ModelConfig

Shape = tuple[int, ...]


def weight_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield them one by one: a config can ask for more layers than memory holds."""
    hidden, size = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (heads, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_heads, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_heads, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, heads, config.o_bias),
        "mlp.gate_proj": (size, hidden, config.mlp_bias),
        "mlp.up_proj": (size, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, size, config.mlp_bias),
    }
    norms: dict[str, int] = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for number in range(config.num_layers):
        prefix = f"model.layers.{number}"
        for name, (rows, columns, bias) in linears.items():
            yield f"{prefix}.{name}.weight", (rows, columns)
            if bias:
                yield f"{prefix}.{name}.bias", (rows,)
        for name, length in norms.items():
            yield f"{prefix}.{name}.weight", (length,)
