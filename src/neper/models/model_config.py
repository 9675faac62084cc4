"""The shape of a model: what a Hugging Face config.json says, checked and made uniform over the supported families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neper.errors import ModelLoadError


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What a model_type fixes or lets the config choose; the defaults are those of its transformers config class."""

    architecture: str
    qkv_bias: bool | None = None  # None: `attention_bias` decides
    o_bias: bool | None = None
    mlp_bias: bool | None = False  # None: `mlp_bias` decides
    qk_norm: bool = False
    head_dim: int | None = None
    sliding_window: int | None = None  # the window where the config does not mention one
    window_by_layer: bool = False  # `use_sliding_window` and a choice of layers


_FAMILIES = {
    "llama": _Family(architecture="LlamaForCausalLM", mlp_bias=None),
    "mistral": _Family(architecture="MistralForCausalLM", qkv_bias=False, o_bias=False, sliding_window=4096),
    "qwen2": _Family(
        architecture="Qwen2ForCausalLM", qkv_bias=True, o_bias=False, sliding_window=4096, window_by_layer=True
    ),
    "qwen3": _Family(
        architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=128, sliding_window=4096, window_by_layer=True
    ),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and options of a decoder.

    Attributes:
        rope_scaling: None = plain rotary embedding.
        qkv_bias, o_bias, mlp_bias: whether these linear layers have a bias.
        qk_norm: RMSNorm over the head dimension of queries and keys, before the rotary embedding.
        sliding_windows: for each layer the number of tokens that a token sees, itself included; None = all.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    max_position_embeddings: int

    @staticmethod
    def from_directory(directory: Path) -> ModelConfig:
        """The config of `directory`/config.json; ModelLoadError where it is absent, not JSON, or not supported."""
        return ModelConfig.from_dict(read_json(directory / "config.json"))

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ModelConfig:
        """Parse a config.json of transformers 4 or 5; ModelLoadError names what is wrong or not supported."""
        model_type = values.get("model_type")
        family = _FAMILIES.get(str(model_type))
        if family is None:
            raise ModelLoadError(
                f"model type {model_type!r} is not supported; supported are {', '.join(sorted(_FAMILIES))}"
            )
        architectures = values.get("architectures")
        if architectures and family.architecture not in architectures:
            raise ModelLoadError(
                f"architecture {', '.join(map(str, architectures))} is not supported for model type {model_type!r}; "
                f"supported is {family.architecture}"
            )
        if values.get("quantization_config"):
            method = values["quantization_config"].get("quant_method", "unknown")
            raise ModelLoadError(f"quantised weights (quantization_config: {method}) are not supported")
        if values.get("hidden_act", "silu") != "silu":
            raise ModelLoadError(f"hidden_act {values['hidden_act']!r} is not supported; supported is 'silu'")

        num_heads = _positive(values, "num_attention_heads")
        num_kv_heads = _positive(values, "num_key_value_heads", num_heads if model_type == "llama" else None)
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
            )
        hidden_size = _positive(values, "hidden_size")
        head_dim = _positive(values, "head_dim", family.head_dim or hidden_size // num_heads)
        if head_dim % 2:
            raise ModelLoadError(f"head_dim must be even for the rotary embedding, got {head_dim}")
        num_layers = _positive(values, "num_hidden_layers")
        max_position_embeddings = _positive(values, "max_position_embeddings")
        rope_theta, rope_scaling = _rope(values, max_position_embeddings)
        attention_bias = bool(values.get("attention_bias", False))
        return ModelConfig(
            model_type=str(model_type),
            vocab_size=_positive(values, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(values, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=bool(values.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            sliding_windows=_sliding_windows(values, family, num_layers),
            max_position_embeddings=max_position_embeddings,
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ModelLoadError where there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return values


def _positive(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"config.json has no {key}")
    if not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _rope(values: Mapping[str, Any], max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    # transformers 5 keeps everything in rope_parameters; before, rope_theta stood beside an optional rope_scaling.
    rope: Mapping[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelLoadError(f"rope_parameters that differ by layer type ({', '.join(rope)}) are not supported")
    theta = float(rope.get("rope_theta") or values.get("rope_theta") or 10_000.0)
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise ModelLoadError(f"partial_rotary_factor {partial} is not supported; supported is 1.0")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelLoadError(f"rope scaling {kind!r} is not supported; supported are 'default' and 'llama3'")
    try:
        return theta, RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(
                rope.get("original_max_position_embeddings") or max_position_embeddings
            ),
        )
    except KeyError as error:
        raise ModelLoadError(f"rope scaling 'llama3' has no {error.args[0]}") from None


def _sliding_windows(values: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int | None, ...]:
    window = values.get("sliding_window", family.sliding_window) if family.sliding_window else None
    if family.window_by_layer and not values.get("use_sliding_window", False):
        window = None
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ModelLoadError(f"config.json: sliding_window must be a positive integer or null, got {window!r}")
    if not family.window_by_layer:
        return (window,) * num_layers
    layer_types = values.get("layer_types")
    if layer_types is None:
        first = values.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(layer_types) != num_layers:
        raise ModelLoadError(f"config.json: layer_types names {len(layer_types)} layers of {num_layers}")
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelLoadError(f"layer type {kind!r} is not supported")
        if kind == "sliding_attention" and window is None:
            raise ModelLoadError("config.json: layer_types asks for sliding_attention, but there is no sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
