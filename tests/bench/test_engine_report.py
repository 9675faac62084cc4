"""Ratios, bounds, tables and the picture of `neper bench engine`, from made-up samples."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from neper.bench import engine_plot
from neper.bench.engine_cases import FULL, OFF, OFF_AGAIN, SAMPLED_OFF, Case, Lengths, Plan
from neper.bench.engine_drive import Batch, Traffic
from neper.bench.engine_report import Findings, Key, bounds, report
from neper.bench.report import Figure, Series, markdown

K20 = Case(20)
LONG = Lengths((9_000, 200, 200), 1.2)


def found_of(samples: dict[Key, list[float]], plan: Plan = FULL) -> Findings:
    """Findings with these milliseconds a token, in a matrix of replies of 11 tokens."""
    found = Findings(plan)
    for key, values in samples.items():
        found.replies[key.group, key.requests] = 11
        for value in values:
            times = [value / 1e3 * i for i in range(11)]
            found.add(key, Batch(2.0, times, {}, Traffic(1, 8 * key.requests, 1), 2**30, 1.0), 11)
    return found


def test_a_ratio_is_that_of_neighbours_and_its_spread_that_of_off_to_off() -> None:
    samples = {
        Key("device", 8, OFF): [1.00, 2.00, 4.00],
        Key("device", 8, K20): [1.02, 2.02, 4.20],
        Key("device", 8, OFF_AGAIN): [1.02, 2.00, 4.20],
    }
    found = found_of(samples)
    compared = found.compared(Key("device", 8, K20))
    assert compared is not None
    ratio, spread = compared
    # Over the mean of off before and after: 1.02 / 1.01, 2.02 / 2, 4.2 / 4.1.
    assert ratio.samples == pytest.approx([1.02 / 1.01, 1.01, 4.2 / 4.1])
    assert ratio.median == pytest.approx(1.01)
    # Off again over off is 1.02, 1.00, 1.05: half the range over the median.
    assert spread == pytest.approx(0.025 / 1.02)
    again = found.compared(Key("device", 8, OFF_AGAIN))
    assert again is not None
    assert again[0].samples == pytest.approx([1.02, 1.0, 1.05])
    assert found.off_tpot(8) == pytest.approx(2.0)
    assert found.off_tpot(1) is None
    assert found.compared(Key("device", 32, K20)) is None


def test_sampled_rows_are_compared_with_sampled_ones() -> None:
    sampled = Case(20, sampled=True)
    samples = {
        Key("device", 1, OFF): [1.0],
        Key("device", 1, SAMPLED_OFF): [3.0],
        Key("device", 1, sampled): [3.3],
        Key("device", 1, OFF_AGAIN): [1.0],
    }
    compared = found_of(samples).compared(Key("device", 1, sampled))
    assert compared is not None
    assert compared[0].samples == pytest.approx([1.1])


def full_findings() -> Findings:
    samples: dict[Key, list[float]] = {}
    for count in (1, 32):
        samples |= {
            Key("device", count, OFF): [3.4, 3.4],
            Key("device", count, K20): [3.4 * 1.02, 3.4 * 1.02],
            Key("device", count, OFF_AGAIN): [3.4, 3.4],
            Key("host", count, OFF): [3.4],
            Key("host", count, K20): [340.0],
            Key("host", count, OFF_AGAIN): [3.4],
        }
    samples |= {
        Key("mixed", 32, OFF): [3.4],
        Key("mixed", 32, Case(20, asking=1)): [3.4 * 1.002],
        Key("mixed", 32, OFF_AGAIN): [3.4],
    }
    found = found_of(samples)
    found.floor_seconds = {1: 2e-3, 32: 2e-3}
    found.lengths = {LONG: Series("lengths", "ms", [4.8, 5.0, 5.2])}
    found.lengths_floor = {LONG: 4.0}
    found.prompts[1024] = {
        way: Series(way, "ms", [value]) for way, value in (("plain", 20.0), ("scored", 22.0), ("plain again", 20.0))
    }
    found.prompt_bytes = 3 * 2**28
    found.notes.append("a note")
    return found


def rows_of(markdown: str, *first: str) -> list[list[str]]:
    """The cells of the table rows that begin with these cells."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if line[:1] == "|"]
    return [row for row in rows if row[: len(first)] == list(first)]


def test_the_bounds_of_made_up_samples() -> None:
    found = {ratio.name: ratio for ratio in bounds(full_findings(), reference=True)}
    k20 = found["TPOT / off: device, 1 at a time, k=20"]
    assert (k20.value, k20.bound, k20.met) == (pytest.approx(1.02), "<= 1.01 (goal 1.005)", False)
    mixed = found["TPOT / off: mixed, 32 at a time, k=20 for 1"]
    assert (mixed.value, mixed.bound, mixed.met) == (pytest.approx(1.002), "<= 1.003", True)
    assert not any("host" in name for name in found)
    assert found["bytes a step: device, 32 at a time, k=20"].bound == f"<= {32 * 176}"
    assert found["copies a step: device, 32 at a time, off"].met
    one, many = (found[f"decode step / floor, {rows} rows"] for rows in (1, 32))
    assert (one.value, one.bound, one.met) == (pytest.approx(1.7), "<= 1.8 (stretch 1.65, goal 1.35)", True)
    assert (many.bound, many.met) == ("<= 2 (stretch 1.85, goal 1.5)", True)
    long = found["decode step / floor, 1 x 9,000 + 2 x 200"]
    assert (long.value, long.bound[:6], long.met) == (1.25, "<= 1.2", False)
    assert found["prompt of 1,024: scored / plain"] == Figure("prompt of 1,024: scored / plain", 1.1, "<= 1.15", True)
    assert found["prompt of 32,768: GiB more when scored"].value == 0.75


def test_the_report_of_made_up_samples() -> None:
    made = report("title", {"gpu": "g"}, full_findings(), reference=False)
    text = markdown(made)
    assert rows_of(text, "32", "k=20")[0][2:] == [
        "3.468", "±0.0%", "1.0200", "±0.00%", "176", "1", "256", "1", "1.00", "11", "2"
    ]  # fmt: skip
    assert rows_of(text, "1", "k=20")[1][4] == "100.0000"
    assert rows_of(text, "1", "2.000") == [["1", "2.000", "3.400", "1.700", "1.8", "1.65", "1.35"]]
    assert rows_of(text, str(LONG)) == [[str(LONG), "4.000", "5.000", "±4.0%", "1.250", "1.2", "3"]]
    assert rows_of(text, "1,024") == [["1,024", "20.00", "22.00", "1.1000", "±0.00%", "1"]]
    assert "for qwen3-4b in bfloat16 on an H200" in text
    assert text.endswith("\n- a note\n")
    names = [series.name for series in made.series]
    assert len(names) == len(set(names)) == 2 * 15 + 4


def test_a_report_of_nothing_is_one() -> None:
    made = report("title", {}, Findings(FULL), reference=True)
    assert "nothing was measured" in markdown(made)


def test_the_picture_draws_ratios_of_both_ways(tmp_path: Path) -> None:
    made = report("title", {}, full_findings(), reference=True)
    assert engine_plot.lines(made, "device")["k=20"] == [(1, pytest.approx(1.02)), (32, pytest.approx(1.02))]
    assert set(engine_plot.lines(made, "host")) == {"k=20", "off again"}
    pytest.importorskip("matplotlib")
    assert engine_plot.save(made, tmp_path / "new", "engine-x") is None
    assert (tmp_path / "new/engine-x.png").read_bytes()[:4] == b"\x89PNG"
    svg = (tmp_path / "new/engine-x.svg").read_bytes()
    assert b"</svg>" in svg
    assert engine_plot.save(made, tmp_path / "new", "engine-x") is None
    assert (tmp_path / "new/engine-x.svg").read_bytes() == svg


def test_without_matplotlib_there_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    note = engine_plot.save(report("title", {}, full_findings(), reference=True), tmp_path, "engine-x")
    assert note == "no picture was drawn: matplotlib is not installed (pip install 'neper[bench]')"
    assert list(tmp_path.iterdir()) == []
    nothing = report("title", {}, Findings(FULL), reference=True)
    assert "nothing was compared" in (engine_plot.save(nothing, tmp_path, "engine-x") or "")
