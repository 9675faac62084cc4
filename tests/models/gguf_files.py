"""Writes tiny models as GGUF files, as llama.cpp's converter lays them out: input for the reading direction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.{kind}"
    _, _, number, rest = stem.split(".", 3)
    return f"blk.{number}.{LAYER_NAMES[rest]}.{kind}"


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head reordered so that rotary pairs are neighbours: Llama's layout in GGUF."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    remove: tuple[str, ...] = (),
    **changes: Any,
) -> None:
    """Write `model` and the tokenizer saved in `path`'s directory.

    Args:
        quantization: of matrices whose rows are long enough for it; all else is float32.
        remove: metadata keys or tensors to leave out.
        changes: metadata to add or replace, with "__" for ".".
    """
    config = model.config
    kind = config.model_type
    tokenizer = json.loads((path.parent / "tokenizer.json").read_text())
    vocab = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    tokens = [vocab.get(number, f"[PAD{number}]") for number in range(config.vocab_size)]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    metadata: dict[str, Any] = {
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.key_length": config.head_dim,
        f"{kind}.attention.value_length": config.head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{kind}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if n in special else 5 if n not in vocab else 1 for n in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    metadata |= {key.replace("__", "."): value for key, value in changes.items() if not isinstance(value, np.ndarray)}
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", kind))
    for key, value in metadata.items():
        if key not in remove:
            _add(writer, key, value)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            weight = permuted(weight, config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)
        values = np.ascontiguousarray(weight.numpy())
        if gguf_name(name) in remove:
            continue
        if quantization == gguf.GGMLQuantizationType.F32 or values.ndim == 1 or values.shape[1] % 32:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, quantization), raw_dtype=quantization)
    for key, value in changes.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key.replace("__", "."), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
