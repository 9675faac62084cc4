"""Models of a shape: their sizes are the real ones', and random weights give finite logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from neper.config import EngineConfig
from neper.engine.core import EngineCore
from neper.errors import ModelLoadError
from neper.models import shapes
from neper.models.decoder import Decoder
from neper.models.model_config import ModelConfig
from neper.models.source import ModelSource
from neper.types import FinishReason
from tests.helpers.engine import request, run

CPU = torch.device("cpu")


def small(**changes: object) -> ModelConfig:
    """Qwen3-0.6B with everything but its structure made small."""
    values = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "sliding_windows": (None, None),
    }
    return dataclasses.replace(shapes.SHAPES["qwen3-0.6b"], **(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "parameters"), [("qwen3-4b", 4_022_468_096), ("qwen3-0.6b", 596_049_920)])
def test_a_shape_has_the_real_models_number_of_weights(name: str, parameters: int) -> None:
    config = shapes.SHAPES[name]
    assert shapes.num_parameters(config) == parameters
    assert (config.qk_norm, config.tie_word_embeddings, config.rope_theta) == (True, True, 1e6)
    assert (config.max_position_embeddings, len(config.sliding_windows)) == (40_960, config.num_layers)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "qk_norm": False},
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    ],
)
def test_the_count_is_that_of_the_decoders_own_weights(changes: dict[str, object]) -> None:
    config = small(**changes)
    slots = Decoder(config, dtype=torch.float32, device=CPU).weight_slots()
    assert shapes.num_parameters(config) == sum(weight.numel() for weight in slots.values())


def test_random_weights_repeat_and_are_as_said() -> None:
    config = small(qkv_bias=True)
    weights = []
    for seed in (0, 0, 1):
        decoder = shapes.random_decoder(config, dtype=torch.float32, device=CPU, seed=seed)
        weights.append({name: weight.clone() for name, weight in decoder.weight_slots().items()})
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[0][name], weights[2][name])
    for name, weight in weights[0].items():
        if name.endswith("norm.weight"):
            assert bool((weight == 1).all()), name
        elif name.endswith(".bias"):
            assert not weight.any(), name
        else:
            assert abs(float(weight.mean())) < 0.002, name
            assert 0.018 < float(weight.std()) < 0.022, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [2, 40])
def test_an_engine_computes_finite_scores_with_them(dtype: str, layers: int) -> None:
    config = small(num_layers=layers, sliding_windows=(None,) * layers)
    decoder = shapes.random_decoder(config, dtype=getattr(torch, dtype), device=CPU)
    source = ModelSource(name="small", path=Path("small"), config=config, eos_token_ids=())
    settings = EngineConfig(device="cpu", dtype=dtype, max_model_len=64, num_threads=1, max_num_seqs=2)
    core = EngineCore(settings, source, decoder=decoder)
    result = run(core, [request("a", [5, 6, 7], top_k=5, prompt_top_k=5)])["a"]
    assert result.finish_reason is FinishReason.LENGTH
    for rows in (result.tokens, result.prompt):
        assert np.isfinite(rows.top_logprobs).all()
        # Neither flat nor a spike: what is scored has something to rank.
        assert (rows.top_logprobs[:, 0] > rows.top_logprobs[:, 4]).all()
        assert (rows.top_logprobs[:, 0] < -0.1).all()


def test_a_source_has_no_files_and_no_end() -> None:
    source = shapes.source("qwen3-4b")
    assert (source.name, source.path, source.eos_token_ids) == ("qwen3-4b", Path("qwen3-4b"), ())
    assert (source.config, source.model_max_length) == (shapes.SHAPES["qwen3-4b"], 40_960)
    with pytest.raises(ModelLoadError, match=r"no shape 'qwen9'; there are qwen3-4b, qwen3-0\.6b"):
        shapes.source("qwen9")
