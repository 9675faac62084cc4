"""Form: how rows are kept in a file. A Reader and a Writer for each."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from neper.errors import InvalidRequestError
from neper.score.row import Row, ScoredRow

MAX_ROW_BYTES = 64 * 2**20
"""Bytes of a row in a file of text. A longer one is a failed row."""


class Reader(Protocol):
    """Reads the rows of a file.

    Attributes:
        columns: the columns of all rows; None where each row has its own.
    """

    columns: list[str] | None

    def rows(self, after: int = 0, needed: Container[str] | None = None) -> Iterator[Row]:
        """The rows after row number `after`. One that cannot be read has an error, and the others follow.

        Args:
            needed: columns that `values` must have, where `raw` has them all; None = all.
        """
        ...


class Writer(Protocol):
    """Makes a file of scored rows: bytes that are appended to one file, and the result of that."""

    def begin(self, rows: Sequence[ScoredRow]) -> bytes:
        """The beginning of the file, where these rows are the first. They decide on what is not known otherwise."""
        ...

    def resume(self, pieces: Path) -> None:
        """Go on after what was appended before."""
        ...

    def encode(self, rows: list[ScoredRow]) -> list[bytes]:
        """The rows' bytes, to be appended in this order: those of a row may come with those of one before it.

        Raises:
            InvalidRequestError: a row has something that this form, or the file's columns, cannot hold.
        """
        ...

    def finish(self, pieces: Path, target: Path) -> None:
        """Make the result of what was appended, in one piece or not at all."""
        ...


def columns_of(row: ScoredRow) -> dict[str, Any]:
    """All columns of a scored row: its own, then the scores."""
    return {**row.values, **(row.scores or {})}


def check_columns(row: ScoredRow, columns: list[str]) -> None:
    """Raise an InvalidRequestError where a row has a column that a file does not."""
    for name in row.values:
        if name not in columns:
            raise InvalidRequestError(f"the column {name!r} is in none of the first rows, which fix the columns of out")


def lines(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines of a file, with their ends. None for one of more than MAX_ROW_BYTES, of which little is held."""
    while line := file.readline(MAX_ROW_BYTES):
        if len(line) < MAX_ROW_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while (rest := file.readline(2**20)) and not rest.endswith(b"\n"):
            pass
        yield None
