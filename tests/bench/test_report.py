from __future__ import annotations

import json
from pathlib import Path

import pytest

from neper.bench import report
from neper.bench.report import Column, Figure, Report, Series, Table, at_least, at_most, markdown, pairs, turns

RESULTS = Path(__file__).parents[2] / "bench" / "results"
SERIES = [Series("neper, 1 request", "tok/s", [40.0, 42.0, 41.0]), Series("other", "tok/s", [20.0])]
COLUMNS = [
    Column("case"),
    Column("median", "tok/s", "{:.1f} tok/s"),
    Column("spread", "", "±{:.1%}"),
    Column("samples"),
]
TABLE = Table("", COLUMNS, [[s.name, s.median, s.spread, len(s.samples)] for s in SERIES])
FIGURES = [Figure("neper / other", 2.05, ">= 1.3", True), Figure("other / neper", 0.5, ">= 1", False)]
REPORT = Report("neper on a CPU", {"model": "m", "cpu": "c"}, [TABLE], FIGURES, [], SERIES)


def test_a_report_is_printed_as_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.publish(REPORT, str(tmp_path / "new"), "cpu-cpu")
    text = (tmp_path / "new/cpu-cpu.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == text
    assert text == (
        "# neper on a CPU\n"
        "\n"
        "- model: m\n"
        "- cpu: c\n"
        "\n"
        "| case             | median     | spread | samples |\n"
        "| ---------------- | ---------- | ------ | ------- |\n"
        "| neper, 1 request | 41.0 tok/s | ±2.4%  | 3       |\n"
        "| other            | 20.0 tok/s | ±0.0%  | 1       |\n"
        "\n"
        "| figure        | measured | bound  | met |\n"
        "| ------------- | -------- | ------ | --- |\n"
        "| neper / other | 2.050    | >= 1.3 | yes |\n"
        "| other / neper | 0.500    | >= 1   | no  |\n"
    )


def test_the_json_holds_every_sample_and_is_the_report(tmp_path: Path) -> None:
    REPORT.save(tmp_path, "cpu-cpu")
    data = json.loads((tmp_path / "cpu-cpu.json").read_bytes())
    assert data["series"][0] == {"name": "neper, 1 request", "unit": "tok/s", "samples": [40.0, 42.0, 41.0]}
    assert data["figures"][1] == {"name": "other / neper", "value": 0.5, "bound": ">= 1", "met": False}
    assert data["environment"] == {"model": "m", "cpu": "c"}
    assert data["tables"][0]["rows"][1] == ["other", 20.0, 0.0, 1]
    assert data["tables"][0]["columns"][1]["unit"] == "tok/s"
    assert report.read(tmp_path / "cpu-cpu.json") == REPORT
    assert {"cpu", "torch", "neper"} <= set(report.conditions())


def test_titled_tables_have_titled_bounds_and_notes_come_last() -> None:
    columns = [Column("a"), Column("long name", "us", "{:.1f} ({:.0f} x)", "not measured")]
    table = Table("Speed", columns, [["value", [1.25, 3.0]], ["other", None]])
    text = markdown(
        Report("title", {}, [table, Table("Empty", [Column("b")], [])], FIGURES[:1], ["left out: this"], [])
    )
    assert text == (
        "# title\n"
        "\n"
        "## Speed\n"
        "\n"
        "| a     | long name    |\n"
        "| ----- | ------------ |\n"
        "| value | 1.2 (3 x)    |\n"
        "| other | not measured |\n"
        "\n"
        "## Bounds\n"
        "\n"
        "| figure        | measured | bound  | met |\n"
        "| ------------- | -------- | ------ | --- |\n"
        "| neper / other | 2.050    | >= 1.3 | yes |\n"
        "\n"
        "- left out: this\n"
    )


def test_a_report_of_nothing_says_so() -> None:
    assert markdown(Report("title", {}, [], [], [], [])) == "# title\n\nnothing was measured\n"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_results_in_the_repository_are_the_formatter_s(path: Path) -> None:
    assert markdown(report.read(path)) == path.with_suffix(".md").read_text(encoding="utf-8")


def test_cases_take_turns_and_the_first_rounds_warm_up() -> None:
    assert list(turns("ab", 2)) == [
        *(("a", False, "warm-up"), ("b", False, "warm-up")),
        *(("a", True, "round 1 of 2"), ("b", True, "round 1 of 2")),
        *(("a", True, "round 2 of 2"), ("b", True, "round 2 of 2")),
    ]
    assert [counts for _, counts, _ in turns("a", 1, warm_up=2)] == [False, False, True]


def test_a_bound_gives_way_to_the_spread_and_says_so() -> None:
    assert at_most("x", 1.012, 1.01) == Figure("x", 1.012, "<= 1.01", False)
    assert at_most("x", 1.010, 1.01) == Figure("x", 1.010, "<= 1.01", True)
    wide = at_most("x", 1.012, 1.01, spread=0.02)
    assert wide == Figure("x", 1.012, "<= 1.02 (A against A; else 1.01)", True)
    assert not at_most("x", 1.021, 1.01, spread=0.02).met
    assert at_least("x", 5.9, 6.0) == Figure("x", 5.9, ">= 6.0", False)
    assert at_least("x", 0.95, 0.97, spread=0.05) == Figure("x", 0.95, ">= 0.95 (A against A; else 0.97)", True)
    assert pairs([2.0, 3.0], [1.0, 2.0]).samples == [2.0, 1.5]


def test_a_card_is_a_file_name() -> None:
    assert report.slug("NVIDIA H200") == "nvidia-h200"
    assert report.slug("NVIDIA GeForce RTX 4090 (Laptop)") == "nvidia-geforce-rtx-4090-laptop"
