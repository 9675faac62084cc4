"""Numbers as text: the shortest float32 form, the floor, and batches in which one row is broken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neper.server.entries.score_texts import ScoreBatch, listed_ids, read_scores
from neper.types import PackedRows

FLOATS = st.floats(width=32, max_value=0.0, allow_nan=False)


def packed(
    values: list[float], tops: list[list[float]] | None = None, ids: list[list[int]] | None = None
) -> PackedRows:
    return PackedRows.pack([7] * len(values), values, None, ids, tops)


@settings(deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=5))
def test_numbers_keep_every_bit_above_the_floor(values: list[float]) -> None:
    for value, score in zip(values, read_scores(packed(values)), strict=True):
        text = score.numbers[0].decode()
        assert np.float32(text) == max(np.float32(value), np.float32(-9999.0))
        # No longer than what numpy takes for the shortest text that reads back as the same float32.
        shortest = np.format_float_scientific(np.float32(text), unique=True, trim="-")
        assert len(text.strip("-0").replace(".", "").split("e")[0]) <= len(shortest.strip("-").replace(".", "")) + 1


def test_minus_infinity_has_a_floor() -> None:
    rows = packed([-np.inf], [[-1.5, -20_000.0, -np.inf]], [[1, 2, -1]])
    (score,) = read_scores(rows)
    assert score.numbers == [b"-9999.0", b"-1.5", b"-9999.0", b"-9999.0"]
    assert listed_ids(score.words, 3) == [1, 2]
    assert listed_ids(score.words, 1) == [1]
    assert listed_ids(score.words, 0) == []
    # An id that was named keeps its place at -inf; a place that holds none does not.
    (named,) = read_scores(packed([-1.0], [[-1.0, -np.inf, -np.inf]], [[7, 3, 5]]))
    assert listed_ids(named.words, 3) == [7, 3, 5]
    assert named.numbers == [b"-1.0", b"-1.0", b"-9999.0", b"-9999.0"]


def test_a_whole_vocabulary() -> None:
    size = 5000
    rows = packed([-1.0] * 2, [[-float(i) for i in range(size)]] * 2, [list(range(size))] * 2)
    for k in (size, 1, 0):
        for score in read_scores(rows, k):
            assert list(map(float, score.numbers)) == [-1.0, *(-float(i) for i in range(k))]
            assert listed_ids(score.words, k) == list(range(k))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_what_is_no_number_is_never_written(bad: float) -> None:
    for rows in (packed([bad]), packed([-1.0], [[bad]], [[1]]), packed([-1.0, bad])):
        with pytest.raises(ValueError, match="not a number"):
            read_scores(rows)


def test_rows_without_scores() -> None:
    with pytest.raises(ValueError, match="no scores"):
        read_scores(PackedRows.pack([1]))
    with pytest.raises(ValueError, match="cannot give"):
        read_scores(packed([-1.0]), 1)


def test_a_batch_reads_as_its_parts_do() -> None:
    rng = np.random.default_rng(0)
    batch = ScoreBatch()
    parts = []
    for count, k in ((1, 0), (2, 3), (3, 0), (1, 3), (4, 20)):
        rows = PackedRows.pack(
            rng.integers(0, 99, count),
            -rng.random(count),
            None,
            rng.integers(0, 99, (count, k)),
            -rng.random((count, k)),
        )
        parts.append((rows, batch.add(rows)))
    for rows, pending in reversed(parts):
        assert pending.read() == read_scores(rows)
        assert pending.read() == read_scores(rows)


def test_a_broken_row_fails_alone() -> None:
    batch = ScoreBatch()
    good, bad, later = batch.add(packed([-1.0])), batch.add(packed([np.nan])), batch.add(packed([-2.0]))
    assert later.read()[0].numbers == [b"-2.0"]
    with pytest.raises(ValueError, match="not a number"):
        bad.read()
    assert good.read()[0].numbers == [b"-1.0"]
