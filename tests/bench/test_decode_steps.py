"""`benchmarks/decode_steps`: probes on a scripted engine, a report of made-up samples, and a run with a tiny model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks import decode_steps
from benchmarks.decode_steps import SCORING_KERNELS, Findings, StepProfile, report, running

import neper.ops
from neper.bench.engine_cases import OFF, QUICK, Case, requests
from neper.bench.engine_drive import Traffic, run_batch
from neper.bench.report import Figure, Series, markdown, read
from neper.engine import settings
from tests.bench.scripted_core import ScriptedCore
from tests.bench.test_engine_report import rows_of
from tests.helpers.engine import make_core

K20 = Case(20)


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_that_are_left_leave_an_idle_engine(ahead: bool) -> None:
    core = ScriptedCore(ahead=ahead)
    with running(core, requests(OFF, 3, prompt=3, reply=50, vocab_size=50, seed=0)) as log:  # type: ignore[arg-type]
        next(log)
        assert core.has_work
    assert not core.has_work


@pytest.mark.parametrize("overlap", [False, True])
def test_a_real_engine_is_idle_after_steps_that_are_left(tiny_dir: Callable[..., Path], overlap: bool) -> None:
    core = make_core(tiny_dir(), overlap=overlap)
    with running(core, requests(K20, 3, prompt=9, reply=50, vocab_size=330, seed=0)) as log:
        next(log)
    core.check()
    stats = core.stats()
    assert (core.has_work, stats.running, stats.free_blocks) == (False, 0, stats.total_blocks)
    again = run_batch(core, requests(K20, 3, prompt=9, reply=50, vocab_size=330, seed=0))
    assert (len(again.times), again.traffic) == (49, Traffic(0, 0, 0))


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
    profile = decode_steps.profile_steps(core, made, 5)  # type: ignore[arg-type]
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
    assert decode_steps.replay_seconds(core, made, None, after=20, replays=4) is None  # type: ignore[arg-type]
    core.runner.graphs, core.runner.decode_replay = object(), decode_replay
    seconds = decode_steps.replay_seconds(core, made, None, after=20, replays=4, clock=core.clock)  # type: ignore[arg-type]
    assert (seconds, asked) == (0.5, [(2, None)])
    # Call 0 launches the prefill, 1 brings it, and 2 brings the first decode step: the 20th comes with call 21.
    assert replayed == [22] * 7
    assert not core.has_work


def test_the_report_of_made_up_samples() -> None:
    found = Findings()
    found.overhead[1] = Series("whole", "ms", [3.4, 3.5]), Series("alone", "ms", [3.35, 3.4])
    found.profiles[32, OFF] = StepProfile({"norm_kernel": 72.0}, {"cudaGraphLaunch": 2.0, "cudaMemcpyAsync": 1.0})
    found.profiles[32, K20] = StepProfile({"norm_kernel": 72.0, "read_kernel": 1.0}, {"cudaGraphLaunch": 2.0})
    found.differences["tokens that differ"] = 1.0
    made = report("title", {}, found)
    figures = {figure.name: figure for figure in made.figures}
    overhead = figures["decode step / its graphs alone, 1 rows"]
    assert (overhead.value, overhead.met) == (pytest.approx((3.4 / 3.35 + 3.5 / 3.4) / 2), True)
    assert figures["tokens that differ"] == Figure("tokens that differ", 1.0, "0", False)
    text = markdown(made)
    assert rows_of(text, "32", "off", "72") == [
        ["32", "off", "72", "2", "none", "cudaGraphLaunch x 2, cudaMemcpyAsync x 1"]
    ]
    assert rows_of(text, "32", "k=20", "73")[0][4] == "read_kernel x 1"
    assert rows_of(text, "read_kernel") == [["read_kernel", "1"]]
    assert [series.name for series in made.series] == ["whole", "alone"]


def test_a_quick_run_on_a_cpu(
    tiny_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings, "choose_threads", lambda _: 1)
    decode_steps.run(str(tmp_path), QUICK, str(tiny_dir("llama")), None, "cpu")
    text = capsys.readouterr().out
    (written,) = tmp_path.glob("steps-cpu-*.md")
    assert written.read_text(encoding="utf-8") == text
    differences = [row for row in rows_of(text) if row[0].startswith("off, k=20, off")]
    assert len(differences) == 3 * len(QUICK.concurrency)
    assert all(row[1:] == ["0.000", "0", "yes"] for row in differences)
    for left_out in ("overhead was left out", "the kernels of a step were left out"):
        assert left_out in text


@pytest.mark.gpu
def test_a_quick_run_on_a_gpu(tmp_path: Path) -> None:
    decode_steps.run(str(tmp_path), QUICK, None, "qwen3-0.6b", "cuda")
    (written,) = tmp_path.glob("steps-*-qwen3-0-6b.json")
    made = read(written)
    assert all(figure.value == 0 for figure in made.figures if figure.bound == "0"), made.figures
    steps = {row[1]: row for row in made.tables[1].rows if row[0] == 8}
    assert steps["off"][2] > 0
    assert steps["off"][4] == "none"
    assert steps["k=20"][4] != "none"
    torch.cuda.empty_cache()
