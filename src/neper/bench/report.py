"""The result of a benchmark: one structure, kept as JSON, and the one formatter that makes Markdown of it."""

from __future__ import annotations

import platform
import re
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from neper import __version__, machine

T = TypeVar("T")


@dataclass
class Series:
    """Samples of one measured case, in the order they were taken."""

    name: str
    unit: str
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the range over the median: the distance between repetitions of the same case."""
        return (max(self.samples) - min(self.samples)) / 2 / self.median


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        unit: of its numbers, where they have one.
        shown: the format of a cell, for str.format; a list fills several places. None is shown as `missing`.
    """

    name: str
    unit: str = ""
    shown: str = "{}"
    missing: str = "-"

    def cell(self, value: Any) -> str:
        if value is None:
            return self.missing
        return self.shown.format(*value) if isinstance(value, list) else self.shown.format(value)


@dataclass(frozen=True)
class Table:
    """Measured values, unrounded: text, numbers, lists of numbers, and None where nothing was measured."""

    title: str
    columns: list[Column]
    rows: list[list[Any]]


@dataclass(frozen=True)
class Figure:
    """One number that is the purpose of the benchmark, with its bound."""

    name: str
    value: float
    bound: str
    met: bool


@dataclass
class Report:
    """One run of one benchmark.

    Attributes:
        environment: the model and the machine of the measurement.
        notes: sentences about parts that were left out.
        series: every sample behind the tables.
    """

    title: str
    environment: dict[str, Any]
    tables: list[Table]
    figures: list[Figure]
    notes: list[str]
    series: list[Series]

    def save(self, directory: Path, stem: str) -> None:
        """Write `stem`.json and `stem`.md into `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        data = msgspec.json.format(msgspec.json.encode(self), indent=1)
        (directory / f"{stem}.json").write_bytes(data + b"\n")
        (directory / f"{stem}.md").write_text(markdown(self), encoding="utf-8")


def publish(report: Report, out: str | None, stem: str) -> None:
    """Save the report in the directory `out`, if there is one, and print it."""
    if out is not None:
        report.save(Path(out), stem)
    print(markdown(report), end="")


def read(path: Path) -> Report:
    """The report in a file that `Report.save` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Report)


def markdown(report: Report) -> str:
    """The report for people. Tables without rows are left out."""
    environment = [f"- {key}: {value}" for key, value in report.environment.items()]
    tables = [table for table in report.tables if table.rows]
    parts = [[f"# {report.title}"], environment, *map(_lines, tables), [] if tables else ["nothing was measured"]]
    if report.figures:
        columns = [Column("figure"), Column("measured", shown="{:.3f}"), Column("bound"), Column("met")]
        rows = [[figure.name, figure.value, figure.bound, "yes" if figure.met else "no"] for figure in report.figures]
        parts.append(_lines(Table("Bounds" if any(table.title for table in tables) else "", columns, rows)))
    parts.append([f"- {note}" for note in report.notes])
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _lines(table: Table) -> list[str]:
    """The table, its cells padded, so that it reads as well on a terminal."""
    header = [column.name for column in table.columns]
    rows = [[column.cell(v) for column, v in zip(table.columns, row, strict=True)] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    body = [header, ["-" * width for width in widths], *rows]
    padded = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in body]
    return [*([f"## {table.title}", ""] if table.title else []), *(f"| {row} |" for row in padded)]


def conditions() -> dict[str, Any]:
    """The software and the processor that the figures were taken on."""
    return {
        "cpu": machine.cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "neper": __version__,
    }


def turns(cases: Iterable[T], rounds: int, *, warm_up: int = 1) -> Iterator[tuple[T, bool, str]]:
    """Every case once per round, so that a slow moment of the machine affects all of them.

    Yields the case, True where the round counts (the first ones warm up), and the round's name.
    """
    cases = list(cases)
    for number in range(-warm_up, rounds):
        name = "warm-up" if number < 0 else f"round {number + 1} of {rounds}"
        for case in cases:
            yield case, number >= 0, name


def pairs(a: list[float], b: list[float]) -> Series:
    """a over b, sample by sample: neighbours in time, so that slow drift cancels."""
    return Series("", "x", [x / y for x, y in zip(a, b, strict=True)])


def between(first: list[float], last: list[float]) -> list[float]:
    """The mean of the first and the last sample of each round: even drift cancels."""
    return [(a + b) / 2 for a, b in zip(first, last, strict=True)]


def at_most(name: str, value: float, bound: float, *, spread: float = 0.0, more: str = "") -> Figure:
    """A figure that must not exceed the bound, or 1 plus the difference between repetitions of the same case."""
    limit = max(bound, 1 + spread)
    return Figure(name, value, f"<= {_limit(limit, bound)}{more}", value <= limit)


def at_least(name: str, value: float, bound: float, *, spread: float = 0.0) -> Figure:
    """A figure that must reach the bound, or 1 less the difference between repetitions of the same case."""
    limit = min(bound, 1 - spread) if spread else bound
    return Figure(name, value, f">= {_limit(limit, bound)}", value >= limit)


def _limit(limit: float, bound: float) -> str:
    return f"{bound}" if limit == bound else f"{limit:.4g} (A against A; else {bound})"


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def slug(name: str) -> str:
    """A name as part of a file name: NVIDIA H200 = nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
