"""Figures of batches and steps, taken from a scripted engine on a made-up clock."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import neper.ops
from neper.bench import engine_probes
from neper.bench.engine_cases import OFF, Case, requests
from neper.bench.engine_drive import Traffic, run_batch, steps
from neper.bench.engine_probes import SCORING_KERNELS, decode_bytes, kv_bytes_per_token
from neper.errors import NeperError
from neper.models.shapes import SHAPES
from neper.types import PackedRows, Request
from tests.bench.scripted_core import ScriptedCore, batch_of
from tests.helpers.engine import make_core

K20 = Case(20)


def test_tpot_is_the_mean_of_decode_steps_without_the_prefill() -> None:
    # The first step is the prefill. Of 9 decode steps, the first one's results start the clock.
    batch = batch_of(ScriptedCore(lambda number: [50.0, 7.0][number] if number < 2 else 0.25), OFF, 4, 10)
    assert batch.tpot == 0.25
    assert batch.seconds == 50 + 7 + 8 * 0.25
    assert len(batch.times) == 9
    assert batch.tokens["0-2"] == list(range(10))
    assert batch.peak_bytes is None


def test_only_steps_that_all_requests_share_count() -> None:
    # One starts in step 3, so it goes on alone for 3 steps, which are quicker.
    core = ScriptedCore(lambda number: 1.0 if number < 10 else 0.1, starts=[0, 3])
    batch = batch_of(core, OFF, 2, 10)
    assert len(batch.times) == 6
    assert batch.tpot == 1.0


def test_nothing_is_collected_while_the_clock_runs() -> None:
    enabled: list[bool] = []

    def seconds(_: int) -> float:
        enabled.append(gc.isenabled())
        return 1.0

    batch_of(ScriptedCore(seconds), OFF, 2, 4)
    with pytest.raises(NeperError):
        batch_of(ScriptedCore(fails=True), OFF, 2, 4)
    assert enabled == [False] * 4
    assert gc.isenabled()


def test_a_reply_without_decode_steps_has_no_tpot() -> None:
    batch = batch_of(ScriptedCore(), OFF, 2, 2)
    assert batch.traffic is None
    with pytest.raises(NeperError, match="less than two decode steps"):
        _ = batch.tpot


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("reply", [10, 64])
def test_bytes_a_step_are_those_of_the_packed_rows(ahead: bool, reply: int) -> None:
    for case, width in ((OFF, 8), (Case(0), 12), (K20, 12 + 20 * 8)):
        assert 4 * PackedRows(case.top_k, b"").width == width
        batch = batch_of(ScriptedCore(ahead=ahead), case, 3, reply)
        assert batch.traffic == Traffic(copies=1, bytes=3 * width, waits=1)
    mixed = batch_of(ScriptedCore(ahead=ahead), Case(20, asking=1), 3, reply)
    assert mixed.traffic == Traffic(copies=1, bytes=172 + 2 * 8, waits=1)


def test_a_failed_request_ends_the_batch() -> None:
    with pytest.raises(NeperError, match="a request failed: no numbers"):
        batch_of(ScriptedCore(fails=True), OFF, 2, 4)


def test_a_reply_that_is_too_short_is_noticed() -> None:
    core = ScriptedCore()
    made = requests(OFF, 1, prompt=3, reply=5, vocab_size=50, seed=0)
    original = core.add

    def add(request: Request) -> None:
        original(request)
        core.waiting[request.request_id][1] -= 1

    core.add = add  # type: ignore[method-assign]
    with pytest.raises(NeperError, match="brought 4 tokens instead of 5"):
        run_batch(core, made)  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [False, True])
def test_closing_the_steps_leaves_an_idle_engine(ahead: bool) -> None:
    core = ScriptedCore(ahead=ahead)
    log = steps(core, requests(OFF, 3, prompt=3, reply=50, vocab_size=50, seed=0))  # type: ignore[arg-type]
    for _ in range(4):
        next(log)
    assert core.has_work
    log.close()  # type: ignore[attr-defined]
    assert not core.has_work


@pytest.mark.parametrize("overlap", [False, True])
def test_a_real_engine_is_idle_after_a_closed_log(tiny_dir: Callable[..., Path], overlap: bool) -> None:
    core = make_core(tiny_dir(), overlap=overlap)
    log = steps(core, requests(K20, 3, prompt=9, reply=50, vocab_size=330, seed=0))
    for _ in range(4):
        next(log)
    log.close()  # type: ignore[attr-defined]
    core.check()
    stats = core.stats()
    assert (core.has_work, stats.running, stats.free_blocks) == (False, 0, stats.total_blocks)
    again = run_batch(core, requests(K20, 3, prompt=9, reply=50, vocab_size=330, seed=0))
    assert (len(again.times), again.traffic) == (49, Traffic(0, 0, 0))


def test_bytes_of_a_decode_step() -> None:
    config = SHAPES["qwen3-4b"]
    assert kv_bytes_per_token(config, 2) == 147_456
    assert decode_bytes(config, 2, rows=0, context=256) == 2 * 4_022_468_096
    assert decode_bytes(config, 2, rows=32, context=256) == 2 * 4_022_468_096 + 32 * 256 * 147_456


def test_embeddings_that_are_no_head_are_not_read() -> None:
    config = dataclasses.replace(SHAPES["qwen3-4b"], tie_word_embeddings=False)
    assert decode_bytes(config, 2, rows=0, context=1) == 2 * 4_022_468_096


def test_every_kernel_of_the_reduction_is_known_as_one() -> None:
    directory = Path(neper.ops.__file__).parent / "logprobs"
    names = [
        name
        for file in ("kernels.py", "set_kernels.py")
        for name in re.findall(r"^def (\w*kernel)\(", (directory / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(names) >= 4
    torch_names = [
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4>",
        "at::native::sbtopk::gatherTopK<f>",
    ]
    assert all(SCORING_KERNELS.fullmatch(name) for name in names + torch_names)
    others = ["nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "norm_kernel", "best_kernel", "Memcpy DtoH (Device -> Pinned)"]
    assert not any(SCORING_KERNELS.fullmatch(name) for name in others)


def test_a_profile_counts_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    core = ScriptedCore(ahead=True)
    begun: list[int] = []

    class Profile:
        def __init__(self, activities: object, acc_events: bool) -> None: ...

        def __enter__(self) -> Profile:
            begun.append(core.number)
            return self

        def __exit__(self, *_: object) -> None:
            begun.append(core.number)

        def events(self) -> list[SimpleNamespace]:
            def event(name: str, where: str, note: bool = False) -> SimpleNamespace:
                return SimpleNamespace(name=name, device_type=SimpleNamespace(name=where), is_user_annotation=note)

            once = [
                event("read_kernel", "CUDA"),
                *[event("norm_kernel", "CUDA")] * 3,
                event("step", "CUDA", note=True),
                event("cuLaunchKernelEx", "CPU"),
                event("cudaGraphLaunch", "CPU"),
                event("cudaMemcpyAsync", "CPU"),
                event("aten::copy_", "CPU"),
            ]
            return once * (begun[1] - begun[0])

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    made = requests(K20, 2, prompt=3, reply=40, vocab_size=50, seed=0)
    profile = engine_probes.profile_steps(core, made, 5)  # type: ignore[arg-type]
    assert begun[1] - begun[0] == 5
    assert profile.kernels == {"norm_kernel": 3, "read_kernel": 1}
    assert profile.calls == {"cuLaunchKernelEx": 1, "cudaGraphLaunch": 1, "cudaMemcpyAsync": 1}
    assert (profile.scoring, profile.launches) == ({"read_kernel": 1}, 2)
    assert not core.has_work


def test_graphs_are_replayed_in_the_middle_of_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    core = ScriptedCore(ahead=True)
    made = requests(OFF, 2, prompt=3, reply=40, vocab_size=50, seed=0)
    asked: list[tuple[int, int | None]] = []
    replayed: list[int] = []

    def decode_replay(rows: int, top_k: int | None) -> Callable[[], None]:
        asked.append((rows, top_k))

        def replay() -> None:
            core.now += 0.5
            replayed.append(core.number)

        return replay

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    assert engine_probes.replay_seconds(core, made, None, after=20, replays=4) is None  # type: ignore[arg-type]
    core.runner.graphs, core.runner.decode_replay = object(), decode_replay
    seconds = engine_probes.replay_seconds(core, made, None, after=20, replays=4, clock=core.clock)  # type: ignore[arg-type]
    assert (seconds, asked) == (0.5, [(2, None)])
    # Call 0 launches the prefill, 1 brings it, and 2 brings the first decode step: the 20th comes with call 21.
    assert replayed == [22] * 7
    assert not core.has_work
