"""Config parsing: the same reading as transformers' config classes, and errors that name what is not supported."""

from __future__ import annotations

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
