"""The benchmark of Arrow replies, on a short prompt: its replies are whole, and both forms are measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import arrow_replies

from neper.bench.report import read


@pytest.mark.slow
@pytest.mark.model
def test_both_forms_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_replies, "IDLE_SECONDS", 0.1)
    arrow_replies.run(str(tmp_path), "smollm2-135m", 40, 5, 2)
    report = read(tmp_path / "arrow-cpu.json")
    assert [(series.name, len(series.samples)) for series in report.series] == [
        ("JSON: bytes", 2), ("JSON: CPU", 2), ("Arrow: bytes", 2), ("Arrow: CPU", 2)
    ]  # fmt: skip
    assert report.series[0].median > report.series[2].median > 39 * 5
