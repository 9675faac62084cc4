"""What a GGUF file says about its model: the metadata as a mapping, and the config.json that it amounts to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, quants

from neper.errors import ModelLoadError
from neper.models.layers import inverse_frequencies
from neper.models.model_config import ModelConfig

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class Metadata(dict[str, Any]):
    """Metadata of a GGUF file: key → plain Python value."""

    def need(self, key: str) -> Any:
        """The value of `key`; ModelLoadError where the file has none."""
        if self.get(key) is None:
            raise ModelLoadError(f"the GGUF file has no {key} in its metadata")
        return self[key]

    @property
    def architecture(self) -> str:
        """The model family; ModelLoadError where it is not one of the supported ones."""
        name = str(self.need("general.architecture"))
        if name not in _CLASSES:
            raise ModelLoadError(f"GGUF architecture {name!r} is not supported; supported are {', '.join(_CLASSES)}")
        return name


def open_gguf(path: Path) -> tuple[GGUFReader, Metadata]:
    """Open a GGUF file (tensors stay on disk until read); ModelLoadError where it is damaged or one part of several."""
    try:
        reader = GGUFReader(path)
        metadata = Metadata((name, field.contents()) for name, field in reader.fields.items())
    except (OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise ModelLoadError(f"{path} is not a readable GGUF file: {error}") from error
    if metadata.get("split.count", 1) > 1:
        raise ModelLoadError(f"{path} is one of {metadata['split.count']} parts; join them into one file first")
    return reader, metadata


def hf_config(metadata: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a GGUF model.

    Args:
        tensors: name → tensor of the reader; which ones exist says what the metadata does not (biases, a tied head).
    """
    architecture = metadata.architecture

    def need(key: str) -> Any:
        return metadata.need(f"{architecture}.{key}")

    def get(key: str, default: Any) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    if get("expert_count", 0):
        raise ModelLoadError("GGUF models with experts are not supported")
    if "token_embd.weight" not in tensors:
        raise ModelLoadError("the GGUF file has no tensor token_embd.weight")
    hidden_size, num_heads = need("embedding_length"), need("attention.head_count")
    head_dim = get("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise ModelLoadError(f"{architecture}.{key} {get(key, None)} is not supported; supported is {head_dim}")
    kind = get("rope.scaling.type", "none")
    if kind != "none":
        raise ModelLoadError(f"rope scaling {kind!r} of a GGUF file is not supported; use the Hugging Face directory")
    config: dict[str, Any] = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": need("context_length"),
        # Stored as float32: 9.999999747378752e-06 is meant to be 1e-05.
        "rms_norm_eps": float(f"{need('attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(get("rope.freq_base", 10_000.0))},
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }
    if "rope_freqs.weight" in tensors:
        stored = tensors["rope_freqs.weight"]
        divisors = np.array(quants.dequantize(stored.data, stored.tensor_type), dtype=np.float32, copy=True)
        config["rope_parameters"] = _llama3_rope(config, divisors)
    return config


def _llama3_rope(config: Mapping[str, Any], divisors: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The llama3 scaling that divides the rotary frequencies by `divisors` [head_dim / 2]; ModelLoadError if none does.

    GGUF keeps the divisors alone. Llama 3.1 to 3.3 differ in nothing but the factor, which is the largest divisor.
    """
    rope: dict[str, Any] = {
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = inverse_frequencies(ModelConfig.from_dict(config))
    scaled = inverse_frequencies(ModelConfig.from_dict({**config, "rope_parameters": rope}))
    if divisors.shape != plain.shape or not torch.allclose(plain / scaled, torch.from_numpy(divisors), rtol=1e-3):
        raise ModelLoadError("rope_freqs.weight of the GGUF file is not Llama 3's scaling, which is the supported one")
    return rope
