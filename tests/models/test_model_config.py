"""Config parsing: the same reading as transformers' config classes, and errors that name what is not supported."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from neper.errors import ModelLoadError
from neper.models.model_config import ModelConfig, RopeScaling

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_agrees_with_transformers_on_its_defaults(config_class: type[PreTrainedConfig]) -> None:
    theirs = config_class()
    ours = ModelConfig.from_dict(theirs.to_dict())
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.model_type == theirs.model_type
    assert (ours.vocab_size, ours.hidden_size, ours.head_dim) == (theirs.vocab_size, theirs.hidden_size, head_dim)
    assert (ours.num_layers, ours.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert (ours.num_kv_heads, ours.rms_norm_eps) == (theirs.num_key_value_heads, theirs.rms_norm_eps)
    assert (ours.tie_word_embeddings, ours.rope_scaling) == (theirs.tie_word_embeddings, None)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.sliding_windows == (getattr(theirs, "sliding_window", None),) * theirs.num_hidden_layers
    assert ours.qkv_bias == (theirs.model_type == "qwen2")
    assert ours.qk_norm == (theirs.model_type == "qwen3")


def test_older_keys() -> None:
    scaling = {"type": "llama3", "factor": 32, "low_freq_factor": 1, "high_freq_factor": 4}
    config = ModelConfig.from_dict(
        SIZES | {"rope_theta": 5e5, "rope_scaling": scaling, "torch_dtype": "bfloat16", "num_key_value_heads": None}
    )
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
    )
    assert config.num_kv_heads == 4


def test_windows_by_layer() -> None:
    qwen = SIZES | {"model_type": "qwen2", "num_key_value_heads": 4, "sliding_window": 8, "use_sliding_window": True}
    assert ModelConfig.from_dict(qwen | {"max_window_layers": 1}).sliding_windows == (None, 8)
    kinds = ["sliding_attention", "full_attention"]
    assert ModelConfig.from_dict(qwen | {"layer_types": kinds}).sliding_windows == (8, None)
    assert ModelConfig.from_dict(qwen | {"use_sliding_window": False}).sliding_windows == (None, None)
    mistral = SIZES | {"model_type": "mistral", "num_key_value_heads": 4}
    assert ModelConfig.from_dict(mistral).sliding_windows == (4096, 4096)
    assert ModelConfig.from_dict(mistral | {"sliding_window": None}).sliding_windows == (None, None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"model_type": None}, "None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0, "high_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 0}, "sliding_window"),
        ({"model_type": "qwen2", "num_key_value_heads": 2, "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen2", "num_key_value_heads": 2, "layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({"model_type": "qwen3", "num_key_value_heads": 2, "layer_types": ["linear_attention"] * 2}, "linear_atten"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        ModelConfig.from_dict(SIZES | change)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot read"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="JSON object"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    assert ModelConfig.from_directory(tmp_path).num_layers == 2


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Every place that states a thing, and two values of it.
SPELLINGS: dict[str, tuple[list[str], list[Any]]] = {
    "rope_theta": (["rope_theta", "rope_parameters.rope_theta", "rope_scaling.rope_theta"], [1e4, 5e5]),
    "rope_type": (
        ["rope_parameters.rope_type", "rope_parameters.type", "rope_scaling.rope_type", "rope_scaling.type"],
        ["default", "llama3", "yarn", "linear"],
    ),
    "partial_rotary_factor": (
        ["partial_rotary_factor", "rope_parameters.partial_rotary_factor", "rope_scaling.partial_rotary_factor"],
        [1.0, 0.5],
    ),
    "original_max_position_embeddings": (
        [
            "original_max_position_embeddings",
            "rope_parameters.original_max_position_embeddings",
            "rope_scaling.original_max_position_embeddings",
        ],
        [8192, 4096],
    ),
    **{
        key: ([f"rope_parameters.{key}", f"rope_scaling.{key}"], [2.0, 3.0])
        for key in ("factor", "low_freq_factor", "high_freq_factor")
    },
    "dtype": (["dtype", "torch_dtype"], ["bfloat16", "torch.float32"]),
}
DISAGREEMENTS = [
    (name, {first: one, second: other})
    for name, (places, values) in SPELLINGS.items()
    for first, second in itertools.permutations(places, 2)
    for one, other in itertools.permutations(values, 2)
]


def placed(places: dict[str, Any]) -> dict[str, Any]:
    """A config with values at places such as "rope_scaling.type"."""
    config: dict[str, Any] = dict(SIZES)
    for place, value in places.items():
        *outer, key = place.split(".")
        (config.setdefault(outer[0], {}) if outer else config)[key] = value
    return config


def test_case_74_yarn_beside_plain_rope_parameters_is_refused() -> None:
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    with pytest.raises(ModelLoadError, match=r"rope_type .*rope_parameters\.rope_type .*rope_scaling\.rope_type"):
        ModelConfig.from_dict(SIZES | {"rope_parameters": plain, "rope_scaling": YARN})


def test_case_74_a_key_that_two_places_state_differently_is_refused_by_name() -> None:
    for name, places in DISAGREEMENTS:
        with pytest.raises(ModelLoadError, match="two places that disagree") as caught:
            ModelConfig.from_dict(placed(places))
        assert all(word in caught.value.message for word in (name, *places)), caught.value.message


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_case_74_one_reading_wherever_it_is_said(place: str) -> None:
    once = ModelConfig.from_dict(SIZES | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}})
    assert once.rope_scaling is not None
    assert ModelConfig.from_dict(SIZES | {place: LLAMA3, "rope_theta": 5e5}) == once
    both = SIZES | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_scaling": LLAMA3, "rope_theta": 5e5}
    assert ModelConfig.from_dict(both) == once
    # A factor without the type that it belongs to would otherwise be passed over.
    with pytest.raises(ModelLoadError, match="'default' with factor"):
        ModelConfig.from_dict(SIZES | {place: {"factor": 4.0}})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types asks"),
        ({"model_type": "mistral", "num_key_value_heads": 2, "layer_types": ["full_attention"] * 2}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers of 2"),
    ],
)
def test_case_74_layer_types_are_read_in_every_family(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        ModelConfig.from_dict(SIZES | change)


def test_case_74_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    text = json.dumps(SIZES | {"rope_theta": 1e4})
    (tmp_path / "config.json").write_text(text[:-1] + ', "rope_theta": 500000.0}')
    with pytest.raises(ModelLoadError, match="'rope_theta' stands twice"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
def test_case_118_text_is_no_flag(key: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{key} must be true or false"):
        ModelConfig.from_dict(SIZES | {key: "false"})
