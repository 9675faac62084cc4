"""What the engine chooses for itself, how the cache is sized, and what it says when memory is lacking."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from neper.config import EngineConfig
from neper.engine import memory, settings
from neper.engine.settings import EngineSettings, choose_scoring
from neper.engine.start import cache_size
from neper.engine.start.startup import build
from neper.errors import StartupError
from neper.models.shapes import SHAPES
from neper.models.source import resolve
from neper.ops import backends

CUDA = torch.device("cuda", 0)
MODEL = SHAPES["qwen3-0.6b"]


def resolved(**config: Any) -> EngineSettings:
    return settings.resolve(EngineConfig(device="cpu", dtype="bfloat16", **config), MODEL)


def test_a_cpu_neither_overlaps_nor_captures() -> None:
    chosen = resolved()
    assert (chosen.overlap, chosen.cuda_graphs, chosen.scoring) == (False, False, "device")
    assert (chosen.max_num_seqs, chosen.max_num_batched_tokens) == (64, 512)
    assert resolved(overlap=True).overlap


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((6, 1), torch.float32),
        ((7, 0), torch.float32),
        ((7, 5), torch.float32),
        ((8, 0), torch.bfloat16),
        ((8, 9), torch.bfloat16),
        ((9, 0), torch.bfloat16),
        ((12, 0), torch.bfloat16),
    ],
)
def test_case_76_a_gpu_gets_bfloat16_where_it_is_fast_at_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 0 else capability)
    assert settings.choose_dtype(torch.device("cuda", 1)) == expected
    assert settings.choose_dtype(CUDA) == torch.bfloat16
    for asked in ("bfloat16", "float32"):
        chosen = settings.resolve(EngineConfig(device="cuda:1", dtype=asked), MODEL)
        assert chosen.dtype == getattr(torch, asked)
    assert settings.resolve(EngineConfig(device="cuda:1"), MODEL).dtype == expected


def test_scoring_falls_back_to_the_host_where_the_kernels_cannot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    assert choose_scoring(None, CUDA, 2**20) == "device"
    assert choose_scoring("host", CUDA, 1000) == "host"
    assert choose_scoring(None, CUDA, 2**20 + 1) == "host"
    assert "1048577 ids" in caplog.text
    with pytest.raises(StartupError, match="use scoring host"):
        choose_scoring("device", CUDA, 2**20 + 1)
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert choose_scoring(None, CUDA, 1000) == "host"
    assert "Triton is not installed" in caplog.text
    assert choose_scoring(None, torch.device("cpu"), 2**21) == "device"


def test_the_cache_holds_what_the_bytes_allow() -> None:
    chosen = resolved(max_model_len=1600, max_num_seqs=4)
    each = cache_size.block_bytes(MODEL, chosen)
    assert each == 2 * 28 * 16 * 8 * 128 * 2
    assert cache_size.fit(chosen, MODEL, 150 * each + 7, lower_context=False).num_blocks == 150
    roomy = cache_size.fit(chosen, MODEL, 10**6 * each, lower_context=False)
    assert roomy.num_blocks == 4 * 100 + 1  # what all sequences at full length use, and the null block
    lowered = cache_size.fit(chosen, MODEL, 51 * each, lower_context=True)
    assert (lowered.num_blocks, lowered.max_model_len) == (51, 800)
    with pytest.raises(StartupError, match="lower max_model_len"):
        cache_size.fit(chosen, MODEL, 51 * each, lower_context=False)


def test_the_worst_step_is_full_and_scored() -> None:
    chosen = replace(resolved(max_model_len=100, max_num_seqs=3, max_num_batched_tokens=250), num_blocks=1)
    prompts, rows, views = cache_size.worst_plans(chosen)
    assert [chunk.length for chunk in prompts.chunks] == [100, 100]
    assert all(chunk.samples and (chunk.score_start, chunk.score_end) == (1, 100) for chunk in prompts.chunks)
    assert [chunk.length for chunk in rows.chunks] == [1, 1, 1]
    assert [chunk.length for chunk in views.chunks] == [1, 1, 1]
    assert all(chunk.seq.request.sampling.penalized for chunk in (*rows.chunks, *views.chunks))
    assert {chunk.seq.request.logprobs.mode for chunk in views.chunks} == {"processed_logprobs"}
    assert all(set(chunk.seq.block_table) == {0} for plan in (prompts, rows, views) for chunk in plan.chunks)


def test_an_error_that_is_not_memorys_is_not_called_so() -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        memory.reserve("logits", "max_num_seqs", 100, broken, torch.device("cpu"))
    with (
        pytest.raises(RuntimeError, match="illegal memory access"),
        memory.needed("graphs", "lower max_num_seqs", torch.device("cpu")),
    ):
        broken()


def test_the_error_says_how_much_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory, "free_bytes", lambda _: 3 * 2**30)
    with pytest.raises(StartupError) as error:
        memory.reserve("the KV cache", "gpu_memory_utilization", 5 * 2**30, no_memory, CUDA)
    assert str(error.value) == (
        "no memory for the KV cache: 5 GiB on cuda:0 asked for, 2 GiB are missing; lower gpu_memory_utilization"
    )


def test_what_nobody_has_counted_has_a_remedy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 2**30)
    with (
        pytest.raises(StartupError, match=r"^not enough memory for CUDA graphs: 1 GiB are free on cuda:0; lower this$"),
        memory.needed("CUDA graphs", "lower this", CUDA),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_case_118_a_context_beyond_all_memory_is_refused(
    tiny_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(shutil.copytree(tiny_dir("llama"), tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**24}))
    monkeypatch.setattr("neper.machine.available_memory", lambda: 2**30)
    with pytest.raises(StartupError, match=r"no memory for positions: 3 GiB on cpu .* lower max_model_len"):
        build(EngineConfig(device="cpu", num_threads=1), resolve(str(directory)))
