"""Decoders against transformers: the same directory, the same tokens, log-probabilities within 1e-4 in float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from neper.models.decoder import Decoder
from neper.models.model_config import ModelConfig
from neper.models.registry import load
from neper.models.source import resolve
from tests.helpers.tiny import VOCAB_SIZE, write_model
from tests.models.steps import Stepper, logprobs

TOLERANCE = 1e-4
LENGTHS = (67, 1, 23, 40, 5)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-head-dim-6": ("llama", {"head_dim": 6}),
    "mistral-wide-heads": ("mistral", {"head_dim": 34, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_bias": True,
        },
    ),
}


@dataclass(frozen=True)
class Case:
    decoder: Decoder
    sequences: list[list[int]]
    expected: list[Tensor]


def largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    assert [x.shape for x in actual] == [x.shape for x in expected]
    return max(float((a - e).abs().max()) for a, e in zip(actual, expected, strict=True))


@pytest.fixture(scope="session", params=sorted(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    architecture, overrides = VARIANTS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    oracle = write_model(directory, architecture, **overrides)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
    with torch.inference_mode():
        logits = [oracle(torch.tensor([ids])).logits[0] for ids in sequences]
    decoder = load(resolve(str(directory)), dtype=torch.float32, device=torch.device("cpu"))
    return Case(decoder, sequences, [torch.log_softmax(x.double(), dim=-1) for x in logits])


@pytest.mark.parametrize("chunk", [10**9, 1, 7, max(LENGTHS) - 1])
def test_log_probabilities_equal_transformers(case: Case, chunk: int) -> None:
    assert largest_error(logprobs(case.decoder, case.sequences, chunk), case.expected) <= TOLERANCE


def test_decodes_and_prefills_share_a_step(case: Case) -> None:
    with torch.inference_mode():
        stepper = Stepper(case.decoder, case.sequences)
        stepper.step({0: 60, 2: 3})
        stepper.step({0: 1, 1: 1, 2: 1, 3: 39, 4: 4})
        stepper.step({2: 17, 0: 1, 3: 1, 4: 1})
        hidden = stepper.finish(2)
        actual = [torch.log_softmax(case.decoder.logits(rows).double(), dim=-1) for rows in hidden]
    assert largest_error(actual, case.expected) <= TOLERANCE


@pytest.mark.parametrize("variant", ["mistral-window", "qwen2-window", "qwen3-layer-types"])
def test_windows_matter_in_these_tests(variant: str, tmp_path: Path) -> None:
    # Guards the parity tests: a window that changed nothing would make them blind.
    architecture, overrides = VARIANTS[variant]
    windowed = write_model(tmp_path, architecture, **overrides)
    full = write_model(tmp_path, architecture, **(overrides | {"sliding_window": 500}))
    ids = torch.arange(60)[None]
    with torch.inference_mode():
        delta = windowed(ids).logits.log_softmax(-1) - full(ids).logits.log_softmax(-1)
    assert float(delta.abs().max()) > 100 * TOLERANCE


def test_llama3_rope_in_the_older_form_is_the_same(tmp_path: Path) -> None:
    new = {"rope_parameters": LLAMA3_ROPE}
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old = {"rope_theta": 10_000.0, "rope_scaling": scaling}
    sizes = {
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    assert ModelConfig.from_dict({**sizes, **new}) == ModelConfig.from_dict({**sizes, **old})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_embedding_touches_only_its_own_sequence(tiny_llama: Path, dtype: torch.dtype) -> None:
    poisoned_id, clean_id = 300, 301
    generator = torch.Generator().manual_seed(2)
    sequences = [torch.randint(200, (n,), generator=generator).tolist() for n in (9, 14, 5, 21)]
    outcomes = {}
    for name, number in (("clean", clean_id), ("poisoned", poisoned_id)):
        decoder = load(resolve(str(tiny_llama)), dtype=dtype, device=torch.device("cpu"))
        decoder.embed_tokens[poisoned_id] = float("nan")
        ids = [list(sequence) for sequence in sequences]
        ids[1][6] = number
        with torch.inference_mode():
            stepper = Stepper(decoder, ids)
            stepper.step({0: 4, 1: 6, 2: 5, 3: 11})
            while any(run.done < len(run.token_ids) for run in stepper.runs):
                stepper.step({n: 1 for n, run in enumerate(stepper.runs) if run.done < len(run.token_ids)})
            outcomes[name] = stepper.hidden()
    for number in (0, 2, 3):
        assert torch.equal(outcomes["poisoned"][number], outcomes["clean"][number])
        assert bool(outcomes["clean"][number].isfinite().all())
    assert torch.equal(outcomes["poisoned"][1][:6], outcomes["clean"][1][:6])
    assert bool(outcomes["poisoned"][1][6:].isnan().all())
    assert bool(outcomes["clean"][1].isfinite().all())


def test_nan_in_a_prefill_beside_others_in_one_step(tiny_llama: Path) -> None:
    decoder = load(resolve(str(tiny_llama)), dtype=torch.float32, device=torch.device("cpu"))
    decoder.embed_tokens[300] = float("nan")
    sequences = [[5, 6, 7, 8], [9, 300, 10], [11, 12]]
    with_nan = logprobs(decoder, sequences)
    without = logprobs(decoder, [sequences[0], [9, 301, 10], sequences[2]])
    assert torch.equal(with_nan[0], without[0])
    assert torch.equal(with_nan[2], without[2])
    assert bool(with_nan[1][1:].isnan().all())
