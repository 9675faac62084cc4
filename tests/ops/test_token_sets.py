"""Sets of token ids: what their flat form holds, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neper.errors import InvalidRequestError
from neper.ops.logprobs.token_sets import LISTED_WHOLE, TokenSets

SETS = [[5, 3, 5], [], [9], list(range(LISTED_WHOLE, -1, -1)), []]


def rows(sets: TokenSets) -> list[list[int]]:
    """The sets read by offsets, as a kernel reads them, after they agree with `row`."""
    begins, ends = sets.offsets[:-1].tolist(), sets.offsets[1:].tolist()
    read = [sets.ids[begin:end].tolist() for begin, end in zip(begins, ends, strict=True)]
    assert read == [sets.row(i).tolist() for i in range(len(sets.lengths))]
    assert [len(ids) for ids in read] == sets.lengths.tolist()
    return read


def test_sets_are_distinct_and_ascending() -> None:
    sets = TokenSets.of(SETS)
    assert rows(sets) == [[3, 5], [], [9], list(range(LISTED_WHOLE + 1)), []]
    assert sets.ids.dtype == sets.offsets.dtype == torch.int32
    assert (sets.longest, sets.longest_listed, sets.max_id) == (LISTED_WHOLE + 1, 2, LISTED_WHOLE)


def test_empty_sets() -> None:
    for given in ([], [[]], [[], []]):
        sets = TokenSets.of(given)
        assert rows(sets) == given
        assert (sets.longest, sets.longest_listed, sets.max_id) == (0, 0, -1)


@pytest.mark.parametrize("part", [slice(0, 5), slice(1, 3), slice(2, 99), slice(3, 4), slice(4, 5), slice(2, 2)])
def test_a_part_of_the_rows(part: slice) -> None:
    whole = TokenSets.of(SETS)
    assert rows(whole.take(part)) == rows(whole)[part]
    assert rows(whole.take(slice(1, 5)).take(slice(1, 3))) == rows(whole)[2:4]


def test_arrays_are_sets_too_and_a_negative_id_is_an_error() -> None:
    assert rows(TokenSets.of([np.array([2, 1], dtype=np.int32)])) == [[1, 2]]
    with pytest.raises(InvalidRequestError, match="-4"):
        TokenSets.of([[1], [2, -4]])
