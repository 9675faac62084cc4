"""Rows: as they are read, and as they are scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """A row that is to be scored.

    Attributes:
        number: its place, from 1: the line in JSON Lines (empty lines count), the record in CSV.
        values: its columns; of a Parquet file the needed ones alone, where the others stay in `raw`.
        error: the reason why it cannot be read.
        raw: the row in the form of its file: a line of JSON, or an Arrow batch of one row.
        size: bytes that it takes.
        done: the part of the file that ends with it, 0 to 1.
    """

    number: int
    values: Mapping[str, Any]
    error: str | None = None
    raw: Any = None
    size: int = 0
    done: float = 0.0


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row and its scores, or the reason why it has none.

    Attributes:
        number: its place, from 1.
        values: the row's own columns.
        scores: the columns that scoring adds; None where it failed. Lists per token are arrays, [n] or [n, top].
        error: the reason of the failure; None where there are scores.
    """

    row: Row
    scores: dict[str, Any] | None
    error: str | None = None

    @property
    def number(self) -> int:
        return self.row.number

    @property
    def values(self) -> Mapping[str, Any]:
        return self.row.values

    @property
    def num_tokens(self) -> int:
        """Tokens that were scored."""
        count = 0 if self.scores is None else self.scores["num_tokens"]
        return count if isinstance(count, int) else sum(count)
