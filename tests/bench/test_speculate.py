"""`neper bench speculate`: quick runs with tiny models, whose replies are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from neper.bench import speculate
from neper.bench.report import Report, markdown, read
from neper.bench.subject import choose
from neper.cli import app
from neper.engine import settings
from neper.models.shapes import SHAPES
from tests.bench.small import SMALL


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small shape under a real one's name, and one thread, which computes it faster than several."""
    monkeypatch.setattr(settings, "choose_threads", lambda _: 1)
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", SMALL)


def bench(directory: Path, *arguments: str) -> tuple[Report, Any]:
    options = ("--device", "cpu", "--dtype", "float32", "--quick", "--out", str(directory))
    result = CliRunner().invoke(app, ["bench", "speculate", *options, *arguments])
    assert result.exit_code == 0, result.output
    (written,) = directory.glob("speculate-cpu-*.json")
    report = read(written)
    assert result.stdout == written.with_suffix(".md").read_text(encoding="utf-8") == markdown(report)
    return report, result


def rows(report: Report) -> list[dict[str, Any]]:
    names = [column.name for column in report.tables[0].columns]
    return [dict(zip(names, row, strict=True)) for row in report.tables[0].rows]


def test_three_of_four_drafts_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.DRAFT_ROWS, "cpu", 64)  # a GPU's, so that all of 8 requests draft
    report, result = bench(tmp_path, "--shape", "qwen3-0.6b")
    one, eight = rows(report)
    for row in (one, eight):
        # 16 tokens after the first: three windows of 4 drafts, and one of 3, which ends the reply.
        assert row["drafts accepted"] == (3 + 3 + 3 + 3) / (4 + 4 + 4 + 3)
        assert (row["tokens a step"], row["rounds"]) == (4, 2)
    assert [figure.bound.split()[:2] for figure in report.figures[::2]] == [[">=", "2.6"], [">=", "2.4"]]
    assert [figure.bound[:2] for figure in report.figures[1::2]] == ["<=", "<="]
    assert [len(series.samples) for series in report.series] == [2] * 10
    # The table's ratio is that of the samples beside it.
    off, drafts, _, drafts_again, off_again = (series.samples for series in report.series[:5])
    ratios = [(b + c) / (a + d) for a, b, c, d in zip(off, drafts, drafts_again, off_again, strict=True)]
    assert one["/ off"] == pytest.approx(sum(ratios) / 2)
    assert report.figures[0].value == one["/ off"]
    assert "3 of 4 right, 8 at a time: round 2 of 2, drafts, k=20 ...\n" in result.stderr


def test_a_shape_that_does_not_repeat_itself_is_no_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", dataclasses.replace(SMALL, tie_word_embeddings=False))
    arguments = ["bench", "speculate", "--device", "cpu", "--shape", "qwen3-0.6b", "--quick", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "qwen3-0.6b does not repeat its last token" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_texts_and_their_figures(tiny_dir: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_dir("llama", max_position_embeddings=2048)
    report, _ = bench(tmp_path, "--model", str(model), "--rounds", "1")
    copied, invented = rows(report)
    assert [figure.name for figure in report.figures] == [
        "tok/s / off: copied text",
        "tokens that were drafts: copied text",
        "tok/s / off: nothing to copy",
    ]
    drafts = report.figures[1]
    # Tokens of a step are one and the drafts accepted in it.
    assert drafts.value == pytest.approx(1 - 1 / copied["tokens a step"])
    assert (drafts.bound, drafts.met) == (">= 0.6", drafts.value >= 0.6)
    assert 1 <= invented["tokens a step"] < 2


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model_copies_the_passage(tmp_path: Path) -> None:
    report, _ = bench(tmp_path, "--rounds", "1")
    copied, invented = rows(report)
    assert report.figures[1].met
    assert copied["tokens a step"] > 2.5
    assert invented["tokens a step"] < 1.5


@pytest.mark.gpu
def test_a_quick_run_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real shape
    subject = choose("bench speculate", shape="qwen3-0.6b", device="cuda", dtype="bfloat16")
    speculate.run(subject, str(tmp_path), quick=True)
    (written,) = tmp_path.glob("speculate-*-qwen3-0-6b.json")
    assert [row["tokens a step"] for row in rows(read(written))] == [4, 4]
