"""`neper bench engine`: its cases, and real runs with tiny models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from neper.bench import engine, engine_rig
from neper.bench.engine import Measurement
from neper.bench.engine_cases import FULL, OFF, OFF_AGAIN, PARTS, QUICK, SAMPLED_OFF, Case, prompt_request, requests
from neper.bench.engine_report import DECODE
from neper.bench.report import read
from neper.bench.subject import Subject, choose
from neper.cli import app
from neper.engine import settings
from neper.errors import NeperError, StartupError
from neper.models.shapes import SHAPES
from tests.bench.small import SMALL
from tests.bench.test_engine_report import rows_of

K20 = Case(20)


def test_cases_and_their_requests() -> None:
    assert [str(case) for case in FULL.cases] == [
        "off", "k=0", "k=1", "k=5", "k=20", "off, sampled", "k=20, sampled", "off again"
    ]  # fmt: skip
    assert str(Case(20, asking=1)) == "k=20 for 1"
    plain, scored = (requests(case, 3, prompt=9, reply=4, vocab_size=50, seed=7) for case in (OFF, K20))
    assert [r.prompt_token_ids for r in plain] == [r.prompt_token_ids for r in scored]
    assert len({tuple(r.prompt_token_ids) for r in plain}) == 3
    assert all(len(r.prompt_token_ids) == 9 and max(r.prompt_token_ids) < 50 for r in plain)
    uneven = requests(OFF, 2, prompt=(3, 5), reply=4, vocab_size=50, seed=7)
    assert [len(r.prompt_token_ids) for r in uneven] == [3, 5]
    assert plain[0].prompt_token_ids != requests(OFF, 1, prompt=9, reply=4, vocab_size=50, seed=8)[0].prompt_token_ids
    assert {(r.logprobs.top_k, r.sampling.greedy, r.sampling.ignore_eos) for r in scored} == {(20, True, True)}
    asking = requests(Case(5, asking=1), 3, prompt=9, reply=4, vocab_size=50, seed=7)
    assert [r.logprobs.top_k for r in asking] == [5, None, None]
    sampled = requests(SAMPLED_OFF, 1, prompt=9, reply=4, vocab_size=50, seed=7)[0].sampling
    assert (sampled.temperature, sampled.top_p, sampled.max_tokens) == (0.8, 0.95, 4)
    prompt = prompt_request(30, 5, vocab_size=50, seed=1)
    assert (len(prompt.prompt_token_ids), prompt.logprobs.prompt_top_k, prompt.logprobs.top_k) == (30, 5, None)
    assert prompt.sampling.max_tokens == 1


def test_the_full_plan_is_the_promised_matrix() -> None:
    assert (FULL.concurrency, FULL.top_ks, FULL.prompt, FULL.reply) == ((1, 8, 32, 64), (0, 1, 5, 20), 128, 256)
    assert (FULL.mixed, FULL.prompt_lengths, FULL.memory_length) == ((8, 32), (1024, 8192), 32_768)
    assert [str(case) for case in FULL.lengths] == ["1 x 32,000", "8 x 16,000", "32 x 8,000", "1 x 38,000 + 31 x 200"]
    assert FULL.rounds >= 5
    assert FULL.cases[0] == OFF
    assert FULL.cases[-1] == OFF_AGAIN


def test_a_plan_is_fitted_to_the_model_and_to_what_was_asked_for() -> None:
    plan = FULL.fitted(max_model_len=8192, rounds=1, concurrency=(1, 8))
    assert (plan.rounds, plan.host_rounds, plan.concurrency) == (1, 1, (1, 8))
    assert plan.mixed == (8,)
    assert (plan.prompt_lengths, plan.memory_length) == ((1024,), 0)
    assert [str(case) for case in plan.lengths] == ["32 x 8,000"]
    assert FULL.fitted(max_model_len=40_960) == FULL


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "engine", "--device", "cpu", "--dtype", "float32", *arguments])


@pytest.fixture
def tiny(tiny_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> str:
    """The directory of a tiny model, which one thread computes faster than several."""
    monkeypatch.setattr(settings, "choose_threads", lambda _: 1)
    return str(tiny_dir("llama"))


@pytest.mark.slow
def test_a_quick_run_on_a_cpu(tiny: str, tmp_path: Path) -> None:
    result = bench("--model", tiny, "--quick", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    (written,) = tmp_path.glob("engine-cpu-*.json")
    assert result.stdout == written.with_suffix(".md").read_text(encoding="utf-8")
    data = json.loads(written.read_bytes())
    series = {s["name"]: s["samples"] for s in data["series"]}
    for count in QUICK.concurrency:
        for case in QUICK.cases:
            assert len(series[f"device, {count} at a time, {case}: TPOT"]) == QUICK.rounds
            assert len(series[f"host, {count} at a time, {case}: TPOT"]) == QUICK.host_rounds
    assert len(series["mixed, 8 at a time, k=20 for 1: TPOT"]) == QUICK.rounds
    assert len(series["prompt of 256, scored"]) == 2 * QUICK.rounds
    assert all(value > 0 for samples in series.values() for value in samples)
    # Both are of the same batch, whose seconds hold 14 steps from the first decode step's results on, and the prefill.
    for tpot, rate in zip(
        series["device, 8 at a time, k=20: TPOT"], series["device, 8 at a time, k=20: tokens"], strict=True
    ):
        assert rate < 8 * 16 / (14 * tpot / 1e3)
    assert {figure["name"] for figure in data["figures"]} >= {
        "TPOT / off: device, 8 at a time, k=20",
        "TPOT / off: mixed, 8 at a time, k=20 for 1",
        "prompt of 256: scored / plain",
    }
    notes = " ".join(data["notes"])
    assert "floor was left out" in notes
    assert "lengths was left out" in notes
    assert "device: round 2 of 2, 8 at a time ...\n" in result.stderr


def test_some_parts_at_some_sizes(tiny: str) -> None:
    result = bench("--model", tiny, "--quick", "--parts", "matrix", "--concurrency", "2", "--rounds", "1")
    assert result.exit_code == 0, result.output
    assert rows_of(result.stdout, "2", "k=20")[0][-2:] == ["16", "1"]
    assert "A prompt with" not in result.stdout
    assert "computed on the host" not in result.stdout


def test_a_shape_needs_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "choose_threads", lambda _: 1)
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", SMALL)
    result = bench("--shape", "qwen3-0.6b", "--quick", "--parts", "mixed")
    assert result.exit_code == 0, result.output
    assert "- model: qwen3-0.6b, random weights, float32\n" in result.stdout
    assert rows_of(result.stdout, "8", "k=20 for 1")[0][-1] == "2"


def test_after_the_time_limit_nothing_new_is_begun(tiny: str, tmp_path: Path) -> None:
    result = bench("--model", tiny, "--quick", "--time-limit", "0", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    for part in PARTS:
        if part not in ("floor", "lengths"):  # which a CPU has not
            assert f"- {part} was left out or cut short by the time limit\n" in result.stdout
    assert "nothing was measured" in result.stdout


def test_the_time_limit_keeps_complete_rounds(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = len(QUICK.cases)
    # A check for the engine and one for each batch: of the warm-up, two rounds, and half of another.
    left = iter([False] * (1 + 3 * cases + cases // 2) + [True] * 100)

    def check_time(rig: engine_rig.Rig) -> None:
        if next(left):
            raise engine_rig.OutOfTime

    monkeypatch.setattr(engine_rig.Rig, "check_time", check_time)
    result = bench("--model", tiny, "--quick", "--parts", "matrix", "--concurrency", "1", "--rounds", "5")
    assert result.exit_code == 0, result.output
    assert "- matrix was left out or cut short" in result.stdout
    assert rows_of(result.stdout, "1", "k=20")[0][-1] == "2"


def test_an_interrupted_run_keeps_what_it_has(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Measurement) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Measurement, "mixed", interrupted)
    arguments = ["--quick", "--parts", "matrix,mixed,prompt", "--concurrency", "1", "--rounds", "1"]
    result = bench("--model", tiny, *arguments, "--out", str(tmp_path))
    assert result.exit_code == 130
    assert rows_of(result.stdout, "1", "k=20")
    assert result.stdout.endswith("- the run was interrupted in mixed\n")
    (written,) = tmp_path.glob("*.json")
    assert json.loads(written.read_bytes())["notes"] == ["the run was interrupted in mixed"]


def test_a_part_that_fails_does_not_take_the_others_with_it(
    tiny: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = Measurement.matrix

    def fails(parts: Measurement) -> None:
        original(parts)
        raise RuntimeError("no such kernel\nat all")

    monkeypatch.setattr(Measurement, "matrix", fails)
    result = bench("--model", tiny, "--quick", "--parts", "matrix,prompt", "--concurrency", "1,8", "--rounds", "1")
    assert result.exit_code == 1
    assert "- matrix failed: RuntimeError: no such kernel\n" in result.stdout
    assert rows_of(result.stdout, "1", "k=20")
    assert rows_of(result.stdout, "256")[0][-1] == "2"
    assert "neper: error: matrix failed; the notes of the report say how\n" in result.stderr
    assert "no such kernel" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": "m", "shape": "qwen3-4b"}, "give --model or --shape, not both"),
        ({"shape": "qwen9", "device": "cpu"}, "no shape 'qwen9'"),
        ({"device": "cuda:99"}, "cuda:99 was asked for"),
        ({"dtype": "int8"}, "dtype must be float32 or bfloat16"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(NeperError, match=re.escape(says)):
        engine.run(choose("bench engine", **arguments), None)


def test_a_part_that_there_is_not() -> None:
    with pytest.raises(StartupError, match="no part 'all'; there are matrix, mixed"):
        engine.run(choose("bench engine"), None, parts=("matrix", "all"))


def test_a_context_that_is_too_short_is_refused(tiny: str, tmp_path: Path) -> None:
    plan = QUICK.fitted(max_model_len=512)
    source = SimpleNamespace(name="m", model_max_length=40, config=None)
    subject = Subject("m", None, torch.device("cpu"), torch.float32)
    rig = engine_rig.Rig(subject, source, None, plan, lambda *_: None)  # type: ignore[arg-type]
    with pytest.raises(StartupError, match="prompt and reply take 257 tokens, and m has a context of 40"):
        rig.engine("device")


@pytest.mark.parametrize("sizes", ["0", "1,x", "", "-3,4"])
def test_sizes_that_are_none(sizes: str) -> None:
    result = bench("--concurrency", sizes)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is no list of numbers from 1" in result.stderr


def test_help_names_every_part_and_imports_no_torch() -> None:
    code = (
        "import sys, neper.cli\n"
        "try: neper.cli.app(['bench', 'engine', '--help'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.splitlines()[-1] == "False"
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in lines if line and line[0] in PARTS] == list(PARTS)


@pytest.fixture
def gpu() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_a_quick_run_on_a_gpu(tmp_path: Path) -> None:
    subject = choose("bench engine", shape="qwen3-0.6b", device="cuda", dtype="bfloat16")
    engine.run(subject, str(tmp_path), quick=True)
    (written,) = tmp_path.glob("engine-*-qwen3-0-6b.json")
    made = read(written)
    tables = {table.title: table.rows for table in made.tables}
    device, host = ({(row[0], row[1]): row for row in tables[DECODE[group]]} for group in ("device", "host"))
    assert device[8, "off"][7:10] == [1, 8 * 8, 1]
    assert device[8, "k=20"][7:10] == [1, 8 * 172, 1]
    assert host[8, "k=20"][8] > 8 * 151_936 * 2
    assert device[8, "off"][10] * 2**30 > 2 * 596_049_920
    assert tables["A decode step against reading its weights, keys and values once"][0][1] > 0
    assert any("GiB more when scored" in figure.name for figure in made.figures)
