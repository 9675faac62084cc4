"""The formats of files: which form a name's ending says."""

from __future__ import annotations

from pathlib import Path

from neper.errors import ConfigError, StartupError
from neper.score.csv_rows import CsvReader, CsvWriter
from neper.score.form import Reader, Writer
from neper.score.json_lines import JsonLinesReader, JsonLinesWriter
from neper.score.mode import Field

_ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}


def form_of(path: Path) -> str:
    """jsonl, csv or parquet; ConfigError for another ending."""
    form = _ENDINGS.get(path.suffix.lower())
    if form is None:
        raise ConfigError(f"{path} must end in {', '.join(_ENDINGS)}: the ending says how rows are kept")
    return form


def open_reader(path: Path) -> Reader:
    """The reader of a file.

    Raises:
        StartupError: there is no such file, or its beginning is not of the form that its name says.
    """
    form = form_of(path)
    if not path.is_file():
        raise StartupError(f"{path} is no file" if path.exists() else f"there is no {path}")
    try:
        if form == "jsonl":
            path.open("rb").close()
            return JsonLinesReader(path)
        if form == "csv":
            return CsvReader(path)
        from neper.score.parquet import ParquetReader

        return ParquetReader(path)
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None


def open_writer(path: Path, reader: Reader, fields: dict[str, Field]) -> Writer:
    """The writer of a file of the reader's rows with these fields."""
    form = form_of(path)
    if form == "jsonl":
        return JsonLinesWriter()
    if form == "csv":
        return CsvWriter(reader.columns, fields)
    from neper.score.parquet import ParquetWriter

    return ParquetWriter(reader.columns, fields, getattr(reader, "schema", None))
