"""`benchmarks/partings`: replies that part, made by hand, and a run with a tiny model, whose replies do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks import partings
from benchmarks.partings import Partings

from neper.bench.report import read
from neper.bench.subject import Subject
from neper.types import PackedRows, Request, SamplingParams


def reply(ids: list[int], lists: list[dict[int, float]]) -> PackedRows:
    chosen = [listed[token_id] for token_id, listed in zip(ids, lists, strict=True)]
    ranks = [1] * len(ids)
    return PackedRows.pack(ids, chosen, ranks, [list(one) for one in lists], [list(one.values()) for one in lists])


def test_the_lack_of_a_greedy_choice() -> None:
    request = Request(request_id="", prompt_token_ids=[1], sampling=SamplingParams(temperature=0.0))
    found = Partings()
    off = reply([5, 7, 9], [{5: -0.5, 6: -2.0}, {7: -0.70, 8: -0.75}, {9: -1.0, 2: -3.0}])
    on = reply([5, 8, 3], [{5: -0.4, 6: -2.1}, {8: -0.71, 7: -0.72}, {3: -1.0, 2: -3.0}])
    found.add(request, off, on)
    assert found.tokens == 2
    assert found.differences == pytest.approx([0.1])
    assert found.lacks == pytest.approx([0.05])  # the larger one: what 8 lacks without drafts
    found.add(request, off, off)
    assert (found.tokens, len(found.lacks), found.unlisted) == (5, 1, 0)
    found.add(request, off, reply([4], [{4: -0.1, 3: -math.inf}]))
    assert (found.tokens, len(found.lacks), found.unlisted) == (6, 1, 1)


@pytest.mark.slow
def test_float32_replies_do_not_part(tiny_dir: Callable[..., Path], tmp_path: Path) -> None:
    subject = Subject(str(tiny_dir("llama")), None, torch.device("cpu"), torch.float32)
    partings.run(str(tmp_path), 12, subject)
    (written,) = tmp_path.glob("partings-cpu-*.json")
    rows = read(written).tables[0].rows
    assert [row[0] for row in rows] == ["ngram", "known, 3 of 4 right"]
    assert [row[3] for row in rows] == [0, 0]
    assert rows[1][1] > 0.5
    assert rows[1][2] == 12 * partings.REPLY
