"""Parquet: rows as Arrow batches, so that columns of all types come out as they went in.

A Parquet file cannot be appended to. So windows are appended to a file of Arrow streams, one after the other, and the
Parquet file is made of those at the end.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from neper.errors import ConfigError, InvalidRequestError, StartupError
from neper.files import one_line
from neper.score.form import check_columns
from neper.score.mode import Field
from neper.score.row import Row, ScoredRow

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:
    raise ConfigError("Parquet needs pyarrow: pip install 'neper[arrow]'") from None

BATCH_ROWS = 256
GROUP_BYTES = 32 * 2**20
"""Bytes in memory of a row group that is written."""

_BUFFER = 2**20
_NO_VALUE = (ValueError, OverflowError, TypeError, pa.ArrowException)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise StartupError(f"cannot read {path}: {one_line(error)}") from None


class ParquetReader:
    """Reads Parquet, a batch of rows at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _reading(path), self._open() as file:
            self.schema: Any = file.schema_arrow
        self.columns: list[str] | None = list(self.schema.names)
        if len(set(self.schema.names)) < len(self.schema.names):
            raise ConfigError(f"{path} has several columns of the same name")

    def rows(self, after: int = 0, needed: Container[str] | None = None) -> Iterator[Row]:
        names = [name for name in self.schema.names if needed is None or name in needed]
        with _reading(self._path), self._open() as file:
            metadata = file.metadata
            number = 0
            for group in range(metadata.num_row_groups):
                if number + metadata.row_group(group).num_rows <= after:
                    number += metadata.row_group(group).num_rows
                    continue
                # From the beginning of the group even where some are skipped: so sizes are the same each time.
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], use_threads=False):
                    size = batch.nbytes // max(1, batch.num_rows)
                    for place in range(batch.num_rows):
                        number += 1
                        if number > after:
                            yield _row(number, batch.slice(place, 1), names, size, number / metadata.num_rows)

    def _open(self) -> Any:
        return pq.ParquetFile(self._path, buffer_size=_BUFFER, pre_buffer=False)


def _row(number: int, batch: Any, names: list[str], size: int, done: float) -> Row:
    try:
        values = {name: batch.column(name)[0].as_py() for name in names}
    except _NO_VALUE as error:
        return Row(number, {}, f"a value cannot be read: {one_line(error)}", raw=batch, size=size, done=done)
    return Row(number, values, raw=batch, size=size, done=done)


class ParquetWriter:
    """Writes Parquet. The types of columns are the input's; of other forms they are those of the first rows.

    Args:
        columns: those of the input; None where each row has its own.
        schema: of the input, if that is Parquet.
    """

    def __init__(self, columns: list[str] | None, fields: dict[str, Field], schema: Any = None) -> None:
        self._columns = columns
        self._own = schema
        self._scores = pa.schema([pa.field(name, _arrow_type(field)) for name, field in fields.items()])

    def begin(self, rows: Sequence[ScoredRow]) -> bytes:
        if self._own is None:
            names = self._columns or list(dict.fromkeys(name for row in rows for name in row.values))
            values = {name: [row.values.get(name) for row in rows] for name in names if name not in self._scores.names}
            self._own = pa.schema([pa.field(name, _type_of(column)) for name, column in values.items()])
        return _stream(self._schema.empty_table())

    def resume(self, pieces: Path) -> None:
        if self._own is None:
            with pa.OSFile(str(pieces)) as file:
                schema = pa.ipc.open_stream(file).schema
            self._own = pa.schema([field for field in schema if field.name not in self._scores.names])

    def encode(self, rows: list[ScoredRow]) -> list[bytes]:
        scores = [row.scores or {} for row in rows]
        try:
            own = self._own_columns(rows)
            added = [pa.array([_nested(values[field.name]) for values in scores], field.type) for field in self._scores]
            piece = _stream(pa.Table.from_arrays([*own, *added], schema=self._schema))
        except _NO_VALUE as error:
            raise InvalidRequestError(f"the row does not fit the types of the columns: {one_line(error)}") from None
        return [piece, *[b""] * (len(rows) - 1)]

    def finish(self, pieces: Path, target: Path) -> None:
        new = target.with_name(target.name + ".new")
        total = pieces.stat().st_size
        with pa.OSFile(str(pieces)) as file, pq.ParquetWriter(new, self._schema) as out:
            group: list[Any] = []
            while file.tell() < total:
                group.append(pa.ipc.open_stream(file).read_all())
                if sum(table.nbytes for table in group) >= GROUP_BYTES or file.tell() >= total:
                    out.write_table(pa.concat_tables(group))
                    group = []
        with new.open("rb") as made:
            os.fsync(made.fileno())
        new.replace(target)
        pieces.unlink()

    @property
    def _schema(self) -> Any:
        schema = self._own
        for field in self._scores:
            schema = schema.append(field)
        return schema

    def _own_columns(self, rows: list[ScoredRow]) -> list[Any]:
        if isinstance(rows[0].row.raw, pa.RecordBatch):
            table = pa.Table.from_batches([row.row.raw for row in rows]).unify_dictionaries()
            return list(table.combine_chunks().columns)
        for row in rows:
            check_columns(row, self._own.names)
        return [pa.array([row.values.get(field.name) for row in rows], field.type) for field in self._own]


def _stream(table: Any) -> bytes:
    """The table as a whole Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _arrow_type(field: Field) -> Any:
    kind = getattr(pa, field.element)()
    for _ in range(field.depth):
        kind = pa.list_(kind)
    return kind


def _type_of(values: list[Any]) -> Any:
    """The type of a column by its first values; text where they are all missing."""
    try:
        kind = pa.array(values).type
    except _NO_VALUE:  # of several types: that of the first one
        kind = pa.array([next(value for value in values if value is not None)]).type
    return pa.string() if pa.types.is_null(kind) else kind


def _nested(value: Any) -> Any:
    """An array of two dimensions as a list of its rows, which Arrow takes."""
    return list(value) if isinstance(value, np.ndarray) and value.ndim > 1 else value
