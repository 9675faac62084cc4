"""A run of `neper score`: a file in, a file of scores out, and an exit code."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neper.config import EngineConfig, ScoreConfig
from neper.errors import ConfigError, InvalidRequestError, StartupError
from neper.progress import ProgressLine
from neper.score.form import Reader, Writer
from neper.score.formats import form_of, open_reader, open_writer
from neper.score.isolation import isolated
from neper.score.meter import Meter
from neper.score.mode import Field
from neper.score.output import Output
from neper.score.row import Row, ScoredRow
from neper.score.scorer import MODES, Scorer

if TYPE_CHECKING:
    from neper.engine.llm import LLM

SOME_FAILED = 3
_HASHED = 2**20
_ENGINE = ("model", "device", "dtype", "max_model_len")  # the settings that change scores


def run(
    source: Path,
    out: Path | None,
    errors: Path | None,
    prefix: str,
    config: ScoreConfig,
    engine: EngineConfig,
    load: Callable[[EngineConfig], LLM] | None = None,
) -> int:
    """Score a file. Returns the exit code: 0, or SOME_FAILED where rows failed.

    Args:
        out: by default beside the input, with `.scored` in its name.
        errors: by default beside `out`.
        prefix: stands before the names of the columns that are added.
        load: makes the LLM, once it is known that there are rows to score. Default: loads it.

    Raises:
        NeperError: the run cannot begin, or cannot go on.
        KeyboardInterrupt: it was interrupted; the same call goes on.
    """
    out = source.with_name(f"{source.stem}.scored{source.suffix}") if out is None else out
    errors = out.with_name(f"{out.stem}.errors.jsonl") if errors is None else errors
    _check_different({"the input": source, "--out": out, "--errors": errors})
    same_form = form_of(out) == form_of(source)
    reader = open_reader(source)
    mode = MODES[config.mode]
    fields = {prefix + name: field for name, field in mode.fields(config).items()}
    _check_columns(source, reader, mode.columns(config), fields)
    engine = dataclasses.replace(engine, max_logprobs=max(engine.max_logprobs, config.top or 0))
    identity = fingerprint(source)
    described = {"input": identity, "prefix": prefix, "columns": list(fields), **dataclasses.asdict(config)}
    described |= {name: getattr(engine, name) for name in _ENGINE}
    with Output(out, errors, described) as output:
        writer = open_writer(out, reader, fields)
        if output.last.pieces and output.pieces.exists():
            writer.resume(output.pieces)
        if not output.last.complete:
            rows = reader.rows(output.last.row, mode.columns(config) if same_form else None)
            _score(rows, _Sink(writer, output, prefix), config, engine, load or _load)
            if fingerprint(source) != identity:
                raise StartupError(f"{source} changed while it was scored; the scores are in {output.pieces}")
        output.finish(writer)
        last = output.last
    notes = [f"{last.scored:,} rows scored: {out}"] + ([f"{last.failed:,} failed: {errors}"] if last.failed else [])
    print("; ".join(notes), file=sys.stderr)
    return SOME_FAILED if last.failed else 0


def fingerprint(path: Path) -> dict[str, Any]:
    """The facts that change with a file: its size, its time, and a hash of its beginning and end."""
    found = path.stat()
    with path.open("rb") as file:
        beginning = file.read(_HASHED)
        file.seek(max(0, found.st_size - _HASHED))
        digest = hashlib.sha256(beginning + file.read(_HASHED)).hexdigest()
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "sha256": digest}


def _load(engine: EngineConfig) -> LLM:
    from neper.engine.llm import LLM

    with ProgressLine(sys.stderr) as progress:
        return LLM(progress=progress, **dataclasses.asdict(engine))


def _score(
    rows: Iterator[Row], sink: _Sink, config: ScoreConfig, engine: EngineConfig, load: Callable[[EngineConfig], LLM]
) -> None:
    """Score these rows. No model is loaded where there are none."""
    first = next(rows, None)
    if first is None:
        sink.write([])
        return
    if sink.row:
        print(f"going on after row {sink.row:,}", file=sys.stderr)
    scorer = Scorer(load(engine), config)
    try:
        with Meter(sys.stderr, done=first.done) as meter:
            for window in scorer.score(chain([first], rows)):
                sink.write(window)
                meter.advance(len(window), sum(row.num_tokens for row in window), window[-1].row.done)
    except KeyboardInterrupt:
        print(f"\nstopped after row {sink.row:,}; the same command goes on from there", file=sys.stderr)
        raise


class _Sink:
    """Takes windows of scored rows to an output."""

    def __init__(self, writer: Writer, output: Output, prefix: str) -> None:
        self._writer = writer
        self._output = output
        self._prefix = prefix

    @property
    def row(self) -> int:
        """The number of the last row that is written."""
        return self._output.last.row

    def write(self, window: list[ScoredRow]) -> None:
        rows = [_named(row, self._prefix) for row in window]
        scored = [row for row in rows if row.scores is not None]
        head = b"" if self._output.last.pieces else self._writer.begin(scored)
        pieces = isolated(self._writer.encode, scored, InvalidRequestError) if scored else []
        failures = {row.number: row.error or "" for row in rows if row.scores is None}
        failures |= {row.number: str(p) for row, p in zip(scored, pieces, strict=True) if isinstance(p, Exception)}
        data = head + b"".join(piece for piece in pieces if isinstance(piece, bytes))
        last = rows[-1].number if rows else self.row
        self._output.commit(last, data, len(rows) - len(failures), sorted(failures.items()))


def _named(row: ScoredRow, prefix: str) -> ScoredRow:
    """The row with the names of its scores as they are written; a failed one where it has such a column already."""
    if row.scores is None:
        return row
    scores = {prefix + name: value for name, value in row.scores.items()}
    taken = sorted(scores.keys() & row.values.keys())
    error = f"the row has a column {taken[0]!r} already; --prefix names the added ones differently" if taken else None
    return dataclasses.replace(row, scores=None if taken else scores, error=error)


def _check_different(paths: dict[str, Path]) -> None:
    """Raise a ConfigError where two of these are the same file."""
    found: dict[Path, str] = {}
    for name, path in paths.items():
        other = found.setdefault(path.resolve(), name)
        if other != name:
            raise ConfigError(f"{other} and {name} are the same file, {path}; name another one")


def _check_columns(source: Path, reader: Reader, needed: tuple[str, ...], fields: dict[str, Field]) -> None:
    """Raise a ConfigError where a file whose rows are alike has not what is needed, or has what is added."""
    if reader.columns is None:
        return
    for name in needed:
        if name not in reader.columns:
            there = ", ".join(reader.columns)
            raise ConfigError(f"{source} has no column {name!r} but {there}; options name the columns to score")
    for name in fields:
        if name in reader.columns:
            raise ConfigError(f"{source} has a column {name!r} already; --prefix names the added ones differently")
