"""The report of `neper bench kernels`: tables and bounds from samples. Needs no GPU."""

from __future__ import annotations

import re
from typing import Any

from neper.bench.kernel_cases import Case, Plan
from neper.bench.report import Ratio, Report, Series, Table

NEPER = "neper"
BASELINES = ("torch log_softmax + topk", "torch logsumexp + topk", "torch.compile(logsumexp + topk)")
COLD_COMPILE_SECONDS = 8.0
WARM_COMPILE_SECONDS = 1.0


def slug(name: str) -> str:
    """A card's name as part of a file name: NVIDIA H200 = nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def row_words(top_k: int) -> int:
    """int32 words that are copied for a row: id, rank (0 = invalid), logprob, then k ids and k logprobs."""
    return 3 + 2 * top_k


def series_name(case: Case, state: str, way: str) -> str:
    """The key of a series in the JSON."""
    return f"{case}, {state}: {way}"


def report(card: str, setup: dict[str, Any], series: dict[str, Series], notes: list[str], plan: Plan) -> Report:
    """The report of a run from its samples."""
    copied = 2 * plan.copy_bytes / series["copy"].median / 1e6
    setup = {**setup, "copy": f"{copied:.2f} TB/s read and written, ±{series['copy'].spread:.1%}"}
    warm = _times("Logits warm in the L2 where they fit, us", "warm", plan.row_cases, series, copied)
    cold = _times("Logits not in the L2, us", "cold", plan.row_cases, series, copied)
    sets = [
        [str(case), f"{found.median:.1f}", f"±{found.spread:.1%}"]
        for case in plan.set_cases
        for found in [series[series_name(plan.set_rows, "warm", str(case))]]
    ]
    host = []
    for case in plan.host_cases:
        ways = {
            "host": ("the whole row, scanned by torch on the CPU", case.nbytes // case.rows),
            "device": ("neper's scores, packed", 4 * row_words(case.top_k)),
        }
        for way, (what, row_bytes) in ways.items():
            found = series[series_name(case, "wall clock", way)]
            host.append([str(case), what, f"{found.median:.1f}", f"±{found.spread:.1%}", f"{row_bytes:,}"])
    until = "Until the scores are in host memory, wall clock"
    tables = [
        warm,
        *([cold] if cold.rows else []),
        Table(["a row has", "us", "spread"], sets, title=f"Sets of ids: {plan.set_rows}, warm"),
        Table(["case", "copied", "us", "spread", "bytes a row"], host, title=until),
    ]
    return Report(
        title=f"neper's reduction on {card}",
        setup=setup,
        series=list(series.values()),
        ratios=_bounds(card, series, plan.row_cases),
        tables=tables,
        notes=[*notes, "of copy: bytes of the logits a second against what a copy moves; above 100 %, from the L2"],
    )


def _times(title: str, state: str, cases: tuple[Case, ...], series: dict[str, Series], copied: float) -> Table:
    rows = []
    for case in cases:
        ours = series.get(series_name(case, state, NEPER))
        if ours is None:  # larger than the L2: the other table has it
            continue
        speed = case.nbytes / ours.median / 1e6
        row = [str(case), f"{ours.median:.1f}", f"±{ours.spread:.1%}", f"{speed:.2f}", f"{speed / copied:.0%}"]
        for way in BASELINES:
            theirs = series.get(series_name(case, state, way))
            row.append(f"{theirs.median:.1f} ({theirs.median / ours.median:.1f} x)" if theirs else "not measured")
        rows.append(row)
    return Table(["case", NEPER, "spread", "TB/s", "of copy", *BASELINES], rows, title=title)


def _bounds(card: str, series: dict[str, Series], cases: tuple[Case, ...]) -> list[Ratio]:
    whose = "" if re.search(r"\bH200\b", card) else f" on an H200; this is {card}"
    bounds = []
    for case in cases:
        if case.goal is not None:
            value = series[series_name(case, "warm", NEPER)].median
            bounds.append(Ratio(f"{case}, warm, us", value, f"<= {case.goal:g}{whose}", value <= case.goal))
    for state, bound, sign in (("cold", COLD_COMPILE_SECONDS, "<="), ("warm", WARM_COMPILE_SECONDS, "<")):
        compiling = series.get(f"compile, {state} cache")
        if compiling is not None:
            value = compiling.median
            met = value <= bound if sign == "<=" else value < bound
            bounds.append(Ratio(f"compile all kernels, {state} cache, s", value, f"{sign} {bound:g}", met))
    return bounds
