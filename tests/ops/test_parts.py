"""The planner's items: each part of each sequence once, equal shares for the lanes, and no more records than fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from neper.ops.attention.parts import ITEM_WORDS, LEAST, Planner

H200 = Planner(lanes=33, most_parts=33, record_rows=1056)


def items(planner: Planner, contexts: Sequence[int], queries: Sequence[int] | None = None) -> list[list[int]]:
    queries = [1] * len(contexts) if queries is None else queries
    found = np.full((planner.most_items(len(contexts)), ITEM_WORDS), -9, dtype=np.int32)
    firsts = np.cumsum(queries) - queries
    count = planner.fill(found, firsts, np.array(queries, dtype=np.int32), np.array(contexts, dtype=np.int32))
    assert (found[count:] == -9).all()
    found[:count, 5] = [min(item[5], num_parts(item[3], item[2])) for item in found[:count]]
    return found[:count].tolist()


def num_parts(context: int, queries: int = 1) -> int:
    return max(1, min(33, -(-(context - queries) // LEAST)))


def loads(planner: Planner, found: list[list[int]]) -> list[float]:
    """Tokens of each lane, if the one that is free first takes the next item."""
    tokens = [0.0] * planner.lanes
    for _, _, queries, context, first, behind, _ in found:
        tokens[tokens.index(min(tokens))] += (context - queries) * (behind - first) / num_parts(context, queries)
    return tokens


def test_a_context_alone_is_cut() -> None:
    assert items(H200, [LEAST + 1]) == [[0, 0, 1, LEAST + 1, 0, 1, 0]]
    assert items(H200, [5], [5]) == [[0, 0, 5, 5, 0, 1, 0]]
    assert [item[4:6] for item in items(H200, [4 * LEAST + 1])] == [[part, part + 1] for part in range(4)]
    assert items(H200, [100_000]) == [[0, 0, 1, 100_000, part, part + 1, 0] for part in range(33)]


def test_short_ones_follow_a_long_one() -> None:
    found = items(H200, [200, 38_000, *[200] * 29, 0])
    assert [item[0] for item in found] == [1] * 33 + [0, *range(2, 32)]
    assert [item[4:6] for item in found[33:]] == [[0, num_parts(200)]] * 30 + [[0, 1]]


@pytest.mark.parametrize(("seqs", "context"), [(32, 8_000), (33, 9_000), (66, 2_000), (64, 256), (256, 300)])
def test_equal_shares_stay_whole(seqs: int, context: int) -> None:
    assert items(H200, [context] * seqs) == [[i, i, 1, context, 0, num_parts(context), 0] for i in range(seqs)]


@pytest.mark.parametrize(
    "contexts",
    [
        [16_000] * 8,
        [8_000] * 40,
        [20_000 + 100 * i for i in range(30)],
        [9_000, *[1_000] * 20],
        [30_000, 500, 20_000],
        [38_000, *[200] * 31],
    ],
)
def test_lanes_get_equal_shares(contexts: list[int]) -> None:
    tokens = loads(H200, items(H200, contexts))
    assert max(tokens) <= sum(tokens) / 33 + max(contexts) / 33


def test_no_more_parts_than_records() -> None:
    for rows, cut in ((65, set()), (66, {1}), (131, {1}), (132, {0, 1})):
        found = items(Planner(lanes=33, most_parts=33, record_rows=rows), [10_000, 20_000, 30], [2, 2, 1])
        assert {item[0] for item in found if item[5] - item[4] < num_parts(item[3], item[2])} == cut
    assert items(Planner(33, 33, 0), [20_000]) == [[0, 0, 1, 20_000, 0, 33, 0]]


def test_each_part_is_in_one_item_and_records_do_not_overlap() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        seqs = int(generator.integers(1, 80))
        queries = generator.integers(1, 17, seqs).tolist()
        contexts = (np.array(queries) + generator.integers(0, int(generator.integers(1, 40_000)), seqs)).tolist()
        parts: dict[int, list[int]] = {}
        records: dict[int, int] = {}
        for seq, first_row, count, context, first, behind, record in items(H200, contexts, queries):
            assert (first_row, count, context) == (sum(queries[:seq]), queries[seq], contexts[seq])
            parts.setdefault(seq, []).extend(range(first, behind))
            if behind - first < num_parts(context, count):
                records[seq] = record
        assert [sorted(parts[seq]) for seq in range(seqs)] == [
            list(range(num_parts(context, count))) for context, count in zip(contexts, queries, strict=True)
        ]
        end = 0
        for seq, record in sorted(records.items(), key=lambda item: item[1]):
            assert record == end
            end += num_parts(contexts[seq], queries[seq]) * queries[seq]
        assert end <= H200.record_rows
