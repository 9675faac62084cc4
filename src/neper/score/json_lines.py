"""JSON Lines: an object a line. What a line holds is copied as it is."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from neper.errors import InvalidRequestError
from neper.score.form import MAX_ROW_BYTES, lines
from neper.score.row import Row, ScoredRow

_BOM = b"\xef\xbb\xbf"


class JsonLinesReader:
    """Reads JSON Lines. Empty lines are no rows, but have numbers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.columns: list[str] | None = None

    def rows(self, after: int = 0, needed: Container[str] | None = None) -> Iterator[Row]:
        with self._path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size or 1
            place = 0
            for number, line in enumerate(lines(file), start=1):
                place = file.tell() if line is None else place + len(line)
                if number == 1 and line is not None:
                    line = line.removeprefix(_BOM)
                if number > after and (line is None or line.strip()):
                    yield _row(number, line, min(1.0, place / total))


def _row(number: int, line: bytes | None, done: float) -> Row:
    if line is None:
        return Row(number, {}, f"the line has more than {MAX_ROW_BYTES} bytes", done=done)
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return Row(number, {}, f"the line is no JSON: {error}", done=done)
    if not isinstance(values, dict):
        return Row(number, {}, "the line is JSON, but no object", done=done)
    return Row(number, values, raw=line.strip(), size=len(line), done=done)


class JsonLinesWriter:
    """Writes JSON Lines."""

    def begin(self, rows: Sequence[ScoredRow]) -> bytes:
        return b""

    def resume(self, pieces: Path) -> None:
        """Nothing is to be known."""

    def encode(self, rows: list[ScoredRow]) -> list[bytes]:
        return [_line(row) for row in rows]

    def finish(self, pieces: Path, target: Path) -> None:
        pieces.replace(target)


def to_json(value: Any) -> bytes:
    """JSON of a value that a row may have; numbers in the shortest form that reads back as the same, -inf as null.

    Raises:
        InvalidRequestError: JSON cannot hold it.
    """
    try:
        return orjson.dumps(value, _plain, orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:
        raise InvalidRequestError(f"JSON cannot hold the row: {error}") from None


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array that is not contiguous, or of another kind
        return value.tolist()
    if isinstance(value, bytes):
        raise TypeError("bytes are no JSON")
    return str(value)


def _line(row: ScoredRow) -> bytes:
    if not isinstance(row.row.raw, bytes):
        return to_json({**row.values, **(row.scores or {})}) + b"\n"
    own = row.row.raw[:-1].rstrip()
    return own + (b"," if row.values else b"") + to_json(row.scores)[1:] + b"\n"
