"""What a GGUF file says about its model: the metadata as a mapping, and the config.json that it amounts to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from neper.errors import ModelLoadError
from neper.files import one_line
from neper.models.gguf_header import Header, StoredTensor
from neper.models.model_config import ModelConfig

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class Metadata(dict[str, Any]):
    """Metadata of a GGUF file: key → plain Python value."""

    def need(self, key: str) -> Any:
        """The value of `key`; ModelLoadError where the file has none."""
        if self.get(key) is None:
            raise ModelLoadError(f"the GGUF file has no {key} in its metadata")
        return self[key]

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; ModelLoadError where it is something else, or absent without a default."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) is not int or value < 1:
            raise ModelLoadError(f"{key} of the GGUF file must be a positive integer, got {one_line(repr(value))}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number; ModelLoadError where it is something else, or absent without a default."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) not in (int, float):
            raise ModelLoadError(f"{key} of the GGUF file must be a number, got {one_line(repr(value))}")
        return float(value)

    @property
    def architecture(self) -> str:
        """The model family; ModelLoadError where it is not one of the supported ones."""
        name = str(self.need("general.architecture"))
        if name not in _CLASSES:
            known = ", ".join(_CLASSES)
            raise ModelLoadError(f"GGUF architecture {one_line(repr(name))} is not supported; supported are {known}")
        return name


def dequantize(header: Header, tensor: StoredTensor) -> npt.NDArray[np.float32]:
    """The values of a tensor, in its shape."""
    from gguf import quants

    return quants.dequantize(header.data(tensor), tensor.type).astype(np.float32, copy=False).reshape(tensor.shape)


def hf_config(metadata: Metadata, header: Header) -> dict[str, Any]:
    """The config.json of a GGUF model; which tensors exist says what the metadata does not (biases, a tied head)."""
    architecture, tensors = metadata.architecture, header.tensors

    def need(key: str) -> int:
        return metadata.integer(f"{architecture}.{key}")

    def get(key: str, default: Any) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    if get("expert_count", 0):
        raise ModelLoadError("GGUF models with experts are not supported")
    if "token_embd.weight" not in tensors:
        raise ModelLoadError("the GGUF file has no tensor token_embd.weight")
    hidden_size, num_heads = need("embedding_length"), need("attention.head_count")
    head_dim = metadata.integer(f"{architecture}.attention.key_length", max(1, hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise ModelLoadError(
                f"{architecture}.{key} {one_line(get(key, None))} is not supported; supported is {head_dim}"
            )
    kind = get("rope.scaling.type", "none")
    if kind != "none":
        raise ModelLoadError(
            f"rope scaling {one_line(repr(kind))} of a GGUF file is not supported; use the Hugging Face directory"
        )
    config: dict[str, Any] = {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.integer(f"{architecture}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": need("context_length"),
        # Stored as float32: 9.999999747378752e-06 is meant to be 1e-05.
        "rms_norm_eps": float(f"{metadata.number(f'{architecture}.attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": metadata.number(f"{architecture}.rope.freq_base", 10_000.0),
        },
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }
    if "rope_freqs.weight" in tensors:
        config["rope_parameters"] = _llama3_rope(config, dequantize(header, tensors["rope_freqs.weight"]))
    return config


def _llama3_rope(config: Mapping[str, Any], divisors: npt.NDArray[np.float32]) -> dict[str, Any]:
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
    import torch  # for these files alone

    from neper.models.layers import inverse_frequencies

    plain = inverse_frequencies(ModelConfig.from_dict(config))
    scaled = inverse_frequencies(ModelConfig.from_dict({**config, "rope_parameters": rope}))
    if divisors.shape != plain.shape or not torch.allclose(plain / scaled, torch.from_numpy(divisors), rtol=1e-3):
        raise ModelLoadError("rope_freqs.weight of the GGUF file is not Llama 3's scaling, which is the supported one")
    return rope
