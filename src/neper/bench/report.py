"""What a benchmark leaves behind: one JSON file with every sample, and Markdown tables for people."""

from __future__ import annotations

import json
import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from neper import __version__, machine


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
        """Half the range over the median: how far repetitions of the same case lie apart."""
        return (max(self.samples) - min(self.samples)) / 2 / self.median


@dataclass(frozen=True)
class Ratio:
    """One figure that the benchmark exists for, with the bound it is held against."""

    name: str
    value: float
    bound: str
    met: bool


@dataclass(frozen=True)
class Table:
    """A table of the Markdown; its cells are padded, so that it reads as well on a terminal."""

    columns: list[str]
    rows: list[list[str]]
    title: str = ""

    def lines(self) -> list[str]:
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        body = [self.columns, ["-" * width for width in widths], *self.rows]
        padded = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in body]
        return [*([f"## {self.title}", ""] if self.title else []), *(f"| {row} |" for row in padded)]


@dataclass
class Report:
    """One run of one benchmark.

    Attributes:
        setup: what was measured, and on what; `conditions()` joins it.
        tables: what people read; empty = one table of all series.
        notes: what was left out and why, in sentences.
    """

    title: str
    setup: dict[str, Any]
    series: list[Series]
    ratios: list[Ratio]
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        setup = [f"- {key}: {value}" for key, value in {**self.setup, **conditions()}.items()]
        tables = self.tables or [_table_of_series(self.series)]
        ratios = [[r.name, f"{r.value:.3f}", r.bound, "yes" if r.met else "no"] for r in self.ratios]
        if ratios:
            title = "Bounds" if self.tables else ""
            tables = [*tables, Table(["figure", "measured", "bound", "met"], ratios, title)]
        parts = [[f"# {self.title}"], setup, *(table.lines() for table in tables), [f"- {note}" for note in self.notes]]
        return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"

    def to_json(self) -> str:
        data = {
            "title": self.title,
            "setup": self.setup,
            "machine": conditions(),
            "series": [asdict(s) for s in self.series],
            "ratios": [asdict(r) for r in self.ratios],
            "notes": self.notes,
        }
        return json.dumps(data, indent=2, ensure_ascii=False)

    def save(self, directory: Path, stem: str) -> None:
        """Write `stem`.json and `stem`.md into `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{stem}.md").write_text(self.markdown(), encoding="utf-8")
        (directory / f"{stem}.json").write_text(self.to_json(), encoding="utf-8")


def conditions() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "cpu": machine.cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "neper": __version__,
    }


def write(
    directory: Path, stem: str, title: str, setup: dict[str, Any], series: list[Series], ratios: list[Ratio]
) -> str:
    """Write `stem`.json and `stem`.md into `directory`; returns the Markdown."""
    report = Report(title, setup, series, ratios)
    report.save(directory, stem)
    return report.markdown()


def _table_of_series(series: list[Series]) -> Table:
    rows = [[s.name, f"{s.median:.1f} {s.unit}", f"±{s.spread:.1%}", str(len(s.samples))] for s in series]
    return Table(["case", "median", "spread", "samples"], rows)
