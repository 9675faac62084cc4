"""Score texts: packed rows become lists of ids and the JSON text of every number, many rows in one pass.

A pass costs a few microseconds of numpy, even for few rows. So the rows of one engine step are collected for all
streams while their chunks are taken in. The first stream to be written converts them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal, localcontext
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from neper.types import LISTED_WHOLE, PackedRows

_DIGITS = 100  # of sums of float32: more than any of them has

# JSON has no -inf. This is the one place where it becomes a number.
FLOOR = np.float32(-9999.0)


class ScoreText(NamedTuple):
    """One row: its int32 words as packed, and the JSON text of the token's logprob and then its alternatives'."""

    words: list[int]
    numbers: list[bytes]


def read_scores(rows: PackedRows, k: int | None = None) -> list[ScoreText]:
    """Every row with its first `k` alternatives (default: all), numbers in the shortest form that float32 needs.

    Raises ValueError for NaN. An invalid row must never get here, or out of here.
    """
    scored = _read(rows.top_k, rows.data, k)
    if scored is None:
        raise ValueError("a logprob is not a number")
    return scored


def running_sums(numbers: Iterable[bytes]) -> list[Decimal]:
    """[n + 1] sums of the first 0, 1, … n numbers as they are written, without an error of rounding."""
    with localcontext() as context:
        context.prec = _DIGITS
        return list(accumulate((Decimal(number.decode()) for number in numbers), initial=Decimal(0)))


def difference(later: Decimal, earlier: Decimal) -> float:
    """The sum of the numbers between two running sums: the nearest float."""
    with localcontext() as context:
        context.prec = _DIGITS
        return float(later - earlier)


class PendingScores:
    """Rows whose texts are not needed yet."""

    __slots__ = ("_batch", "_scored", "rows")

    def __init__(self, batch: ScoreBatch, rows: PackedRows) -> None:
        self.rows = rows
        self._batch = batch
        self._scored: list[ScoreText] | None = None

    def read(self) -> list[ScoreText]:
        """The scores as `read_scores` gives them. Converts all other pending rows too."""
        if self._scored is None:
            self._batch.convert(self.rows.top_k)
        # Still None if one number of the batch was NaN. Then each converts its own rows.
        return read_scores(self.rows) if self._scored is None else self._scored

    def take(self, scored: list[ScoreText]) -> None:
        self._scored = scored


class ScoreBatch:
    """The rows that are pending, of all requests."""

    def __init__(self) -> None:
        self._pending: dict[int | None, list[PendingScores]] = {}

    def add(self, rows: PackedRows) -> PendingScores:
        pending = PendingScores(self, rows)
        self._pending.setdefault(rows.top_k, []).append(pending)
        return pending

    def convert(self, top_k: int | None) -> None:
        batch = self._pending.pop(top_k, [])
        scored = _read(top_k, b"".join([pending.rows.data for pending in batch]), None)
        if scored is None:
            return
        start = 0
        for pending in batch:
            end = start + len(pending.rows)
            pending.take(scored[start:end])
            start = end


def listed_ids(words: Sequence[int], k: int) -> Sequence[int]:
    """The ids of a row's first `k` alternatives, without unused places."""
    ids = words[3 : 3 + k]
    return ids[: ids.index(-1)] if k and ids[-1] < 0 else ids


@lru_cache(maxsize=256)
def _columns(top_k: int, k: int) -> npt.NDArray[np.intp]:
    """The columns of a packed row with the token's logprob and those of its first `k` alternatives."""
    return np.array([2, *range(3 + top_k, 3 + top_k + k)], dtype=np.intp)


def _read(top_k: int | None, data: bytes, k: int | None) -> list[ScoreText] | None:
    """The scores of packed rows; None when a number is NaN or +inf."""
    if top_k is None:
        raise ValueError("these rows carry no scores")
    if not data:
        return []
    if k is not None and k > top_k:
        raise ValueError(f"rows with {top_k} alternatives cannot give {k}")
    words = np.frombuffer(data, np.int32).reshape(-1, 3 + 2 * top_k)
    k = top_k if k is None else k
    # Columns of whole vocabularies would fill the cache's memory.
    columns = _columns(top_k, k) if k <= LISTED_WHOLE else _columns.__wrapped__(top_k, k)
    scores = words.view(np.float32).take(columns, 1)
    # np.maximum lets NaN through, and orjson writes it as null.
    text = orjson.dumps(np.maximum(scores, FLOOR, scores), option=orjson.OPT_SERIALIZE_NUMPY)
    if b"null" in text:
        return None
    numbers = [row.split(b",") for row in text[2:-2].split(b"],[")]
    return list(map(ScoreText, words.tolist(), numbers))
