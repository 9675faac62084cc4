"""Runs over files: resumed, refused, interrupted, on a full disk."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import neper
from neper import LLM
from neper.config import EngineConfig, ScoreConfig
from neper.errors import ConfigError, NeperError, StartupError
from neper.score import run as run_module
from neper.score.output import Output
from neper.score.row import Row, ScoredRow
from neper.score.run import SOME_FAILED, fingerprint, run

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "then", "Hello", "world", "answer"]
WINDOW = 25


def texts(count: int) -> list[str]:
    """Different ones, of 2 to 30 words; every hundredth is empty."""
    chosen = random.Random(7)
    drawn = [" ".join(chosen.choices(WORDS, k=chosen.randint(2, 30))) for _ in range(count)]
    return ["" if number % 100 == 50 else text for number, text in enumerate(drawn)]


def write_rows(path: Path, count: int) -> Path:
    rows = [{"id": number, "text": text} for number, text in enumerate(texts(count))]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=400)
    elif path.suffix == ".csv":
        path.write_text("".join(["id,text\n", *(f"{row['id']},{row['text']}\n" for row in rows)]))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def engine(model_dir: Path) -> EngineConfig:
    return EngineConfig(model=str(model_dir), dtype="float32", num_threads=1, max_num_batched_tokens=64)


@pytest.fixture
def score(engine: EngineConfig, llm: LLM) -> Callable[..., int]:
    """`run` with the LLM of the tests, which it does not load again."""

    def score(source: Path, out: Path | None = None, prefix: str = "", **settings: Any) -> int:
        return run(source, out, None, prefix, ScoreConfig(**settings), engine, lambda engine: llm)

    return score


class MadeUpScorer:
    """In place of the scorer: windows of 25 rows, with scores that depend on the text alone."""

    def __init__(self, llm: LLM, config: ScoreConfig) -> None:
        """Nothing is needed of them."""

    def score(self, rows: Iterator[Row]) -> Iterator[list[ScoredRow]]:
        while window := list(islice(rows, WINDOW)):
            yield [self._scored(row) for row in window]

    @staticmethod
    def _scored(row: Row) -> ScoredRow:
        size = len(row.values["text"])
        scores = {"logprob": -size / 7, "num_tokens": size, "perplexity": 2.0, "bits_per_byte": 1.0}
        return ScoredRow(row, scores) if size else ScoredRow(row, None, "text is empty")


@pytest.fixture
def made_up(score: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`score` with made up scores."""
    monkeypatch.setattr(run_module, "Scorer", MadeUpScorer)
    return score


def command(engine: EngineConfig, source: Path, *options: str) -> list[str]:
    flags = ["--model", engine.model, "--dtype", "float32", "--num-threads", "1", "--max-num-batched-tokens", "256"]
    return [sys.executable, "-m", "neper", "score", str(source), *flags, *options]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class Killed(BaseException):
    """In place of a signal that ends the process."""


def test_rows_keep_their_columns_and_get_scores(tmp_path: Path, score: Callable[..., int], llm: LLM) -> None:
    source = write_rows(tmp_path / "a.jsonl", 120)
    assert score(source) == SOME_FAILED
    rows = [json.loads(line) for line in (tmp_path / "a.scored.jsonl").read_text().splitlines()]
    want = [(number, text) for number, text in enumerate(texts(120)) if text]
    assert [(row["id"], row["text"]) for row in rows] == want
    scored = [found.scores for found in neper.score_dataset(source, llm=llm) if found.scores]
    assert [{name: row[name] for name in scored[0]} for row in rows] == scored
    errors = (tmp_path / "a.scored.errors.jsonl").read_text()
    assert errors == '{"row":51,"error":"text is empty"}\n'
    assert files(tmp_path) == {"a.jsonl", "a.scored.jsonl", "a.scored.errors.jsonl"}


def test_without_failures_there_is_no_file_of_errors(tmp_path: Path, score: Callable[..., int]) -> None:
    assert score(write_rows(tmp_path / "a.jsonl", 20)) == 0
    assert files(tmp_path) == {"a.jsonl", "a.scored.jsonl"}


class Disk:
    """The files of a folder, put back to what they were when the process was killed."""

    def __init__(self, folder: Path, kept: Path) -> None:
        self._folder = folder
        self._kept = kept

    def kill(self) -> None:
        shutil.rmtree(self._kept, ignore_errors=True)
        shutil.copytree(self._folder, self._kept)
        raise Killed

    def restore(self) -> None:
        shutil.rmtree(self._folder)
        shutil.copytree(self._kept, self._folder)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    (tmp_path / "work").mkdir()
    return Disk(tmp_path / "work", tmp_path / "kept")


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_run_that_is_killed_anywhere_goes_on(
    tmp_path: Path, made_up: Callable[..., int], monkeypatch: pytest.MonkeyPatch, disk: Disk, ending: str
) -> None:
    """Killed at the flushes of its files in turn, when half of what they flush was written."""
    source = write_rows(tmp_path / f"work/a.{ending}", 400)
    whole, out = tmp_path / f"whole.{ending}", tmp_path / f"work/out.{ending}"
    made_up(source, whole)
    left = 0
    sizes: dict[str, int] = {}

    def sync(file: Any) -> None:
        nonlocal left
        file.flush()
        left -= 1
        name, size = str(file.name), os.fstat(file.fileno()).st_size
        if left == 0:
            os.truncate(name, (size + min(size, sizes.get(name, 0))) // 2)
            disk.kill()
        sizes[name] = size

    monkeypatch.setattr("neper.score.journal.sync", sync)
    monkeypatch.setattr("neper.score.output.sync", sync)
    kills = 0
    for place in (1, 2, 3, 4, 5, 6, 2, 7, 3, 5, 0):
        left = place
        try:
            assert made_up(source, out) == SOME_FAILED
        except Killed:
            kills += 1
            disk.restore()
    assert kills == 10
    assert out.read_bytes() == whole.read_bytes()
    assert out.with_name("out.errors.jsonl").read_bytes() == (tmp_path / "whole.errors.jsonl").read_bytes()
    assert files(out.parent) == {source.name, out.name, "out.errors.jsonl"}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("moment", ["replace", "unlink"])
def test_a_run_that_is_killed_while_it_finishes_goes_on(
    tmp_path: Path,
    made_up: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    disk: Disk,
    ending: str,
    moment: str,
) -> None:
    source = write_rows(tmp_path / f"work/a.{ending}", 30)
    out = tmp_path / f"work/out.{ending}"
    made_up(source, tmp_path / f"whole.{ending}")
    with monkeypatch.context() as patched:
        patched.setattr(Path, moment, lambda *arguments, **options: disk.kill())
        with pytest.raises(Killed):
            made_up(source, out)
    disk.restore()
    monkeypatch.setattr(run_module, "_score", None)  # nothing is left to score
    assert made_up(source, out) == 0
    assert out.read_bytes() == (tmp_path / f"whole.{ending}").read_bytes()
    assert files(out.parent) == {source.name, out.name}


def kill_and_resume(tmp_path: Path, engine: EngineConfig, ending: str, rows: int, kills: int) -> None:
    source = write_rows(tmp_path / f"a.{ending}", rows)
    whole, out = tmp_path / f"whole.{ending}", tmp_path / f"out.{ending}"
    options = ["--top", "1", "--out"]
    assert subprocess.run([*command(engine, source, *options, str(whole))], stderr=subprocess.DEVNULL).returncode == 3
    part = out.with_name(out.name + ".part")
    chosen = random.Random(rows)
    done = 0
    for kill in range(kills):
        process = subprocess.Popen(command(engine, source, *options, str(out)), stderr=subprocess.DEVNULL)
        wanted = done + whole.stat().st_size // (kills + 2)
        while process.poll() is None and (not part.exists() or part.stat().st_size < wanted):
            time.sleep(0.002)
        time.sleep(chosen.random() / 50)
        assert process.poll() is None, f"it ended before kill {kill}"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not out.exists()
        done = part.stat().st_size
    assert subprocess.run(command(engine, source, *options, str(out)), stderr=subprocess.DEVNULL).returncode == 3
    assert out.read_bytes() == whole.read_bytes()
    assert (tmp_path / "out.errors.jsonl").read_bytes() == (tmp_path / "whole.errors.jsonl").read_bytes()


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on(tmp_path: Path, engine: EngineConfig) -> None:
    kill_and_resume(tmp_path, engine, "jsonl", rows=1500, kills=1)


@pytest.mark.full
@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_ten_thousand_rows_killed_three_times(tmp_path: Path, engine: EngineConfig, ending: str) -> None:
    kill_and_resume(tmp_path, engine, ending, rows=10_000, kills=3)


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(tmp_path: Path, engine: EngineConfig) -> None:
    source = write_rows(tmp_path / "a.jsonl", 3000)
    process = subprocess.Popen(command(engine, source), stderr=subprocess.PIPE, text=True)
    journal = tmp_path / "a.scored.jsonl.journal"
    while process.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 2):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "the same command goes on from there" in said
    assert "Traceback" not in said
    assert len((tmp_path / "a.scored.jsonl.part").read_text().splitlines()) > 0


def test_a_result_is_not_overwritten(tmp_path: Path, made_up: Callable[..., int]) -> None:
    source = write_rows(tmp_path / "a.jsonl", 5)
    assert made_up(source) == 0
    before = (tmp_path / "a.scored.jsonl").read_bytes()
    with pytest.raises(StartupError, match="exists already"):
        made_up(source)
    assert (tmp_path / "a.scored.jsonl").read_bytes() == before
    assert files(tmp_path) == {"a.jsonl", "a.scored.jsonl"}


def begun(tmp_path: Path, made_up: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of which some rows are scored in out.jsonl.part."""
    source = write_rows(tmp_path / "a.jsonl", 60)
    real = Output.commit

    def commit(output: Output, *arguments: Any) -> None:
        real(output, *arguments)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Output, "commit", commit)
        with pytest.raises(Killed):
            made_up(source, tmp_path / "out.jsonl")
    assert len((tmp_path / "out.jsonl.part").read_text().splitlines()) == WINDOW
    return source


def test_a_run_goes_on_only_with_the_same_input_and_settings(
    tmp_path: Path, made_up: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = begun(tmp_path, made_up, monkeypatch)
    kept = (tmp_path / "out.jsonl.part").read_bytes()
    with pytest.raises(StartupError, match="begun with another stride"):
        made_up(source, tmp_path / "out.jsonl", stride=20)
    with pytest.raises(StartupError, match="begun with another prefix"):
        made_up(source, tmp_path / "out.jsonl", "x_")
    with source.open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(StartupError, match="begun with another input"):
        made_up(source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl.part").read_bytes() == kept


def test_an_input_that_changes_during_a_run_is_found_out(
    tmp_path: Path, made_up: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "a.jsonl", 5)
    found = [fingerprint(source), {}]
    monkeypatch.setattr(run_module, "fingerprint", lambda path: found.pop(0))
    with pytest.raises(StartupError, match="changed while it was scored"):
        made_up(source)
    assert not (tmp_path / "a.scored.jsonl").exists()


def test_rows_that_are_gone_are_found_out(
    tmp_path: Path, made_up: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = begun(tmp_path, made_up, monkeypatch)
    os.truncate(tmp_path / "out.jsonl.part", 10)
    with pytest.raises(StartupError, match="has lost rows"):
        made_up(source, tmp_path / "out.jsonl")


def test_two_processes_cannot_write_one_output(tmp_path: Path, made_up: Callable[..., int]) -> None:
    code = (
        "import sys, pathlib; from neper.score.output import Output\n"
        "with Output(pathlib.Path('out.jsonl'), pathlib.Path('out.errors.jsonl'), {}):\n"
        "    print(flush=True); sys.stdin.read()"
    )
    source = write_rows(tmp_path / "a.jsonl", 5)
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, **pipes) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(StartupError, match="another process"):
            made_up(source, tmp_path / "out.jsonl")
    assert made_up(source, tmp_path / "out.jsonl") == 0  # that one had committed nothing, and left nothing


@pytest.mark.parametrize("name", ["a.jsonl", "link.jsonl"])
def test_out_must_not_be_the_input(tmp_path: Path, made_up: Callable[..., int], name: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", 5)
    (tmp_path / "link.jsonl").symlink_to(source)
    before = source.read_bytes()
    with pytest.raises(ConfigError, match="the same file"):
        made_up(source, tmp_path / name)
    assert source.read_bytes() == before


def test_a_place_that_cannot_be_written_to_is_an_error_before_the_model_is_loaded(
    tmp_path: Path, engine: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "a.jsonl", 5)
    monkeypatch.setattr("neper.engine.llm.LLM", None)
    with pytest.raises(OSError, match="out"):
        run(source, tmp_path / "no/such/out.jsonl", None, "", ScoreConfig(), engine)


def test_a_full_disk_ends_the_run_and_a_later_one_goes_on(
    tmp_path: Path, made_up: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "a.jsonl", 400)
    made_up(source, tmp_path / "whole.jsonl")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "whole.jsonl").stat().st_size // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            made_up(source, tmp_path / "out.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "out.jsonl.part").stat().st_size > 0
    assert made_up(source, tmp_path / "out.jsonl") == SOME_FAILED
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_columns_are_looked_for_before_the_model_is_loaded(
    tmp_path: Path, engine: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neper.engine.llm.LLM", None)
    source = write_rows(tmp_path / "a.parquet", 5)
    with pytest.raises(ConfigError, match="no column 'body' but id, text"):
        run(source, None, None, "", ScoreConfig(text_column="body"), engine)
    (tmp_path / "b.csv").write_text("text,logprob\na b,1\n")
    with pytest.raises(ConfigError, match="column 'logprob' already"):
        run(tmp_path / "b.csv", None, None, "", ScoreConfig(), engine)


def test_a_prefix_keeps_names_apart(tmp_path: Path, made_up: Callable[..., int]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a b c", "logprob": 5}\n')
    assert made_up(tmp_path / "a.jsonl", tmp_path / "out.jsonl") == SOME_FAILED
    assert "--prefix" in (tmp_path / "out.errors.jsonl").read_text()
    assert made_up(tmp_path / "a.jsonl", tmp_path / "named.jsonl", "neper_") == 0
    row = json.loads((tmp_path / "named.jsonl").read_text())
    assert row["logprob"] == 5
    assert row["neper_logprob"] < 0


@pytest.mark.parametrize(("name", "data"), [("a.jsonl", ""), ("a.csv", "text\n"), ("b.jsonl", "{\n")])
@pytest.mark.parametrize("out", ["out.jsonl", "out.csv", "out.parquet"])
def test_files_without_a_row_to_score(
    tmp_path: Path, score: Callable[..., int], name: str, data: str, out: str
) -> None:
    (tmp_path / name).write_text(data)
    assert score(tmp_path / name, tmp_path / out) == (SOME_FAILED if "{" in data else 0)
    assert [*neper.score.formats.open_reader(tmp_path / out).rows()] == []


def test_a_model_that_cannot_be_loaded_leaves_nothing(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.jsonl", 5)
    with pytest.raises(NeperError):
        run(source, None, None, "", ScoreConfig(), EngineConfig(model=str(tmp_path / "no-model")))
    assert files(tmp_path) == {"a.jsonl"}
