"""The shape of a model: a Hugging Face config.json, checked and made uniform over the supported families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neper.errors import ModelLoadError
from neper.files import one_line, read_json, reading

# No model exceeds these, and a file of a few bytes could ask for all memory. Weights are the real bound.
_MOST = 2**24
_MOST_LAYERS = 2**12
_MOST_NEXTN = 16
# Keys of a rope_type. Some writers repeat `max_position_embeddings` there, without effect.
_ROPE_KEYS = {"rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_ROPE_KEYS |= {"max_position_embeddings"}
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor")


@dataclass(frozen=True, kw_only=True)
class _Family:
    """The facts that a model_type fixes or leaves to the config. Defaults are those of transformers' config class."""

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
        qkv_bias, o_bias, mlp_bias: True where these linear layers have a bias.
        qk_norm: RMSNorm over the head dimension of queries and keys, before the rotary embedding.
        num_nextn_layers: layers behind the model's that predict further tokens, as DeepSeek and GLM count them.
        sliding_windows: per layer, the number of tokens that a token sees, itself included; None = all.
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
    num_nextn_layers: int = 0

    @staticmethod
    def from_directory(directory: Path) -> ModelConfig:
        """The config of `directory`/config.json; ModelLoadError where it is absent, not JSON, or not supported."""
        path = directory / "config.json"
        values = read_json(path, unique=True)
        with reading(path):
            return ModelConfig.from_dict(values)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ModelConfig:
        """Parse a config.json of transformers 4 or 5; ModelLoadError names the part that is wrong or not supported."""
        model_type = values.get("model_type")
        family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None:
            raise ModelLoadError(
                f"model type {_shown(model_type)} is not supported; supported are {', '.join(sorted(_FAMILIES))}"
            )
        architectures = values.get("architectures")
        if architectures and (not isinstance(architectures, list) or family.architecture not in architectures):
            listed = architectures if isinstance(architectures, list) else [architectures]
            raise ModelLoadError(
                f"architecture {one_line(', '.join(map(str, listed)))} is not supported for model type {model_type!r}; "
                f"supported is {family.architecture}"
            )
        quantization = values.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
            raise ModelLoadError(f"quantised weights (quantization_config: {one_line(method)}) are not supported")
        activation = values.get("hidden_act", "silu")
        if activation != "silu":
            raise ModelLoadError(f"hidden_act {one_line(repr(activation))} is not supported; supported is 'silu'")
        _agreed("dtype", {key: str(values[key]).removeprefix("torch.") for key in _DTYPES if values.get(key)})

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
        num_layers = _positive(values, "num_hidden_layers", most=_MOST_LAYERS)
        max_position_embeddings = _positive(values, "max_position_embeddings")
        rope_theta, rope_scaling = _rope(values, max_position_embeddings)
        nextn = values.get("num_nextn_predict_layers") or 0
        if type(nextn) is not int or not 0 <= nextn <= _MOST_NEXTN:
            raise ModelLoadError(
                f"config.json: num_nextn_predict_layers must be 0 to {_MOST_NEXTN}, got {_shown(nextn)}"
            )
        attention_bias = _flag(values, "attention_bias")
        return ModelConfig(
            model_type=str(model_type),
            vocab_size=_positive(values, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(values, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number("rms_norm_eps", values.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=_flag(values, "tie_word_embeddings"),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=_flag(values, "mlp_bias") if family.mlp_bias is None else family.mlp_bias,
            qk_norm=family.qk_norm,
            sliding_windows=_sliding_windows(values, family, num_layers),
            max_position_embeddings=max_position_embeddings,
            num_nextn_layers=nextn,
        )


_DTYPES = ("dtype", "torch_dtype")


def _positive(values: Mapping[str, Any], key: str, default: int | None = None, *, most: int = _MOST) -> int:
    value = values.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"config.json has no {key}")
    if type(value) is not int or value < 1:
        raise ModelLoadError(f"config.json: {key} must be a positive integer, got {_shown(value)}")
    if value > most:
        raise ModelLoadError(f"config.json: {key} must be at most {most}, got {_shown(value)}")
    return value


def _number(name: str, value: Any) -> float:
    """A positive, finite number."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ModelLoadError(f"config.json: {name} must be a positive number, got {_shown(value)}")
    return float(value)


def _flag(values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key)
    if value not in (None, False, True):
        raise ModelLoadError(f"config.json: {key} must be true or false, got {_shown(value)}")
    return bool(value)


def _shown(value: Any) -> str:
    """A value for a message. Python refuses to spell integers of thousands of digits."""
    if type(value) is int and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    return one_line(repr(value))


def _agreed(name: str, stated: Mapping[str, Any]) -> Any:
    """The value that all places state. `stated`: place → value. None where there is no place."""
    places = list(stated)
    for place in places[1:]:
        if stated[place] != stated[places[0]]:
            raise ModelLoadError(
                f"config.json states {name} in two places that disagree: {places[0]} is {_shown(stated[places[0]])}, "
                f"{place} is {_shown(stated[place])}; remove the wrong one"
            )
    return stated[places[0]] if places else None


def _rope_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The facts about the rotary embedding, from all places where a config states them.

    transformers 5 keeps all of them in rope_parameters. Before, rope_theta stood beside an optional rope_scaling. Files
    that were edited, or written by other programs, have both.
    """
    stated: dict[str, dict[str, Any]] = {}
    for place in ("rope_parameters", "rope_scaling"):
        rope = values.get(place)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ModelLoadError(f"config.json: {place} must be an object or null, got {_shown(rope)}")
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise ModelLoadError(f"{place} that differ by layer type ({one_line(', '.join(rope))}) are not supported")
        for key, value in rope.items():
            if value is not None:
                stated.setdefault("rope_type" if key == "type" else key, {})[f"{place}.{key}"] = value
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if values.get(key) is not None:
            stated.setdefault(key, {})[key] = values[key]
    return {key: _agreed(key, places) for key, places in stated.items()}


def _rope(values: Mapping[str, Any], max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    rope = _rope_values(values)
    theta = _number("rope_theta", rope.get("rope_theta", 10_000.0))
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ModelLoadError(f"partial_rotary_factor {_shown(partial)} is not supported; supported is 1.0")
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise ModelLoadError(f"rope scaling {_shown(kind)} is not supported; supported are 'default' and 'llama3'")
    unknown = rope.keys() - _ROPE_KEYS - set(_LLAMA3_KEYS if kind == "llama3" else ())
    if unknown:
        raise ModelLoadError(f"rope scaling {kind!r} with {one_line(', '.join(sorted(unknown)))} is not supported")
    if kind == "default":
        return theta, None
    for key in _LLAMA3_KEYS:
        if key not in rope:
            raise ModelLoadError(f"rope scaling 'llama3' has no {key}")
    factor, low, high = (_number(key, rope[key]) for key in _LLAMA3_KEYS)
    if high <= low:
        raise ModelLoadError(f"rope scaling 'llama3': high_freq_factor ({high}) must be above low_freq_factor ({low})")
    return theta, RopeScaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_positive(rope, "original_max_position_embeddings", max_position_embeddings),
    )


def _sliding_windows(values: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int | None, ...]:
    window = values.get("sliding_window", family.sliding_window) if family.sliding_window else None
    if family.window_by_layer and not _flag(values, "use_sliding_window"):
        window = None
    if window is not None:
        window = _positive({"sliding_window": window}, "sliding_window")
    windows: tuple[int | None, ...] = (window,) * num_layers
    if family.window_by_layer:
        first = values.get("max_window_layers", 28)
        if type(first) is not int:
            raise ModelLoadError(f"config.json: max_window_layers must be an integer, got {_shown(first)}")
        windows = tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = values.get("layer_types")
    if kinds is None:
        return windows
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        many = f"{len(kinds)} layers" if isinstance(kinds, list) else _shown(kinds)
        raise ModelLoadError(f"config.json: layer_types names {many} of {num_layers}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelLoadError(f"layer type {_shown(kind)} is not supported")
        if kind == "sliding_attention" and window is None:
            raise ModelLoadError("config.json: layer_types asks for sliding_attention, but there is no sliding_window")
    listed = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    # Where layers can differ, the list decides. max_window_layers only replaces a list that is not there.
    if listed != windows and not family.window_by_layer:
        raise ModelLoadError("config.json: layer_types and sliding_window disagree about which layers see a window")
    return listed
