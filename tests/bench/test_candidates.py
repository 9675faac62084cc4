"""`benchmarks/candidates`: a quick run with a tiny model, whose counts are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks import candidates
from benchmarks.candidates import QUICK

from neper.bench.report import read
from neper.bench.subject import Subject
from neper.engine import settings


def test_a_quick_run(tiny_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(settings, "choose_threads", lambda _: 1)
    subject = Subject(str(tiny_dir("llama")), None, torch.device("cpu"), torch.float32)
    candidates.run(subject, str(tmp_path), QUICK)
    (written,) = tmp_path.glob("candidates-cpu-*.json")
    made = read(written)
    lengths = [1 + place % QUICK.longest for place in range(QUICK.candidates)]
    rest = QUICK.prompt % 16  # of the block that is not full
    once = QUICK.prompt + sum(rest + length for length in lengths if length > 1)
    each = sum(QUICK.prompt + length for length in lengths)
    assert [row[3] for row in made.tables[0].rows] == [once, each]
    figures = {figure.name: figure for figure in made.figures}
    assert figures["tokens of each from scratch / of candidates"].value == pytest.approx(each / once)
    assert figures["largest difference of a total"].met
    assert figures["time of each from scratch / of candidates"].value > 0
