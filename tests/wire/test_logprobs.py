"""LP lines, held against a regular expression of the grammar; and as rows of PackedRows, with ranks."""

from __future__ import annotations

import math
import re
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neper.types import PackedRows
from neper.wire.lines import LineError, format_answer, parse_answer
from neper.wire.logprobs import Logprobs
from tests.wire.made_up import ID, WRITTEN_SCORES, mutated, rounded, scores

INF = math.inf


def read(row: bytes, places: int) -> dict[str, list[Any]]:
    rows = PackedRows(places, row)
    assert len(rows) == 1
    names = ("token_ids", "rank", "logprob", "top_ids", "top_logprobs")
    return {name: np.atleast_1d(getattr(rows, name)[0]).tolist() for name in names}


def test_a_row_is_best_first_and_its_rank_counts_what_is_strictly_greater() -> None:
    line = Logprobs(-2.0, [9, 8, 3, 7, 5], [-3.0, -1.0, -2.0, -1.0, -INF])
    assert read(line.row(3), 5) == {
        "token_ids": [3], "rank": [3], "logprob": [-2.0],
        "top_ids": [8, 7, 3, 9, 5], "top_logprobs": [-1.0, -1.0, -2.0, -3.0, -INF],
    }  # fmt: skip
    assert read(line.row(3, 2), 2) == {
        "token_ids": [3], "rank": [3], "logprob": [-2.0], "top_ids": [8, 7], "top_logprobs": [-1.0, -1.0],
    }  # fmt: skip
    assert read(line.row(3, 0), 0)["rank"] == [3]
    padded = read(line.row(3, 7), 7)
    assert padded["top_ids"] == [8, 7, 3, 9, 5, -1, -1]
    assert padded["top_logprobs"][5:] == [-INF, -INF]


@pytest.mark.parametrize(
    ("line", "token_id", "rank"),
    [
        (Logprobs(-5.0), 4, 1),
        (Logprobs(-5.0, [1, 2], [-1.0, -2.0]), 4, 3),
        (Logprobs(-1.5, [1, 2], [-1.0, -2.0]), 4, 2),
        (Logprobs(-1.0, [1, 2], [-1.0, -1.0]), 2, 1),
        (Logprobs(-1.00004, [1, 2], [-1.0, -2.0]), 1, 1),
        (Logprobs(-5.0, [1, 2, 4], [-1.0, -2.0, -5.0]), 4, 3),
    ],
    ids=["no list", "below it", "within it", "a tie", "rounded differently", "listed last"],
)
def test_rank(line: Logprobs, token_id: int, rank: int) -> None:
    assert read(line.row(token_id), len(line.ids))["rank"] == [rank]


@pytest.mark.parametrize("seed", range(20))
def test_rows_from_written_lines_are_the_rows_of_the_logits(seed: int) -> None:
    """From logits through a row, a line, and back to a row: only the rank of an unlisted token may be lower."""
    generator = np.random.default_rng(seed)
    logits = np.round(generator.normal(0, 4, 300), 2).astype(np.float32)
    peak = float(logits.max())
    exact = logits.astype(float) - peak
    values = (exact - math.log(np.exp(exact).sum())).astype(np.float32)
    order = np.lexsort((np.arange(300), -logits))
    for k in (0, 1, 20):
        for token_id in (order[0], order[7], generator.integers(300)):
            rank = 1 + int((logits > logits[token_id]).sum())
            packed = PackedRows.pack([token_id], [values[token_id]], [rank], [order[:k]], [values[order[:k]]])
            row = parse_scores(format_answer(Logprobs.of_row(packed.data))).row(int(token_id), k)
            listed = token_id in order[:k]
            expected = PackedRows.pack(
                [token_id], [values[token_id]], [rank if listed else min(rank, k + 1)], [order[:k]], [values[order[:k]]]
            )
            assert row == expected.data


def parse_scores(line: bytes) -> Logprobs:
    found = parse_answer(line, tagged=False)
    assert isinstance(found, Logprobs)
    return found


def bits(values: list[float]) -> bytes:
    return struct.pack(f"{len(values)}f", *values)


def row_comes_back(line: Logprobs, token_id: int, more: int) -> None:
    places = len(line.ids) + more
    row = line.row(token_id, places)
    pairs = sorted(zip(line.ids, line.logprobs, strict=True), key=lambda pair: -pair[1])
    own = dict(pairs).get(token_id, line.logprob)
    found = read(row, places)
    assert found["token_ids"] == [token_id]
    assert found["rank"] == [1 + sum(value > own for _, value in pairs)]
    assert list(zip(found["top_ids"], found["top_logprobs"], strict=True)) == pairs + [(-1, -INF)] * more
    again = Logprobs.of_row(row, "8")
    assert again == Logprobs(line.logprob, [i for i, _ in pairs], [value for _, value in pairs], "8")
    assert bits([again.logprob]) == bits([line.logprob])


def scores_come_back(line: Logprobs) -> None:
    again = parse_scores(format_answer(line))
    assert rounded(again) == line
    assert bits([again.logprob, *again.logprobs]) == bits([line.logprob, *line.logprobs])


NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
WHOLE = r"[0-9]{1,64}"
LP = re.compile(rf"(?P<raw>{WHOLE} raw {WHOLE} )?(?P<own>{NUMBER})(?P<count> {WHOLE})?(?P<list>( [^ ]+)*)")
PAIR = re.compile(rf"(?P<id>-?0|[1-9][0-9]*):(?P<value>-inf|{NUMBER})")


def float32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def scores_by_the_grammar(line: bytes) -> Logprobs | None:
    """What a regular expression makes of an LP line without a tag; None where it is malformed."""
    found = LP.fullmatch(b" ".join(line.split()[1:]).decode("latin-1"))
    if found is None or (found["raw"] is None) != (found["count"] is None):
        return None
    pairs = [pair for pair in map(PAIR.fullmatch, found["list"].split()) if pair]
    ids = [int(pair["id"]) for pair in pairs]
    values = [float(pair["value"]) for pair in pairs]
    own = float(found["own"])
    if len(pairs) < len(found["list"].split()) or len(set(ids)) < len(ids) or max([0, *ids]) >= 2**31:
        return None
    if any(value == -INF and pair["value"] != "-inf" for pair, value in zip(pairs, values, strict=True)):
        return None
    if float32(own) == -INF or max([own, *values]) > 1e-3:
        return None
    index = token_id = None
    if found["raw"]:
        index, token_id = int(found["raw"].split()[0]), int(found["raw"].split()[2])
        if index >= 2**63 or token_id >= 2**31 or int(found["count"]) != len(ids):
            return None
    listed = [-INF if float32(value) == -INF else min(value, 0.0) for value in values]
    return Logprobs(min(own, 0.0), ids, listed, None, index, token_id)


def scores_are_those_of_the_grammar(line: bytes) -> None:
    expected = scores_by_the_grammar(line) if line.split()[:1] == [b"LP"] else None
    try:
        found = parse_answer(line, tagged=False)
    except LineError:
        found = None
    if found is None or isinstance(found, Logprobs):
        assert found == expected


PROPERTIES = {
    "rows": (row_comes_back, (scores(None), ID, st.integers(0, 3))),
    "lines": (scores_come_back, (scores(None),)),
    "written lines": (scores_are_those_of_the_grammar, (WRITTEN_SCORES,)),
    "mutated lines": (scores_are_those_of_the_grammar, (mutated(WRITTEN_SCORES),)),
}


@pytest.mark.rounds(200)
@pytest.mark.parametrize("kind", PROPERTIES)
def test_random_scores(kind: str, rounds: int) -> None:
    check, strategies = PROPERTIES[kind]
    settings(max_examples=rounds, deadline=None)(given(*strategies)(check))()
