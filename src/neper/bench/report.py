"""What a benchmark leaves behind: one JSON file with every sample, and one Markdown table for people."""

from __future__ import annotations

import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
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
    lines = [f"# {title}", ""]
    lines += [f"- {key}: {value}" for key, value in {**setup, **conditions()}.items()]
    lines += ["", "| case | median | spread | samples |", "| --- | --- | --- | --- |"]
    lines += [f"| {s.name} | {s.median:.1f} {s.unit} | ±{s.spread:.1%} | {len(s.samples)} |" for s in series]
    lines += ["", "| ratio | measured | bound | met |", "| --- | --- | --- | --- |"]
    lines += [f"| {r.name} | {r.value:.3f} | {r.bound} | {'yes' if r.met else 'no'} |" for r in ratios]
    markdown = "\n".join(lines) + "\n"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{stem}.md").write_text(markdown, encoding="utf-8")
    data = {
        "title": title,
        "setup": setup,
        "machine": conditions(),
        "series": [asdict(s) for s in series],
        "ratios": [asdict(r) for r in ratios],
    }
    (directory / f"{stem}.json").write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2))
    return markdown
