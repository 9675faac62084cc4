"""The picture of `neper bench engine`: the cost of scores at each concurrency, on the device and on the host."""

from __future__ import annotations

from pathlib import Path

from neper.bench.engine_cases import OFF_AGAIN
from neper.bench.engine_report import DECODE, SCORES_BOUND
from neper.bench.report import Report

PANELS = {"device": "scores computed on the device", "host": "whole rows scanned on the host"}
Lines = dict[str, list[tuple[int, float]]]


def lines(report: Report, group: str) -> Lines:
    """Case → (concurrency, TPOT over that without scores), ascending. Cases without a comparison are absent."""
    drawn: Lines = {}
    for table in report.tables:
        columns = [column.name for column in table.columns]
        for row in sorted(table.rows, key=lambda row: row[0]) if table.title == DECODE[group] else []:
            count, case, ratio = (row[columns.index(name)] for name in ("at a time", "case", "/ off"))
            if ratio is not None and (case.startswith("k=") or case == str(OFF_AGAIN)):
                drawn.setdefault(case, []).append((count, ratio))
    return drawn


def save(report: Report, directory: Path, stem: str) -> str | None:
    """Draw `stem`.png and `stem`.svg into the directory. Returns the reason where nothing was drawn, or None."""
    panels = {group: drawn for group in PANELS if (drawn := lines(report, group))}
    if not panels:
        return "no picture was drawn: nothing was compared with the same without scores"
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator
    except ImportError:
        return "no picture was drawn: matplotlib is not installed (pip install 'neper[bench]')"
    # Same figures, same file: ids from a fixed salt, and no date.
    with rc_context({"svg.hashsalt": "neper"}):
        figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
        figure.suptitle(report.title)
        for axes, (group, drawn) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            for case, points in drawn.items():
                style = "--" if case.endswith("sampled") else ":" if case == str(OFF_AGAIN) else "-"
                axes.plot(*zip(*points, strict=True), style, marker="o", label=case)
            axes.axhline(1.0, color="0.8", zorder=0)
            if group == "device":
                axes.axhline(SCORES_BOUND, color="tab:red", linewidth=0.8, zorder=0, label=f"bound {SCORES_BOUND:g}")
            sizes = sorted({count for points in drawn.values() for count, _ in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set(title=PANELS[group], xlabel="requests at a time", ylabel="TPOT / the same without scores")
            axes.legend()
        directory.mkdir(parents=True, exist_ok=True)
        figure.savefig(directory / f"{stem}.png", dpi=150)
        figure.savefig(directory / f"{stem}.svg", metadata={"Date": None})
    return None
