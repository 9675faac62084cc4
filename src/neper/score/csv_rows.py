"""CSV: a header and records. Lists and objects among the scores are JSON in a field."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from neper.errors import ConfigError
from neper.score.form import MAX_ROW_BYTES, check_columns, columns_of, lines
from neper.score.json_lines import to_json
from neper.score.mode import Field
from neper.score.row import Row, ScoredRow


class _Lines:
    """The lines of a CSV file as text. One that is none is an error, after which the next line follows."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")
        self._lines = lines(self.file)
        self._first = True
        self.place = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.place = self.file.tell() if line is None else self.place + len(line)
        if line is None:
            raise csv.Error(f"the line has more than {MAX_ROW_BYTES} bytes")
        encoding, self._first = "utf-8-sig" if self._first else "utf-8", False
        try:
            return line.decode(encoding)
        except UnicodeDecodeError as error:
            raise csv.Error(f"the line is not UTF-8: {error}") from None


class CsvReader:
    """Reads CSV in UTF-8, with or without a BOM, with commas and double quotes; the first record names the columns.

    An empty line is no row and has no number.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        csv.field_size_limit(MAX_ROW_BYTES)  # for the process: there is no other way to say it
        found = next(self._records(), None)
        if found is None or isinstance(found[0], str):
            raise ConfigError(f"{path} has no header: {found[0] if found else 'it is empty'}")
        self.columns: list[str] | None = found[0]
        twice = {name for name in found[0] if found[0].count(name) > 1}
        if twice:
            raise ConfigError(f"{path} has columns of the same name: {', '.join(map(repr, sorted(twice)))}")

    def rows(self, after: int = 0, needed: Container[str] | None = None) -> Iterator[Row]:
        assert self.columns is not None
        records = self._records()
        next(records)
        for number, (record, done) in enumerate(records, start=1):
            if number <= after:
                continue
            if isinstance(record, str):
                yield Row(number, {}, record, done=done)
            elif len(record) != len(self.columns):
                error = f"the row has {len(record)} fields, the header {len(self.columns)}"
                yield Row(number, {}, error, done=done)
            else:
                values = dict(zip(self.columns, record, strict=True))
                yield Row(number, values, size=sum(map(len, record)), done=done)

    def _records(self) -> Iterator[tuple[list[str] | str, float]]:
        """The records, or an error in place of one, each with the part of the file that ends with it."""
        source = _Lines(self._path)
        with source.file:
            total = os.fstat(source.file.fileno()).st_size or 1
            records = csv.reader(source, strict=True)
            while True:
                record: list[str] | str
                try:
                    record = next(records)
                except StopIteration:
                    return
                except csv.Error as error:
                    record = f"the row is no CSV: {error}"
                if record:
                    yield record, min(1.0, source.place / total)


class CsvWriter:
    """Writes CSV, with the columns of the input or, where each row has its own, of the first rows."""

    def __init__(self, columns: list[str] | None, fields: dict[str, Field]) -> None:
        self._columns = columns
        self._fields = fields

    def begin(self, rows: Sequence[ScoredRow]) -> bytes:
        if self._columns is None:
            self._columns = list(dict.fromkeys(name for row in rows for name in row.values if name not in self._fields))
        return _record([*self._columns, *self._fields])

    def resume(self, pieces: Path) -> None:
        with pieces.open(encoding="utf-8", newline="") as file:
            self._columns = next(csv.reader(file))[: -len(self._fields)]

    def encode(self, rows: list[ScoredRow]) -> list[bytes]:
        assert self._columns is not None
        encoded = []
        for row in rows:
            check_columns(row, self._columns)
            found = columns_of(row)
            encoded.append(_record([_field(found.get(name)) for name in (*self._columns, *self._fields)]))
        return encoded

    def finish(self, pieces: Path, target: Path) -> None:
        pieces.replace(target)


def _record(fields: list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue().encode("utf-8", "surrogatepass")


def _field(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (str, float)) or type(value) is int:
        return str(value)
    return to_json(value).decode()
