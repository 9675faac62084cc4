"""`neper bench kernels` without a GPU: inputs, a report of made-up samples, and a run with a stand-in for CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import kernels as developers
from typer.testing import CliRunner

from neper.bench import device_time, kernel_report, kernels
from neper.bench.kernel_cases import FULL, QUICK, Case, Plan, SetCase, random_logits, random_sets
from neper.bench.kernel_report import series_name
from neper.bench.kernels import BASELINES
from neper.bench.report import Series, markdown
from neper.cli import app
from neper.errors import NeperError

WAYS = (*BASELINES, developers.COMPILED)
TINY = Plan(
    row_cases=(Case(2, 5, 3000, goal=8), Case(9, 0, 3000, torch.float32)),
    set_rows=Case(3, 5, 3000),
    set_cases=(SetCase("allowed", 0), SetCase("allowed", 40), SetCase("logprob_token_ids", 100)),
    host_cases=(Case(2, 5, 3000),),
    rounds=3,
    copy_bytes=2**20,
)


def test_the_plans_hold_the_goals_and_the_quick_one_is_part_of_the_full_one() -> None:
    goals = {(case.rows, case.top_k): case.goal for case in FULL.row_cases if case.goal is not None}
    assert goals == {(1, 20): 8, (8, 20): 9, (32, 20): 11, (1024, 20): 110, (1024, 5): 100}
    assert set(QUICK.row_cases) < set(FULL.row_cases)
    assert set(QUICK.set_cases) < set(FULL.set_cases)
    assert FULL.rounds >= 7
    assert len({str(case) for case in FULL.row_cases}) == len(FULL.row_cases)


def test_inputs_are_the_same_in_every_run() -> None:
    case = Case(2, 5, 3000)
    first, second = (random_logits(case, torch.Generator().manual_seed(0)) for _ in range(2))
    assert torch.equal(first, second)
    assert (first.shape, first.dtype) == ((2, 3000), torch.bfloat16)
    assert 2.8 < float(first.float().std()) < 3.2
    sets = random_sets(case, 40, torch.Generator().manual_seed(0))
    assert [len(ids.unique()) for ids in sets] == [40, 40]
    assert all(torch.equal(ids, ids.sort().values) for ids in sets)


def test_graphs_read_a_bounded_number_of_bytes_and_cold_ones_all_inputs() -> None:
    l2 = 60 * 2**20
    small, large = FULL.row_cases[0].nbytes, FULL.row_cases[3].nbytes
    assert device_time.warm_calls(small) == 50
    assert 5 <= device_time.warm_calls(large) < 20
    assert device_time.cold_inputs(large, l2) == 1
    inputs = device_time.cold_inputs(small, l2)
    assert inputs * small >= 4 * l2
    assert device_time.cold_calls(small, inputs) == inputs
    medium = FULL.row_cases[2].nbytes
    inputs = device_time.cold_inputs(medium, l2)
    assert device_time.cold_calls(medium, inputs) % inputs == 0
    assert device_time.cold_calls(medium, inputs) >= 50


def samples(plan: Plan, neper: float) -> dict[str, Series]:
    """Made-up samples of a run in which every baseline takes ten times as long as neper."""
    found: dict[str, Series] = {}

    def add(name: str, value: float) -> None:
        found[name] = Series(name, "us", [value * 0.99, value, value * 1.01])

    add("copy", 2 * plan.copy_bytes / 4.25e6)
    for case in plan.row_cases:
        for state in ("warm", "cold"):
            add(series_name(case, state, "neper"), neper)
            for way in BASELINES:
                add(series_name(case, state, way), 10 * neper)
    for set_case in plan.set_cases:
        add(series_name(plan.set_rows, "warm", str(set_case)), neper)
    for case in plan.host_cases:
        add(series_name(case, "wall clock", "host"), 900.0)
        add(series_name(case, "wall clock", "device"), 40.0)
    return found


def cells(markdown: str, first: str) -> list[str]:
    """The cells of the first table row that begins with `first`."""
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_report_of_made_up_samples() -> None:
    report = kernel_report.report("NVIDIA H200", {"driver": "1.2"}, samples(FULL, 8.0), ["a note"], FULL, WAYS)
    text = markdown(report)
    assert text.startswith(
        "# neper's reduction on NVIDIA H200\n\n- driver: 1.2\n- copy: 4.25 TB/s read and written, ±1.0%"
    )
    row = cells(text, "R=32 k=20 V=151,936 bfloat16")
    speed = 32 * 151_936 * 2 / 8.0 / 1e6
    assert row[1:5] == ["8.0", "±1.0%", f"{speed:.2f}", f"{speed / 4.25:.0%}"]
    assert row[5:] == ["80.0 (10.0 x)", "80.0 (10.0 x)", "not measured"]
    assert cells(text, "R=1 k=20 V=151,936 bfloat16, warm, us")[1:] == ["8.000", "<= 8", "yes"]
    assert cells(text, "allowed: 1,000 ids")[1:] == ["8.0", "±1.0%"]
    host = [line for line in text.splitlines() if "scanned by torch" in line or "neper's scores" in line]
    assert [line.strip("| ").split("|")[-1].strip() for line in host] == ["496,640", "172", "993,280", "172"]
    assert "- a note\n" in text
    assert Series("R=1 k=20 V=151,936 bfloat16, warm: neper", "us", [7.92, 8.0, 8.08]) in report.series


def test_what_is_never_cold_is_left_out() -> None:
    found = {name: s for name, s in samples(FULL, 12.0).items() if "cold" not in name}
    text = markdown(kernel_report.report("NVIDIA H200", {}, found, [], FULL, WAYS))
    assert "not in the L2" not in text
    assert cells(text, "R=32 k=20 V=151,936 bfloat16, warm, us")[1:] == ["12.000", "<= 11", "no"]


@pytest.mark.parametrize("card", ["NVIDIA A10", "NVIDIA GH200 480GB"])
def test_other_cards_are_told_whose_bound_it_is(card: str) -> None:
    text = markdown(kernel_report.report(card, {}, samples(FULL, 8.0), [], FULL, WAYS))
    assert cells(text, "R=1 k=20 V=151,936 bfloat16, warm, us")[2] == f"<= 8 on an H200; this is {card}"


class HostReplay:
    """device_time.Replay without a device."""

    def __init__(self, call: Callable[[int], Any], calls: int) -> None:
        self.call, self.calls, self.why_not_captured = call, min(calls, 2), ""

    def run(self) -> None:
        for i in range(self.calls):
            self.call(i)

    def sample(self) -> float:
        start = time.perf_counter()
        self.run()
        return (time.perf_counter() - start) * 1e6 / self.calls


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA Test", total_memory=2**34, L2_cache_size=2**14)
    monkeypatch.setattr(kernels, "gpu", lambda device: torch.device("cpu"))
    monkeypatch.setattr(kernels, "Replay", HostReplay)
    monkeypatch.setattr(kernels, "QUICK", TINY)
    for name in ("set_device", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: card.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(kernels, "_driver_version", lambda: "1.2")


@pytest.mark.usefixtures("pretended_gpu")
def test_a_run_measures_every_case_and_writes_both_files(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.stdout == (tmp_path / "kernels-nvidia-test.md").read_text(encoding="utf-8")
    data = json.loads((tmp_path / "kernels-nvidia-test.json").read_bytes())
    for series in data["series"]:
        assert len(series["samples"]) == TINY.rounds, series["name"]
    # The small case fits four times into what must be larger than the L2, the large one does not.
    names = {series["name"] for series in data["series"]}
    assert {series_name(TINY.row_cases[0], state, "neper") for state in ("warm", "cold")} <= names
    assert series_name(TINY.row_cases[1], "cold", "neper") not in names
    assert len(names) == 1 + 2 * 3 + 1 * 3 + 3 + 2
    assert "R=9 k=0 V=3,000 float32 ...\n" in result.stderr


@pytest.mark.usefixtures("pretended_gpu")
def test_a_wrong_result_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.token_logprobs

    def wrong(*args: Any, **kwargs: Any) -> Any:
        scores = right(*args, **kwargs)
        scores.rank.add_(1)
        return scores

    monkeypatch.setattr(kernels, "token_logprobs", wrong)
    result = CliRunner().invoke(app, ["bench", "kernels", "--quick"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "neper: error: wrong result, nothing is timed: R=2 k=5 V=3,000 bfloat16: rank[0] is " in result.stderr


@pytest.mark.usefixtures("pretended_gpu")
def test_calls_that_change_their_bits_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disturbed(HostReplay):
        def run(self) -> None:
            scores = self.call(0)
            if hasattr(scores, "valid"):
                scores.logprob.add_(1e-6)

    monkeypatch.setattr(kernels, "Replay", Disturbed)
    result = CliRunner().invoke(app, ["bench", "kernels", "--quick"])
    assert result.exit_code == 1
    assert "differ from the same call alone" in result.stderr


@pytest.mark.usefixtures("pretended_gpu")
def test_a_baseline_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no memory\nhere")

    class Launched(HostReplay):
        def __init__(self, call: Callable[[int], Any], calls: int) -> None:
            call(0)
            super().__init__(call, calls)

    monkeypatch.setattr(kernels, "Replay", Launched)
    monkeypatch.setitem(BASELINES, WAYS[1], fails)
    result = CliRunner().invoke(app, ["bench", "kernels", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    notes = json.loads((tmp_path / "kernels-nvidia-test.json").read_bytes())["notes"]
    failures = [note for note in notes if "no memory" in note]
    assert failures == [f"{case}: {WAYS[1]} was left out: RuntimeError: no memory" for case in TINY.row_cases]


@pytest.mark.usefixtures("pretended_gpu")
def test_what_is_compiled_is_measured_for_developers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter(("6.5\n", "1.0\n"))
    monkeypatch.setattr(
        developers.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, next(times), "")
    )
    monkeypatch.setattr(torch, "compile", lambda reduce, **_: reduce)
    kernels.measure(developers.CompiledToo, None, "cuda", True)
    text = capsys.readouterr().out
    assert all("x)" in cells(text, str(case))[-1] for case in TINY.row_cases)
    assert cells(text, "compile all kernels, cold cache, s")[1:] == ["6.500", "<= 8", "yes"]
    assert cells(text, "compile all kernels, warm cache, s")[1:] == ["1.000", "< 1", "no"]


@pytest.mark.usefixtures("pretended_gpu")
def test_a_compiler_that_fails_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no compiler\nhere")

    class Launched(HostReplay):
        def __init__(self, call: Callable[[int], Any], calls: int) -> None:
            call(0)
            super().__init__(call, calls)

    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: no such device\n")
    monkeypatch.setattr(developers.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(kernels, "Replay", Launched)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: fails)
    kernels.measure(developers.CompiledToo, None, "cuda", True)
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if "no compiler" in line] == [
        f"- {TINY.row_cases[0]}: {developers.COMPILED} was left out: RuntimeError: no compiler"
    ]
    assert "- compile times were not measured: RuntimeError: no such device\n" in text
    assert "compile all" not in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error is about a machine without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = subprocess.run([sys.executable, "-m", "neper", "bench", "kernels"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("neper: error: bench kernels needs a GPU: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("device", ["cpu", "nonsense", "cuda:x"])
def test_a_device_that_is_no_gpu_is_refused(device: str) -> None:
    with pytest.raises(NeperError, match=f"--device must be cuda or cuda:N, not {device}"):
        kernels.gpu(device)
