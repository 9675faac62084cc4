"""The report of `neper bench kernels`: tables and bounds from samples. Needs no GPU."""

from __future__ import annotations

import re
from typing import Any

from neper.bench.kernel_cases import Case, Plan
from neper.bench.report import Column, Report, Series, Table, at_most, conditions
from neper.types import packed_width

NEPER = "neper"
SPREAD = Column("spread", "", "±{:.1%}")


def series_name(case: Case, state: str, way: str) -> str:
    """The key of a series in the JSON."""
    return f"{case}, {state}: {way}"


def report(
    card: str,
    environment: dict[str, Any],
    series: dict[str, Series],
    notes: list[str],
    plan: Plan,
    baselines: tuple[str, ...],
) -> Report:
    """The report of a run from its samples, in which neper was timed beside these baselines."""
    copied = 2 * plan.copy_bytes / series["copy"].median / 1e6
    environment = {**environment, "copy": f"{copied:.2f} TB/s read and written, ±{series['copy'].spread:.1%}"}
    sets = [
        [str(case), found.median, found.spread]
        for case in plan.set_cases
        for found in [series[series_name(plan.set_rows, "warm", str(case))]]
    ]
    host = []
    for case in plan.host_cases:
        for way, what, row_bytes in (
            ("host", "the whole row, scanned by torch on the CPU", case.nbytes // case.rows),
            ("device", "neper's scores, packed", 4 * packed_width(case.top_k)),
        ):
            found = series[series_name(case, "wall clock", way)]
            host.append([str(case), what, found.median, found.spread, row_bytes])
    time = Column("us", "us", "{:.1f}")
    whose = "" if re.search(r"\bH200\b", card) else f" on an H200; this is {card}"
    return Report(
        title=f"neper's reduction on {card}",
        environment=environment | conditions(),
        tables=[
            _times("Logits warm in the L2 where they fit, us", "warm", plan.row_cases, series, copied, baselines),
            _times("Logits not in the L2, us", "cold", plan.row_cases, series, copied, baselines),
            Table(f"Sets of ids: {plan.set_rows}, warm", [Column("a row has"), time, SPREAD], sets),
            Table(
                "Until the scores are in host memory, wall clock",
                [Column("case"), Column("copied"), time, SPREAD, Column("bytes a row", "bytes", "{:,}")],
                host,
            ),
        ],
        figures=[
            at_most(f"{case}, warm, us", series[series_name(case, "warm", NEPER)].median, case.goal, more=whose)
            for case in plan.row_cases
            if case.goal is not None
        ],
        notes=[*notes, "of copy: bytes of the logits a second against what a copy moves; above 100 %, from the L2"],
        series=list(series.values()),
    )


def _times(
    title: str,
    state: str,
    cases: tuple[Case, ...],
    series: dict[str, Series],
    copied: float,
    baselines: tuple[str, ...],
) -> Table:
    rows = []
    for case in cases:
        ours = series.get(series_name(case, state, NEPER))
        if ours is None:  # larger than the L2: the other table has it
            continue
        speed = case.nbytes / ours.median / 1e6
        theirs = [series.get(series_name(case, state, way)) for way in baselines]
        ratios = [[found.median, found.median / ours.median] if found else None for found in theirs]
        rows.append([str(case), ours.median, ours.spread, speed, speed / copied, *ratios])
    columns = [Column("case"), Column(NEPER, "us", "{:.1f}"), SPREAD]
    columns += [Column("TB/s", "TB/s", "{:.2f}"), Column("of copy", "", "{:.0%}")]
    columns += [Column(way, "us", "{:.1f} ({:.1f} x)", "not measured") for way in baselines]
    return Table(title, columns, rows)
