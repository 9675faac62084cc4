"""Models that were damaged at random, or made to harm: they load, or they are refused in one line, at once."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from neper.errors import NeperError
from neper.models.registry import load
from neper.models.source import resolve
from neper.text.tokenizer import Tokenizer
from tests.helpers.tiny import write_model
from tests.models.gguf_files import write_gguf

CPU_SECONDS = 5.0  # far above what any takes, far below what a count that is believed takes
MEMORY = 2**30
HOSTILE: list[Any] = [
    None, True, False, -1, 0, 1, 3, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 10**30, -(2**63), 0.5, -1.0, 1e308, "", "x",
    "../x", "/etc/passwd", "\0", "\ud800", "a" * 100_000, [], {}, [[]], [None] * 1000, {"": {}}, {"type": "Sequence"},
]  # fmt: skip
NUMBERS = [0, 1, 2**16, 2**31, 2**32 - 1, 2**33, 2**40, 2**62, 2**63, 2**64 - 1]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of weights, shards, PyTorch's own format, and GGUF."""
    place = tmp_path_factory.mktemp("originals")
    model = write_model(place / "single")
    shutil.copytree(place / "single", place / "shards")
    (place / "shards" / "model.safetensors").unlink()
    LlamaForCausalLM.from_pretrained(place / "single").save_pretrained(place / "shards", max_shard_size="200KB")
    shutil.copytree(place / "single", place / "pickled")
    (place / "pickled" / "model.safetensors").unlink()
    torch.save(model.state_dict(), place / "pickled" / "pytorch_model.bin")
    shutil.copytree(place / "single", place / "gguf")
    write_gguf(place / "gguf" / "tiny.gguf", model)
    for path in (place / "gguf").iterdir():
        if path.suffix != ".gguf":
            path.unlink()
    return place


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed: mostly near the beginning, where headers are."""
    end = len(data) if rng.random() < 0.3 else min(len(data), rng.choice([32, 512, 20_000]))
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 3, 20])):
        place = rng.randrange(max(1, end))
        kind = rng.randrange(5)
        if kind == 0:
            changed[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            changed[place : place + 8] = struct.pack("<Q", rng.choice(NUMBERS))
        elif kind == 2:
            changed[place : place + 4] = struct.pack("<I", rng.choice(NUMBERS) % 2**32)
        elif kind == 3:
            del changed[place : place + rng.choice([1, 8, 1000])]
        else:
            changed[place:place] = bytes(rng.choice([1, 8, 1000]))
    return bytes(changed[: rng.randrange(len(changed) + 1)] if rng.random() < 0.15 else changed)


def changed_value(value: Any, rng: random.Random) -> Any:
    """JSON with one of its values, at any depth, replaced, left out or repeated."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        made = type(value)(value)
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if rng.random() < 0.1:
            del made[key]
        else:
            made[key] = changed_value(value[key], rng)
        return made
    return rng.choice(HOSTILE)


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8", errors="surrogatepass")


def spoil_json(directory: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(directory.glob("*.json")) or [directory / "config.json"])
    value = json.loads(path.read_text()) if path.exists() else {}
    for _ in range(rng.choice([1, 1, 2, 5])):
        value = changed_value(value, rng)
    write(path, value)


def spoil_header(directory: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(directory.glob("*.safetensors")) or [directory / "config.json"])
    if path.suffix != ".safetensors":
        return spoil_json(directory, rng)
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    text = json.dumps(changed_value(json.loads(data[8 : 8 + length]), rng)).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def spoil_bytes(directory: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(directory.iterdir()))
    path.write_bytes(damaged(path.read_bytes(), rng))


def spoil_file(directory: Path, rng: random.Random) -> None:
    path = rng.choice(sorted(directory.iterdir()))
    path.unlink()
    kind = rng.randrange(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(path)
    elif kind == 3:
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    elif kind == 4:
        path.symlink_to("/dev/zero")


SPOILERS: list[Callable[[Path, random.Random], None]] = [spoil_json, spoil_json, spoil_header, spoil_bytes, spoil_file]


def attempt(directory: Path, cache: Path) -> str | None:
    """The refusal of a model, or None where it loads."""
    try:
        source = resolve(str(directory), cache_dir=cache)
        Tokenizer.from_directory(source.path).encode("the quick brown fox")
        load(source, dtype=torch.float32, device=torch.device("cpu"))
    except NeperError as error:
        return error.message
    return None


def try_many(originals: Path, place: Path, seeds: range) -> dict[str, int]:
    """Spoils a model for each seed; returns how many loaded and how many were refused."""
    counts = {"loaded": 0, "refused": 0}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in seeds:
        rng = random.Random(seed)
        form = rng.choice(["single", "shards", "pickled", "gguf", "gguf"])
        directory = Path(shutil.copytree(originals / form, place / "thing"))
        rng.choice(SPOILERS[3:] if form == "gguf" else SPOILERS)(directory, rng)
        started = time.process_time()
        try:
            refusal = attempt(directory, place / "cache")
        except BaseException as error:
            raise AssertionError(f"seed {seed} ({form}): {error!r}") from error
        seconds = time.process_time() - started
        assert seconds < CPU_SECONDS, f"seed {seed} ({form}): {seconds:.1f} s of CPU, {refusal}"
        if refusal is not None:
            assert len(refusal.splitlines()) == 1, f"seed {seed} ({form}): {refusal!r}"
            assert len(refusal) < 2000, f"seed {seed} ({form}): {len(refusal)} letters"
        counts["loaded" if refusal is None else "refused"] += 1
        for path in directory.iterdir():
            if path.is_fifo():
                path.unlink()
        shutil.rmtree(directory)
        shutil.rmtree(place / "cache", ignore_errors=True)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < MEMORY, f"{grown / 2**20:.0f} MiB"
    return counts


@pytest.mark.rounds(300)
@pytest.mark.skipif(sys.platform == "win32", reason="makes pipes and reads resource usage")
def test_case_118_whatever_is_damaged_loads_or_is_one_line(originals: Path, tmp_path: Path, rounds: int) -> None:
    counts = try_many(originals, tmp_path, range(rounds))
    assert min(counts.values()) > 20, counts  # both ends are reached
