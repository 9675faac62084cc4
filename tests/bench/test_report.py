from __future__ import annotations

import json
from pathlib import Path

from neper.bench import report
from neper.bench.report import Ratio, Report, Series, Table

SERIES = [Series("neper, 1 request", "tok/s", [40.0, 42.0, 41.0]), Series("other", "tok/s", [20.0])]
RATIOS = [Ratio("neper / other", 2.05, ">= 1.3", True), Ratio("other / neper", 0.5, ">= 1", False)]


def test_a_report_without_tables_lists_its_series(tmp_path: Path) -> None:
    text = report.write(tmp_path / "new", "cpu-cpu", "neper on a CPU", {"model": "m"}, SERIES, RATIOS)
    assert (tmp_path / "new/cpu-cpu.md").read_text(encoding="utf-8") == text
    assert text.startswith("# neper on a CPU\n\n- model: m\n- cpu: ")
    tables = text[text.index("| case") :]
    assert tables == (
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


def test_the_json_holds_every_sample(tmp_path: Path) -> None:
    report.write(tmp_path, "cpu-cpu", "neper on a CPU", {"model": "m"}, SERIES, RATIOS)
    data = json.loads((tmp_path / "cpu-cpu.json").read_bytes())
    assert data["series"][0] == {"name": "neper, 1 request", "unit": "tok/s", "samples": [40.0, 42.0, 41.0]}
    assert data["ratios"][1] == {"name": "other / neper", "value": 0.5, "bound": ">= 1", "met": False}
    assert data["setup"] == {"model": "m"}
    assert "torch" in data["machine"]


def test_tables_of_its_own_replace_the_series_and_notes_come_last() -> None:
    table = Table(["a", "long name"], [["value", "1"]], title="Speed")
    text = Report("title", {}, SERIES, [], [table], ["left out: this"]).markdown()
    assert text.endswith(
        "\n\n## Speed\n\n| a     | long name |\n| ----- | --------- |\n| value | 1         |\n\n- left out: this\n"
    )
    assert "tok/s" not in text
