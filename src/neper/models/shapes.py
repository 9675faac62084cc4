"""Models of a real one's shape with random weights, to measure speed without files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from neper.errors import ModelLoadError
from neper.models.decoder import Decoder
from neper.models.model_config import ModelConfig
from neper.models.registry import DECODERS
from neper.models.source import ModelSource
from neper.models.weight_shapes import weight_shapes

_STD = 0.02
"""Standard deviation of the weights. Norms scale every layer's input to 1 per number, so no depth overflows."""


def _qwen3(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> ModelConfig:
    return ModelConfig.from_dict(
        {
            "model_type": "qwen3",
            "vocab_size": 151_936,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": 40_960,
            "tie_word_embeddings": True,
        }
    )


SHAPES: dict[str, ModelConfig] = {
    "qwen3-4b": _qwen3(hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32),
    "qwen3-0.6b": _qwen3(hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16),
}


def source(name: str) -> ModelSource:
    """A source that has a config and no files. An engine needs a decoder beside it. No token ends a reply.

    Raises:
        ModelLoadError: no shape has this name.
    """
    if name not in SHAPES:
        raise ModelLoadError(f"no shape {name!r}; there are {', '.join(SHAPES)}")
    return ModelSource(name=name, path=Path(name), config=SHAPES[name], eos_token_ids=())


def random_decoder(config: ModelConfig, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Decoder:
    """A decoder whose logits are finite and without meaning: weights normal(0, 0.02), norms 1, biases 0.

    The weights are drawn on the device, in `dtype`. The same seed gives the same ones on the same kind of device.
    """
    decoder = DECODERS[config.model_type](config, dtype=dtype, device=device)
    _draw(decoder.weight_slots(), torch.Generator(device).manual_seed(seed))
    with torch.inference_mode():
        decoder.prepack()
    return decoder


def write(config: ModelConfig, directory: Path, *, dtype: torch.dtype, seed: int = 0) -> None:
    """Write a model with such weights into a directory: config.json and model.safetensors, no tokenizer.

    Raises:
        ModelLoadError: the config has features that no shape here has (biases, sliding windows, scaled positions).
    """
    values = {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if ModelConfig.from_dict(values) != config:
        raise ModelLoadError("only configs of the shapes' own kind can be written")
    weights = DECODERS[config.model_type](config, dtype=dtype, device=torch.device("cpu")).weight_slots()
    _draw(weights, torch.Generator("cpu").manual_seed(seed))
    save_file(dict(weights), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")


def _draw(weights: Mapping[str, Tensor], generator: torch.Generator) -> None:
    with torch.inference_mode():
        for name, weight in weights.items():
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
            elif name.endswith(".bias"):
                weight.zero_()
            else:
                weight.normal_(0.0, _STD, generator=generator)


def num_parameters(config: ModelConfig) -> int:
    """Weights of a model of this shape; tied embeddings count once."""
    return sum(math.prod(shape) for _, shape in weight_shapes(config))
