"""A GGUF file as a model: the config that it amounts to, and its weights under Hugging Face names. Free of torch."""

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
from neper.models.gguf_header import Header, StoredTensor, read_header
from neper.models.gguf_metadata import Metadata, dequantize, hf_config
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
    metadata: Metadata
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def weight(self, name: str) -> npt.NDArray[np.float32]:
        """The file's own values of a weight, in the order of the Hugging Face layout, in memory of its own."""
        weight = dequantize(self.header, self.tensors[name])
        if self.config["model_type"] == "llama":
            # Llama's GGUF layout interleaves the two halves of each head that the rotary embedding pairs.
            for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if f"self_attn.{part}." in name:
                    pairs = weight.reshape(self.config[heads], self.config["head_dim"] // 2, 2, -1)
                    weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        return np.require(weight, requirements=["C", "O", "W"])


def open_model(path: Path) -> GGUFModel:
    """The contents of a GGUF file. Everything that its header tells is checked; no weight is read.

    Raises:
        ModelLoadError: the file is damaged, or its family, its tokenizer, its weights or their types are not supported.
    """
    header = read_header(path)
    metadata = Metadata(header.metadata)
    with reading(path):
        logger.info("%s: %s", path.name, _described(metadata, header.tensors))
        config = hf_config(metadata, header)
        check_kind(metadata)
        tensors = {_hf_name(name): tensor for name, tensor in header.tensors.items() if name != "rope_freqs.weight"}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        check_names(path, ModelConfig.from_dict(config), shapes)
        for tensor in {tensor.type: tensor for tensor in tensors.values()}.values():
            _check_type(tensor)
    return GGUFModel(header, metadata, config, tensors)


def _described(metadata: Metadata, tensors: Mapping[str, StoredTensor]) -> str:
    family = metadata.architecture
    keys = ("block_count", "embedding_length", "context_length")
    count = {key: metadata.integer(f"{family}.{key}") for key in keys}
    kinds = sorted({tensor.type.name for tensor in tensors.values()})
    return (
        f"{family}, {count['block_count']} layers of {count['embedding_length']}, "
        f"context of {count['context_length']} tokens, "
        f"tokenizer {one_line(metadata.need('tokenizer.ggml.model'))}, weights {', '.join(kinds)}"
    )


def _hf_name(name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ModelLoadError(f"the GGUF file has a tensor of unknown use: {one_line(name)}")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _check_type(tensor: StoredTensor) -> None:
    from gguf import GGML_QUANT_SIZES, quants

    _, block_bytes = GGML_QUANT_SIZES[tensor.type]
    try:
        quants.dequantize(np.zeros((1, block_bytes), np.uint8), tensor.type)
    except NotImplementedError as error:
        raise ModelLoadError(f"GGUF tensor type {tensor.type.name} of {tensor.name} is not supported") from error
