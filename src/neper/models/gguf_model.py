"""A GGUF file as a model: its config in Hugging Face form, and its weights under Hugging Face names. Free of torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from neper.errors import ModelLoadError
from neper.files import one_line, reading
from neper.models.checkpoint import check_names
from neper.models.gguf_header import GgufTensor, Header, read_header
from neper.models.gguf_metadata import CLASSES
from neper.models.gguf_tokenizer import check_kind
from neper.models.model_config import ModelConfig

logger = logging.getLogger("neper.models")

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFModel(NamedTuple):
    """Attributes:
    config: of config.json.
    tensors: Hugging Face name → tensor of the file.
    """

    header: Header
    config: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def weight(self, name: str) -> npt.NDArray[np.float32]:
        """The file's own values of a weight, in the order of the Hugging Face layout, in memory of its own."""
        weight = _dequantize(self.header, self.tensors[name])
        if self.config["model_type"] == "llama":
            # Llama's GGUF layout interleaves the two halves of each head that the rotary embedding pairs.
            for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if f"self_attn.{part}." in name:
                    pairs = weight.reshape(self.config[heads], self.config["head_dim"] // 2, 2, -1)
                    weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        return np.require(weight, requirements=["C", "O", "W"])


def open_model(path: Path) -> GGUFModel:
    """The contents of a GGUF file. Its whole header is checked. No weight is read.

    Raises:
        ModelLoadError: the file is damaged, or its family, its tokenizer, its weights or their types are not supported.
    """
    header = read_header(path)
    with reading(path):
        config = _hf_config(header)
        logger.info("%s: %s", path.name, _described(header, config))
        check_kind(header.metadata)
        tensors = {_hf_name(name): tensor for name, tensor in header.tensors.items() if name != "rope_freqs.weight"}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        check_names(path, ModelConfig.from_dict(config), shapes)
        for tensor in {tensor.type: tensor for tensor in tensors.values()}.values():
            _check_type(tensor)
    return GGUFModel(header, config, tensors)


def _dequantize(header: Header, tensor: GgufTensor) -> npt.NDArray[np.float32]:
    """The values of a tensor, in its shape."""
    from gguf import quants

    return quants.dequantize(header.data(tensor), tensor.type).astype(np.float32, copy=False).reshape(tensor.shape)


def _hf_config(header: Header) -> dict[str, Any]:
    """The config.json of a GGUF model. Facts that the metadata lacks follow from its tensors (biases, a tied head)."""
    metadata, tensors = header.metadata, header.tensors
    architecture = metadata.architecture

    def need(key: str, default: int | None = None) -> int:
        return metadata.integer(f"{architecture}.{key}", default)

    def get(key: str, default: Any) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    if get("expert_count", 0):
        raise ModelLoadError("GGUF models with experts are not supported")
    if "token_embd.weight" not in tensors:
        raise ModelLoadError("the GGUF file has no tensor token_embd.weight")
    hidden_size, num_heads = need("embedding_length"), need("attention.head_count")
    head_dim = need("attention.key_length", max(1, hidden_size // num_heads))
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
        "architectures": [CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": need("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": need("context_length"),
        # It is stored as float32: 9.999999747378752e-06 means 1e-05.
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
        config["rope_parameters"] = _llama3_rope(config, _dequantize(header, tensors["rope_freqs.weight"]))
    return config


def _llama3_rope(config: Mapping[str, Any], divisors: npt.NDArray[np.float32]) -> dict[str, Any]:
    """The llama3 scaling that divides the rotary frequencies by `divisors` [head_dim / 2]; ModelLoadError if none does.

    GGUF keeps only the divisors. Llama 3.1 to 3.3 differ only in the factor, which is the largest divisor.
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


def _described(header: Header, config: Mapping[str, Any]) -> str:
    kinds = sorted({tensor.type.name for tensor in header.tensors.values()})
    return (
        f"{config['model_type']}, {config['num_hidden_layers']} layers of {config['hidden_size']}, "
        f"context of {config['max_position_embeddings']} tokens, "
        f"tokenizer {one_line(header.metadata.need('tokenizer.ggml.model'))}, weights {', '.join(kinds)}"
    )


def _hf_name(name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ModelLoadError(f"the GGUF file has a tensor of unknown use: {one_line(name)}")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _check_type(tensor: GgufTensor) -> None:
    from gguf import GGML_QUANT_SIZES, quants

    _, block_bytes = GGML_QUANT_SIZES[tensor.type]
    try:
        quants.dequantize(np.zeros((1, block_bytes), np.uint8), tensor.type)
    except NotImplementedError as error:
        raise ModelLoadError(f"GGUF tensor type {tensor.type.name} of {tensor.name} is not supported") from error
