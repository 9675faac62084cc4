"""Strict loading: every misfit between files and config is an error that names it; shards load like one file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from neper.errors import ModelLoadError
from neper.models.decoder import Decoder
from neper.models.registry import load
from neper.models.source import resolve
from tests.helpers.tiny import write_model
from tests.models.steps import logprobs

IDS = [list(range(30))]
Q0 = "model.layers.0.self_attn.q_proj.weight"


def _load(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load(resolve(str(directory)), dtype=dtype, device=torch.device("cpu"))


@pytest.fixture
def directory(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may spoil."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "copy"))


def _edit(directory: Path, **changes: Tensor | None) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file)


def test_missing_weights_are_named(directory: Path) -> None:
    _edit(directory, **{Q0: None, "lm_head.weight": None})
    with pytest.raises(ModelLoadError, match=rf"missing: lm_head\.weight, {Q0}"):
        _load(directory)


def test_unknown_weights_are_named_a_few(directory: Path) -> None:
    _edit(directory, **{f"model.layers.0.extra{number}": torch.zeros(1) for number in range(6)})
    with pytest.raises(ModelLoadError, match=r"unknown: model\.layers\.0\.extra0, .*extra3 and 2 more"):
        _load(directory)


def test_wrong_shapes_are_named(directory: Path) -> None:
    _edit(directory, **{Q0: torch.zeros(32, 64)})
    with pytest.raises(ModelLoadError, match=rf"wrong shape: {Q0} \[32, 64\] instead of \[64, 64\]"):
        _load(directory)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(directory: Path, dtype: torch.dtype) -> None:
    _edit(directory, **{Q0: torch.zeros(64, 64).to(dtype)})
    with pytest.raises(ModelLoadError, match=rf"{Q0} has dtype (I8|F8_E4M3): quantised"):
        _load(directory)


def test_an_untied_head_in_a_tied_model_and_frequencies_are_harmless(tmp_path: Path) -> None:
    write_model(tmp_path, tie_word_embeddings=True)
    expected = logprobs(_load(tmp_path), IDS)[0]
    extras = {
        "lm_head.weight": torch.full((384, 64), 9.0),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    _edit(tmp_path, **extras)
    assert torch.equal(logprobs(_load(tmp_path), IDS)[0], expected)


def test_damaged_and_absent_files(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"is cut short: .*download it again"):
        _load(directory)
    file.unlink()
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        _load(directory)


@pytest.fixture
def sharded(tiny_llama: Path, tmp_path: Path) -> Path:
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_shards_equal_one_file(tiny_llama: Path, sharded: Path) -> None:
    assert torch.equal(logprobs(_load(sharded), IDS)[0], logprobs(_load(tiny_llama), IDS)[0])


def test_an_absent_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name):
        _load(sharded)


def test_a_weight_in_two_shards_is_an_error(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file(tensors | {name: tensor}, second)
    with pytest.raises(ModelLoadError, match=f"{name} is in two files"):
        _load(sharded)


def test_a_weight_that_its_shard_lacks_is_missing(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shard = sharded / index["weight_map"][Q0]
    save_file({name: tensor for name, tensor in load_file(shard).items() if name != Q0}, shard)
    with pytest.raises(ModelLoadError, match=f"missing: {Q0}"):
        _load(sharded)


def test_an_empty_index_is_an_error(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="no weight_map"):
        _load(directory)


def test_values_are_converted_to_the_dtype(tiny_llama: Path) -> None:
    decoder = _load(tiny_llama, torch.bfloat16)
    stored = load_file(tiny_llama / "model.safetensors")
    assert torch.equal(decoder.embed_tokens, stored["model.embed_tokens.weight"].bfloat16())
    assert torch.equal(decoder.norm.weight, stored["model.norm.weight"].bfloat16())


def test_progress_reaches_its_total(tiny_llama: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    load(
        resolve(str(tiny_llama)),
        dtype=torch.float32,
        device=torch.device("cpu"),
        progress=lambda done, total, what: seen.append((done, total, what)),
    )
    total = len(load_file(tiny_llama / "model.safetensors"))
    assert seen == [(done, total, "loading weights") for done in range(1, total + 1)]
