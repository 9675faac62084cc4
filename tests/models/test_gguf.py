"""GGUF conversion: tensors and configs that came back as they were, a cache that is whole or absent, clear errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from neper.errors import ModelLoadError
from neper.models.cache import cached, file_key
from neper.models.gguf import convert
from neper.models.model_config import ModelConfig
from neper.models.registry import load
from neper.models.source import resolve
from tests.helpers.tiny import write_model
from tests.models.gguf_files import gguf_name, write_gguf
from tests.models.steps import logprobs

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("gguf")
    model = write_model(directory)
    write_gguf(directory / "tiny.gguf", model)
    return directory / "tiny.gguf", model


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 20}),
    ],
)
def test_weights_and_config_come_back(architecture: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    model = write_model(tmp_path, architecture, **overrides)
    write_gguf(tmp_path / "tiny.gguf", model)
    source = resolve(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache")
    stored = load_file(source.path / "model.safetensors")
    expected = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert stored.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(stored[name], weight), name
    original, converted = vars(resolve(str(tmp_path)).config), vars(source.config)
    assert converted == original
    assert (source.name, source.eos_token_ids, source.model_max_length) == ("tiny", (2, 0), 512)


def _logprobs_of(oracle: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(oracle(ids[None]).logits[0].double(), dim=-1)


def test_a_converted_model_computes_what_transformers_does(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    source = resolve(str(resolve(str(tiny[0]), cache_dir=tmp_path).path))
    ids = torch.randint(384, (50,), generator=torch.Generator().manual_seed(3))
    expected = _logprobs_of(AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32), ids)
    decoder = load(source, dtype=torch.float32, device=torch.device("cpu"))
    assert float((logprobs(decoder, [ids.tolist()])[0] - expected).abs().max()) <= 1e-4


@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q4_0", "Q8_0"])
def test_case_77_float32_means_the_values_of_the_file(quantization: str, tmp_path: Path) -> None:
    model = write_model(tmp_path)
    write_gguf(tmp_path / "tiny.gguf", model, quantization=gguf.GGMLQuantizationType[quantization])
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    values = {}
    for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors:
        value = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        for part, count in heads.items():
            if f".{part}." in tensor.name:  # back from Llama's layout in GGUF
                value = value.reshape(count, value.shape[0] // count // 2, 2, -1).swapaxes(1, 2).reshape(value.shape)
        values[tensor.name] = value
    for name, parameter in model.state_dict().items():
        parameter.copy_(values[gguf_name(name)])
    ids = torch.randint(384, (50,), generator=torch.Generator().manual_seed(3))
    source = resolve(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache")
    decoder = load(source, dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(decoder.embed_tokens, model.model.embed_tokens.weight)
    # 0.1 nat where the values were rounded to bfloat16 on their way.
    assert float((logprobs(decoder, [ids.tolist()])[0] - _logprobs_of(model, ids)).abs().max()) <= 1e-4
    rounded = load(source, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert torch.equal(rounded.embed_tokens, model.model.embed_tokens.weight.bfloat16())


def test_case_77_float32_without_the_file_is_refused(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(tiny[0].read_bytes())
    source = resolve(str(file), cache_dir=tmp_path)
    file.unlink()
    with pytest.raises(ModelLoadError, match=r"is gone, .*--dtype bfloat16"):
        load(source, dtype=torch.float32, device=torch.device("cpu"))
    load(source, dtype=torch.bfloat16, device=torch.device("cpu"))


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    write_gguf(tmp_path / "tiny.gguf", model, quantization=gguf.GGMLQuantizationType.Q8_0)
    stored = load_file(convert(tmp_path / "tiny.gguf", tmp_path / "cache") / "model.safetensors")
    for name, weight in model.state_dict().items():
        # Q8_0 keeps blocks of 32 as multiples of largest / 127: half a step of error, and a rounding to bfloat16.
        bound = weight.abs().max() * (0.5 / 127 + 2**-8) if weight.ndim == 2 else weight.abs().max() * 2**-8
        assert float((stored[name].float() - weight).abs().max()) <= float(bound), name
    assert not torch.equal(stored["lm_head.weight"], model.lm_head.weight.bfloat16())


def test_llama3_rope_from_divisors(tmp_path: Path) -> None:
    model = write_model(tmp_path, head_dim=32, rope_parameters=LLAMA3_ROPE, max_position_embeddings=16384)
    plain = 1.0 / 500_000.0 ** (torch.arange(0, 32, 2).float() / 32)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
    write_gguf(tmp_path / "tiny.gguf", model, rope_freqs__weight=divisors)
    converted = ModelConfig.from_directory(convert(tmp_path / "tiny.gguf", tmp_path / "cache"))
    assert converted.rope_scaling == resolve(str(tmp_path)).config.rope_scaling
    write_gguf(tmp_path / "other.gguf", model, rope_freqs__weight=np.linspace(1, 8, 16, dtype=np.float32))
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight"):
        convert(tmp_path / "other.gguf", tmp_path / "cache")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general__architecture": "mamba"}, "mamba"),
        ({"remove": ("llama.block_count",)}, r"llama\.block_count"),
        ({"remove": ("llama.attention.layer_norm_rms_epsilon",)}, "layer_norm_rms_epsilon"),
        ({"remove": ("token_embd.weight",)}, r"token_embd\.weight"),
        ({"remove": ("tokenizer.ggml.pre",)}, r"tokenizer\.ggml\.pre"),
        ({"tokenizer__ggml__pre": "unheard-of"}, "unheard-of.*Hugging Face directory"),
        ({"tokenizer__ggml__model": "llama"}, "'llama'.*Hugging Face directory"),
        ({"tokenizer__ggml__eos_token_id": 9999}, "eos_token_id 9999"),
        ({"tokenizer__ggml__add_eos_token": True}, "add_eos_token"),
        ({"tokenizer__ggml__merges": ["zz zz"]}, "merges"),
        ({"llama__expert_count": 8}, "experts"),
        ({"llama__rope__scaling__type": "yarn"}, "yarn"),
        ({"llama__rope__dimension_count": 8}, "dimension_count"),
        ({"split__count": 3}, "3 parts"),
        ({"blk__0__mystery__weight": np.ones(4, dtype=np.float32)}, r"blk\.0\.mystery\.weight"),
    ],
)
def test_what_is_not_supported_is_named(
    changes: dict[str, Any], named: str, tiny: tuple[Path, PreTrainedModel]
) -> None:
    path, model = tiny
    file = path.parent / "broken.gguf"
    file.unlink(missing_ok=True)
    write_gguf(file, model, **changes)
    with pytest.raises(ModelLoadError, match=named):
        convert(file, path.parent / "cache")
    assert list((path.parent / "cache").glob("*")) == list((path.parent / "cache").glob(".converting-*")) == []


def test_files_that_are_no_gguf(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    whole = tiny[0].read_bytes()
    for name, content, says in (
        ("empty", b"", "not begin with GGUF"),
        ("text", b"hello, this is text" * 9, "not begin with GGUF"),
        ("head", whole[:500], "within its header; download it again"),
        ("cut", whole[:-1], f"cut short: it has {len(whole) - 1} bytes, its tensors need {len(whole)}; download"),
    ):
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        with pytest.raises(ModelLoadError, match=says):
            convert(file, tmp_path / "cache")
    with pytest.raises(ModelLoadError, match="there is no file"):
        convert(tmp_path / "absent.gguf", tmp_path / "cache")


def test_converted_once_and_again_when_the_file_changes(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []

    def progress(done: int, total: int, what: str) -> None:
        calls.append((done, total, what))

    file = tmp_path / "tiny.gguf"
    file.write_bytes(tiny[0].read_bytes())
    first = convert(file, tmp_path / "cache", progress=progress)
    total = len(tiny[1].state_dict())
    assert calls == [(done, total, "converting tiny.gguf") for done in range(total + 1)]  # from the start on
    assert convert(file, tmp_path / "cache", progress=progress) == first
    assert len(calls) == total + 1
    os.utime(file, (1, 1))
    assert convert(file, tmp_path / "cache") != first


def test_a_failure_leaves_nothing(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny[0], tmp_path, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def _child(code: str, *arguments: object) -> subprocess.Popen[str]:
    lines = ["import os, resource, sys", "from pathlib import Path", "from neper.models.gguf import convert", code]
    command = [sys.executable, "-c", "\n".join(lines), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_conversion_leaves_no_broken_cache(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    die = "convert(Path(sys.argv[1]), Path(sys.argv[2]), progress=lambda done, *_: os._exit(9) if done == 5 else None)"
    child = _child(die, tiny[0], tmp_path)
    child.communicate()
    assert child.returncode == 9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".converting-")
    assert cached(tmp_path, file_key(tiny[0])) is None
    finished = convert(tiny[0], tmp_path)
    assert load_file(finished / "model.safetensors").keys() == tiny[1].state_dict().keys()
    assert not left.exists()


def test_case_120_a_full_disk_is_found_before_the_work(
    tiny: tuple[Path, PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = sum(2 * tensor.numel() for tensor in tiny[1].state_dict().values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=weights))
    calls: list[int] = []
    with pytest.raises(ModelLoadError, match=r"needs .* in .*, which has .* left; free some space"):
        convert(tiny[0], tmp_path / "cache", progress=lambda done, *_: calls.append(done))
    assert calls in ([], [0])
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=weights + 2**25))
    assert convert(tiny[0], tmp_path / "cache").is_dir()


@pytest.mark.slow
def test_two_processes_at_once(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    # Each waits in its first tensor until the other is there too, so both write and one finds the other's result.
    meet = """
mine, other = Path(sys.argv[3]), Path(sys.argv[4])
def progress(done, total, what):
    mine.touch()
    while not other.exists():
        pass
print(convert(Path(sys.argv[1]), Path(sys.argv[2]), progress=progress))
"""
    cache, flags = tmp_path / "cache", [tmp_path / "a", tmp_path / "b"]
    children = [_child(meet, tiny[0], cache, *order) for order in (flags, flags[::-1])]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert [entry.name for entry in cache.iterdir()] == [Path(outputs[0][0].strip()).name]


def test_a_cache_that_cannot_be_written(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelLoadError, match=r"cannot write the converted model to .*file"):
        convert(tiny[0], tmp_path / "file" / "cache")


@pytest.mark.slow
def test_a_full_disk(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    # A limit on the size of files fails a write as a full disk does: with an OSError half-way.
    limited = (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\nconvert(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    child = _child(limited, tiny[0], tmp_path)
    _, errors = child.communicate()
    assert child.returncode == 1
    assert "ModelLoadError: cannot write the converted model to" in errors
    assert "free some space" in errors
    assert list(tmp_path.iterdir()) == []


def test_config_of_the_converted_is_what_transformers_wrote(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    directory = convert(tiny[0], tmp_path)
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": None}
    assert json.loads((directory / "config.json").read_text())["rms_norm_eps"] == tiny[1].config.rms_norm_eps
