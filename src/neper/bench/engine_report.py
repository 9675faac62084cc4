"""The report of `neper bench engine`: tables and bounds from what a run has found so far. Needs no engine."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from neper.bench.engine_cases import OFF, OFF_AGAIN, SAMPLED_OFF, Case, Plan
from neper.bench.engine_drive import Batch, Traffic
from neper.bench.engine_probes import StepProfile
from neper.bench.report import Ratio, Report, Series, Table

SCORES_BOUND, SCORES_GOAL = 1.01, 1.005
MIXED_BOUND = 1.003
PROMPT_BOUND = 1.15
PROMPT_BYTES = 2**30
FLOOR_BOUNDS = {1: (1.80, 1.65, 1.35), 32: (2.0, 1.85, 1.5)}
"""Of decode steps over their floor, by rows: bound, stretch, goal."""
OVERHEAD_BOUND = 1.03
PROMPT_WAYS = ("plain", "scored", "plain again")
_NAME_WIDTH = 100


class Key(NamedTuple):
    """One case of one table: `group` is device, host or mixed."""

    group: str
    requests: int
    case: Case

    def __str__(self) -> str:
        return f"{self.group}, {self.requests} at a time, {self.case}"


@dataclass
class Findings:
    """What a run has measured so far; parts that have not run have left nothing.

    Attributes:
        tpot: milliseconds a token, by case: one sample a round. rate: tokens a second of all requests.
        prompts: milliseconds of a prompt, by length and by PROMPT_WAYS.
        overhead: by rows: milliseconds a decode step takes, and its graphs alone.
        replies: tokens of a reply, by group and rows.
        traffic, peak_bytes: by case.
        profiles: of decode steps, by rows and case.
        differences: what must be zero.
        floor_seconds: by rows: reading what a decode step must read, at the copy's speed.
        prompt_bytes: extra device memory of the scored prompt of `plan.memory_length`.
    """

    plan: Plan
    tpot: dict[Key, Series] = field(default_factory=dict)
    rate: dict[Key, Series] = field(default_factory=dict)
    prompts: dict[int, dict[str, Series]] = field(default_factory=dict)
    overhead: dict[int, tuple[Series, Series]] = field(default_factory=dict)
    copy: Series = field(default_factory=lambda: Series("copy on the device", "us"))
    replies: dict[tuple[str, int], int] = field(default_factory=dict)
    traffic: dict[Key, Traffic] = field(default_factory=dict)
    peak_bytes: dict[Key, int] = field(default_factory=dict)
    profiles: dict[tuple[int, Case], StepProfile] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    floor_seconds: dict[int, float] = field(default_factory=dict)
    prompt_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    def add(self, key: Key, batch: Batch, reply: int) -> None:
        """One more batch of a case, with replies of `reply` tokens."""
        rate = key.requests * reply / batch.seconds
        self.tpot.setdefault(key, Series(f"{key}: TPOT", "ms")).samples.append(1e3 * batch.tpot)
        self.rate.setdefault(key, Series(f"{key}: tokens", "tok/s")).samples.append(rate)
        if batch.traffic is not None:
            self.traffic[key] = batch.traffic
        if batch.peak_bytes is not None:
            self.peak_bytes[key] = max(batch.peak_bytes, self.peak_bytes.get(key, 0))

    @property
    def series(self) -> list[Series]:
        prompts = [series for ways in self.prompts.values() for series in ways.values()]
        overhead = [series for pair in self.overhead.values() for series in pair]
        copy = [self.copy] if self.copy.samples else []
        return [*self.tpot.values(), *self.rate.values(), *prompts, *overhead, *copy]

    def compared(self, key: Key) -> tuple[Series, float] | None:
        """A case over the same without scores, a ratio a round, and the A-against-A spread; None without both.

        No scores come first and last in a round, and their mean stands for the time between: even drift cancels.
        """
        base = Key(key.group, key.requests, SAMPLED_OFF if key.case.sampled else OFF)
        again = self.tpot.get(Key(key.group, key.requests, OFF_AGAIN))
        if key not in self.tpot or base not in self.tpot or again is None:
            return None
        off = self.tpot[Key(key.group, key.requests, OFF)].samples
        spread = pairs(again.samples, off).spread
        if key.case in (OFF, OFF_AGAIN) or key.case.sampled:
            return pairs(self.tpot[key].samples, self.tpot[base].samples), spread
        return pairs(self.tpot[key].samples, [(a + b) / 2 for a, b in zip(off, again.samples, strict=True)]), spread

    def off_tpot(self, count: int) -> float | None:
        """Median milliseconds a token without scores, of all batches of so many requests; None without any."""
        keys = [Key("device", count, case) for case in (OFF, OFF_AGAIN)]
        samples = [value for key in keys if key in self.tpot for value in self.tpot[key].samples]
        return statistics.median(samples) if samples else None


@dataclass
class EngineReport(Report):
    """A report whose JSON also holds what is not a series."""

    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(json.loads(super().to_json()) | self.details, indent=2, ensure_ascii=False)


def pairs(a: list[float], b: list[float]) -> Series:
    """a over b, sample by sample: neighbours in time."""
    return Series("", "x", [x / y for x, y in zip(a, b, strict=True)])


def at_most(name: str, value: float, bound: float, *, spread: float = 0.0, more: str = "") -> Ratio:
    """A ratio that holds when it is at most the bound, or what repetitions of the same case differ by."""
    limit = max(bound, 1 + spread)
    text = f"<= {bound:g}" if limit == bound else f"<= {limit:.4g} (A against A; else {bound:g})"
    return Ratio(name, value, text + more, value <= limit)


def report(title: str, setup: dict[str, Any], found: Findings, *, reference: bool) -> EngineReport:
    """The report of what was found. `reference`: this is the card and the model that the floor's bounds are about."""
    tables = [
        _decode("Decode, scores computed on the device", "device", found),
        _decode("Decode, some of the requests ask", "mixed", found),
        _floor(found),
        _overhead(found),
        _prompts(found),
        _steps(found),
        *(_kernels(rows, case, profile) for (rows, case), profile in found.profiles.items()),
        _decode("Decode, scores computed on the host from whole rows", "host", found),
    ]
    return EngineReport(
        title=title,
        setup=setup,
        series=found.series,
        ratios=bounds(found, reference=reference),
        # One that is all header is a part that has not run; without any, a report would list its series.
        tables=[table for table in tables if table.rows] or [Table(["nothing was measured"], [])],
        notes=found.notes,
        details={
            "cases": [_figures(key, found) for key in found.tpot],
            "steps": [
                {"rows": rows, "case": str(case), **asdict(profile), "scoring": profile.scoring}
                for (rows, case), profile in found.profiles.items()
            ],
            "differences": found.differences,
            "floor_ms": {str(rows): 1e3 * seconds for rows, seconds in found.floor_seconds.items()},
            "prompt_extra_bytes": found.prompt_bytes,
        },
    )


def bounds(found: Findings, *, reference: bool) -> list[Ratio]:
    """Every figure that has a bound, as far as it was measured."""
    top_k = found.plan.top_k
    ratios = []
    for key in found.tpot:
        compared = found.compared(key)
        if compared is None or key.case.top_k != top_k or key.group == "host":
            continue
        ratio, spread = compared
        bound, goal = (MIXED_BOUND, "") if key.group == "mixed" else (SCORES_BOUND, f" (goal {SCORES_GOAL:g})")
        ratios.append(at_most(f"TPOT / off: {key}", ratio.median, bound, spread=spread, more=goal))
    for key, traffic in found.traffic.items():
        if key.group == "device" and traffic.copies:
            rows = key.requests
            most = 16 * rows + 8 * rows * (key.case.top_k or 0)
            ratios.append(at_most(f"copies a step: {key}", traffic.copies, 1))
            ratios.append(at_most(f"waits a step: {key}", traffic.waits, 1))
            ratios.append(at_most(f"bytes a step: {key}", traffic.bytes, most))
    whose = "" if reference else ", for qwen3-4b in bfloat16 on an H200"
    for rows, (bound, stretch, aim) in FLOOR_BOUNDS.items():
        tpot = found.off_tpot(rows)
        if tpot is not None and rows in found.floor_seconds:
            value = tpot / 1e3 / found.floor_seconds[rows]
            more = f" (stretch {stretch:g}, goal {aim:g}{whose})"
            ratios.append(at_most(f"decode step / floor, {rows} rows", value, bound, more=more))
    for rows, (whole, alone) in found.overhead.items():
        ratio = pairs(whole.samples, alone.samples)
        ratios.append(at_most(f"decode step / its graphs alone, {rows} rows", ratio.median, OVERHEAD_BOUND))
    for length in found.prompts:
        ratio, spread = prompt_ratio(found, length)
        name = f"prompt of {length:,}: scored / plain"
        ratios.append(at_most(name, ratio.median, PROMPT_BOUND, spread=spread))
    if found.prompt_bytes is not None:
        name = f"prompt of {found.plan.memory_length:,}: GiB more when scored"
        ratios.append(at_most(name, found.prompt_bytes / 2**30, PROMPT_BYTES / 2**30))
    for name, difference in found.differences.items():
        ratios.append(Ratio(name, difference, "0", difference == 0))
    return ratios


def prompt_ratio(found: Findings, length: int) -> tuple[Series, float]:
    """A scored prompt over a plain one, and the A-against-A spread."""
    plain, scored, again = (found.prompts[length][way].samples for way in PROMPT_WAYS)
    between = [(a + b) / 2 for a, b in zip(plain, again, strict=True)]
    return pairs(scored, between), pairs(again, plain).spread


def _decode(title: str, group: str, found: Findings) -> Table:
    rows = []
    for key, tpot in found.tpot.items():
        if key.group != group:
            continue
        compared = found.compared(key)
        traffic, peak = found.traffic.get(key), found.peak_bytes.get(key)
        rows.append(
            [
                str(key.requests),
                str(key.case),
                f"{tpot.median:.3f}",
                f"±{tpot.spread:.1%}",
                f"{compared[0].median:.4f}" if compared else "-",
                f"±{compared[1]:.2%}" if compared else "-",
                f"{found.rate[key].median:,.0f}",
                *([f"{n:,.4g}" if n < 1000 else f"{n:,.0f}" for n in traffic] if traffic else ["-"] * 3),
                f"{peak / 2**30:.2f}" if peak is not None else "-",
                str(found.replies[group, key.requests]),
                str(len(tpot.samples)),
            ]
        )
    figures = ["TPOT, ms", "spread", "/ off", "A / A", "tok/s", "D2H copies a step", "bytes a step", "waits a step"]
    return Table(["at a time", "case", *figures, "peak GiB", "reply", "rounds"], rows, title)


def _floor(found: Findings) -> Table:
    rows = []
    for count, floor in found.floor_seconds.items():
        tpot = found.off_tpot(count)
        if tpot is not None:
            targets = [f"{target:g}" for target in FLOOR_BOUNDS.get(count, ())] or ["-"] * 3
            rows.append([str(count), f"{1e3 * floor:.3f}", f"{tpot:.3f}", f"{tpot / 1e3 / floor:.3f}", *targets])
    columns = ["rows", "floor, ms", "decode step, ms", "/ floor", "bound", "stretch", "goal"]
    return Table(columns, rows, "A decode step against reading its weights, keys and values once")


def _overhead(found: Findings) -> Table:
    rows = [
        [str(count), f"{whole.median:.3f}", f"{alone.median:.3f}", f"{ratio.median:.4f}", f"±{ratio.spread:.2%}"]
        for count, (whole, alone) in found.overhead.items()
        for ratio in [pairs(whole.samples, alone.samples)]
    ]
    columns = ["rows", "decode step, ms", "graphs alone, ms", "ratio", "spread"]
    return Table(columns, rows, "A decode step against its graphs alone")


def _prompts(found: Findings) -> Table:
    rows = []
    for length, ways in found.prompts.items():
        ratio, spread = prompt_ratio(found, length)
        times = [f"{ways[way].median:.2f}" for way in PROMPT_WAYS[:2]]
        rows.append([f"{length:,}", *times, f"{ratio.median:.4f}", f"±{spread:.2%}", str(len(ratio.samples))])
    columns = ["tokens", "plain, ms", f"k={found.plan.prompt_top_k}, ms", "/ plain", "A / A", "rounds"]
    return Table(columns, rows, "A prompt with its logprobs, from adding it to its first token")


def _steps(found: Findings) -> Table:
    rows = [
        [
            str(count),
            str(case),
            f"{sum(profile.kernels.values()):g}",
            f"{profile.launches:g}",
            ", ".join(f"{name} x {n:g}" for name, n in profile.scoring.items()) or "none",
            ", ".join(f"{name} x {n:g}" for name, n in profile.calls.items()),
        ]
        for (count, case), profile in found.profiles.items()
    ]
    columns = ["rows", "case", "kernels and copies", "launches", "of scoring", "calls of the host"]
    return Table(columns, rows, "What a decode step does")


def _kernels(count: int, case: Case, profile: StepProfile) -> Table:
    rows = [[_shortened(name), f"{n:g}"] for name, n in profile.kernels.items()]
    return Table(["kernel or copy", "a step"], rows, f"Kernels of a decode step, {count} rows, {case}")


def _shortened(name: str) -> str:
    name = name.replace("|", "/")
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 3] + "..."


def _figures(key: Key, found: Findings) -> dict[str, Any]:
    compared, traffic = found.compared(key), found.traffic.get(key)
    return {
        "group": key.group,
        "requests": key.requests,
        "case": str(key.case),
        "reply": found.replies[key.group, key.requests],
        "tpot_ms": found.tpot[key].median,
        "tpot_spread": found.tpot[key].spread,
        "over_off": compared[0].median if compared else None,
        "a_against_a": compared[1] if compared else None,
        "tokens_per_second": found.rate[key].median,
        "d2h_a_step": traffic._asdict() if traffic else None,
        "peak_bytes": found.peak_bytes.get(key),
    }
