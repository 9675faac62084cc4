"""Things that people and attackers point `neper serve` at: one line each, within a second, before an engine starts.

docs/api.md has the same table, for people.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import neper.server.run  # noqa: F401  (imports are not what is timed)
from neper.cli import app
from neper.engine.remote.client import EngineClient
from neper.errors import ModelLoadError
from neper.models.decoder import Decoder
from neper.models.registry import load
from neper.models.source import resolve
from tests.cli.test_cli import neper_command
from tests.helpers.tiny import write_model
from tests.models.gguf_files import write_gguf

CPU_SECONDS = 1.0
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in Hugging Face form, and the same as tiny.gguf beside it."""
    directory = tmp_path_factory.mktemp("whole")
    model = write_model(directory / "model")
    write_gguf(directory / "model" / "tiny.gguf", model)
    (directory / "model" / "tiny.gguf").rename(directory / "tiny.gguf")
    return directory


@pytest.fixture
def thing(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with a model to spoil. No engine starts: whoever gets that far waits until something else fails."""

    async def wait_for_ever(self: EngineClient) -> None:
        await asyncio.sleep(30)
        raise AssertionError("it was served")

    monkeypatch.setattr(EngineClient, "start", wait_for_ever)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(whole, tmp_path / "thing")
    return tmp_path / "thing"


def edit(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def keep(directory: Path, *names: str) -> None:
    for path in directory.iterdir():
        if path.name not in names:
            path.unlink()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def weights_outside(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory.parent / "other.safetensors")
    index = {"weight_map": {"lm_head.weight": "../other.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def a_huge_header(directory: Path) -> None:
    text = b",".join([b'"%06d":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}' % n for n in range(400_000)])
    text = b"{" + text + b"}"
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)


def ten_billion_items(path: Path) -> None:
    key = b"tokenizer.ggml.scores"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path.write_bytes(head + struct.pack("<IIQ", 9, 0, 10**10) + b"\0" * 160_000)


def as_file(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        (place / name).write_bytes(content)
        return place / name

    return make


def model(spoil: Callable[[Path], None]) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        spoil(place / "model")
        return place / "model"

    return make


def cut_gguf(place: Path) -> Path:
    data = (place / "tiny.gguf").read_bytes()
    (place / "tiny.gguf").write_bytes(data[:-1000])
    return place / "tiny.gguf"


def gguf(spoil: Callable[[Path], None]) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        spoil(place / "tiny.gguf")
        return place / "tiny.gguf"

    return make


WRONG: list[tuple[str, Callable[[Path], Path], str]] = [
    ("nothing there", lambda place: place / "absent", "no model .*absent"),
    ("an empty directory", model(lambda path: keep(path)), "has no config.json"),
    ("a named pipe", lambda place: (a_pipe(place / "tiny.gguf"), place / "tiny.gguf")[1], "is not a regular file"),
    ("a text file", as_file("notes.txt", b"hello"), "is no model: give a directory, a .gguf file, or a hub id"),
    ("the weights alone", lambda place: place / "model" / "model.safetensors", "give the directory that holds it"),
    ("a config that is a pipe", model(lambda path: a_pipe(path / "config.json")), "config.json is not a regular file"),
    ("a config that is no JSON", model(lambda path: (path / "config.json").write_text("{")), "config.json: Expecting"),
    ("a config nested deeply", model(lambda path: (path / "config.json").write_text('{"a":' * 10**5)), "too deeply"),
    ("another family", model(lambda path: edit(path, model_type="gpt_neox")), "model type 'gpt_neox' is not supported"),
    (
        "two kinds of positions",
        model(lambda path: edit(path, rope_scaling={"type": "yarn"})),
        "rope_type in two places",
    ),
    ("a million layers", model(lambda path: edit(path, num_hidden_layers=10**6)), "must be at most 4096"),
    (
        "sizes of another model",
        model(lambda path: edit(path, vocab_size=10**6)),
        r"\[384, 64\] instead of \[1000000, 64\]",
    ),
    ("a number of 4,000 digits", model(lambda path: edit(path, rope_theta=10**4000)), "rope_theta"),
    (
        "no tokenizer",
        model(lambda path: keep(path, "config.json", "model.safetensors")),
        "has no tokenizer: neither tokenizer.json nor",
    ),
    (
        "a tokenizer of another world",
        model(lambda path: (path / "tokenizer.json").write_text('{"model": 5}')),
        "cannot read .*tokenizer.json",
    ),
    ("an adapter", model(lambda path: (keep(path), (path / "adapter_config.json").write_text("{}"))), "adapter .LoRA."),
    ("no weights", model(lambda path: (path / "model.safetensors").unlink()), "has no weights: neither"),
    (
        "what Git LFS leaves",
        model(lambda path: (path / "model.safetensors").write_bytes(POINTER)),
        "model.safetensors is a Git LFS pointer .*git lfs pull",
    ),
    (
        "weights cut short",
        model(lambda path: os.truncate(path / "model.safetensors", 300_000)),
        "is cut short: .*download it again",
    ),
    ("400,000 tensors", model(a_huge_header), "has a header of .* bytes"),
    ("weights elsewhere", model(weights_outside), "names a file that is not in it: '../other.safetensors'"),
    (
        "several GGUF files",
        lambda place: (shutil.copy(place / "tiny.gguf", place / "b.gguf"), place)[1],
        r"holds several GGUF files \(b.gguf, tiny.gguf\): give the path of one",
    ),
    ("a GGUF file cut short", cut_gguf, "is cut short: .*download it again"),
    ("10^10 items in 160 kB", gguf(ten_billion_items), "its arrays hold more than"),
]


def refused(*arguments: str) -> tuple[str, float]:
    """What `neper serve` says on stderr, and the seconds of CPU that it took."""
    started = time.process_time()
    result = CliRunner().invoke(app, ["serve", *arguments, "--port", "0"], catch_exceptions=False)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    return result.stderr, time.process_time() - started


@pytest.mark.parametrize(("make", "says"), [pytest.param(make, says, id=name) for name, make, says in WRONG])
def test_case_118_one_line_within_a_second(
    make: Callable[[Path], Path], says: str, thing: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = make(thing)
    stderr, seconds = refused(str(path))
    (line,) = [line for line in stderr.splitlines() if " INFO " not in line]
    assert line.startswith("neper: error: ")
    assert re.search(says, line), line
    assert len(line) < 1000
    assert seconds < CPU_SECONDS
    logged = [
        line for line in capfd.readouterr().err.splitlines() if " INFO " not in line and "model shards" not in line
    ]
    assert logged == []  # nothing of a library's own


def test_there_are_24_of_them() -> None:
    assert len(WRONG) == 24


@pytest.mark.parametrize("name", ["a pipe", "a config that is a pipe"])
def test_case_118_the_command_says_the_same(name: str, whole: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(whole, tmp_path / "thing"))
    a_pipe(place / "model" / "config.json")
    a_pipe(place / "tiny.gguf")
    target = place / ("tiny.gguf" if name == "a pipe" else "model")
    result = neper_command("serve", str(target), "--port", "0")
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(r"neper: error: \S+ is not a regular file\n", result.stderr)


def test_case_98_a_directory_with_one_gguf_file_is_that_file(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    shutil.copy(whole / "tiny.gguf", tmp_path / "one" / "some.gguf")
    shutil.copy(whole / "model" / "config.json", tmp_path / "one")  # repositories of GGUF files often have one
    source = resolve(str(tmp_path / "one"), cache_dir=tmp_path / "cache")
    assert (source.name, source.gguf) == ("some", tmp_path / "one" / "some.gguf")
    shutil.copy(whole / "tiny.gguf", tmp_path / "sha256-0123")
    assert resolve(str(tmp_path / "sha256-0123"), cache_dir=tmp_path / "cache").name == "sha256-0123"


def loaded(directory: Path) -> Decoder:
    return load(resolve(str(directory)), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("form", ["zip", "old", "shards"])
def test_case_98_pytorch_weights_are_read(form: str, whole: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(whole / "model", tmp_path / "model"))
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    if form == "shards":
        names = {name: f"pytorch_model-{number % 2}.bin" for number, name in enumerate(tensors)}
        for file in set(names.values()):
            torch.save({name: tensors[name] for name in tensors if names[name] == file}, directory / file)
        (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=form == "zip")
    original, read = loaded(whole / "model"), loaded(directory)
    assert torch.equal(original.embed_tokens, read.embed_tokens)
    assert torch.equal(original.layers[1].mlp.down_proj.weight, read.layers[1].mlp.down_proj.weight)


class Runs:
    """Makes a directory where it is unpickled without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_case_98_code_in_pytorch_weights_is_not_run(whole: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(whole / "model", tmp_path / "model"))
    (directory / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Runs(tmp_path / "ran")}, directory / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"it holds more than tensors, which may be code; take the model as"):
        loaded(directory)
    with zipfile.ZipFile(directory / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", b"\0" * 10**6)
    with pytest.raises(ModelLoadError, match="its parts are compressed"):
        loaded(directory)
    torch.save(load_file(whole / "model" / "model.safetensors") | {"x": torch.ones(1)}, directory / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="unknown: x"):
        loaded(directory)
    assert not (tmp_path / "ran").exists()
