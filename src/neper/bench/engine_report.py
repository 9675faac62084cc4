"""The report of `neper bench engine`: tables and bounds from the results of a run so far. Needs no engine."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from neper.bench.engine_cases import OFF, OFF_AGAIN, SAMPLED_OFF, Case, Lengths, Plan
from neper.bench.engine_drive import Batch, Traffic
from neper.bench.report import Column, Figure, Report, Series, Table, at_most, between, conditions, pairs

SCORES_BOUND, SCORES_GOAL = 1.01, 1.005
MIXED_BOUND = 1.003
PROMPT_BOUND = 1.15
PROMPT_GIB = 1
FLOOR_BOUNDS = {1: (1.8, 1.65, 1.35), 32: (2, 1.85, 1.5)}
"""Bound, stretch and goal of decode steps over their floor, by rows."""
PROMPT_WAYS = ("plain", "scored", "plain again")
DECODE = {
    "device": "Decode, scores computed on the device",
    "mixed": "Decode, some of the requests ask",
    "host": "Decode, scores computed on the host from whole rows",
}
"""The groups of cases, and the titles of their tables."""


class Key(NamedTuple):
    """One case of one table: `group` is device, host or mixed."""

    group: str
    requests: int
    case: Case

    def __str__(self) -> str:
        return f"{self.group}, {self.requests} at a time, {self.case}"


@dataclass
class Findings:
    """The measurements of a run so far. Parts that have not run have left nothing.

    Attributes:
        tpot: milliseconds per token, by case: one sample per round. rate: tokens per second of all requests.
        prompts: milliseconds of a prompt, by length and by PROMPT_WAYS.
        replies: tokens of a reply, by group and rows.
        traffic, peak_bytes: by case.
        floor_seconds: by rows: the time to read all that a decode step must read, at the speed of a copy.
        lengths, lengths_floor: milliseconds of decode steps with long contexts, and of reading all that they must read.
        prompt_bytes: extra device memory of the scored prompt of `plan.memory_length`.
    """

    plan: Plan
    tpot: dict[Key, Series] = field(default_factory=dict)
    rate: dict[Key, Series] = field(default_factory=dict)
    prompts: dict[int, dict[str, Series]] = field(default_factory=dict)
    copy: Series = field(default_factory=lambda: Series("copy on the device", "us"))
    replies: dict[tuple[str, int], int] = field(default_factory=dict)
    traffic: dict[Key, Traffic] = field(default_factory=dict)
    peak_bytes: dict[Key, int] = field(default_factory=dict)
    floor_seconds: dict[int, float] = field(default_factory=dict)
    lengths: dict[Lengths, Series] = field(default_factory=dict)
    lengths_floor: dict[Lengths, float] = field(default_factory=dict)
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
        timed = (*self.tpot.values(), *self.rate.values(), *self.lengths.values(), *prompts, self.copy)
        return [series for series in timed if series.samples]

    def compared(self, key: Key) -> tuple[Series, float] | None:
        """A case over the same without scores, one ratio per round, and the A-against-A spread; None without both."""
        base = self.tpot.get(key._replace(case=SAMPLED_OFF if key.case.sampled else OFF))
        off, again = (self.tpot.get(key._replace(case=case)) for case in (OFF, OFF_AGAIN))
        if key not in self.tpot or base is None or off is None or again is None:
            return None
        alone = key.case in (OFF, OFF_AGAIN) or key.case.sampled
        without = base.samples if alone else between(off.samples, again.samples)
        return pairs(self.tpot[key].samples, without), pairs(again.samples, off.samples).spread

    def off_tpot(self, count: int) -> float | None:
        """Median milliseconds per token without scores, of all batches of so many requests; None without any."""
        keys = [Key("device", count, case) for case in (OFF, OFF_AGAIN)]
        samples = [value for key in keys if key in self.tpot for value in self.tpot[key].samples]
        return statistics.median(samples) if samples else None

    def over_floor(self) -> list[tuple[int, float, float]]:
        """Rows, floor and decode step in milliseconds, where both were measured."""
        steps = [(count, 1e3 * floor, self.off_tpot(count)) for count, floor in self.floor_seconds.items()]
        return [(count, floor, tpot) for count, floor, tpot in steps if tpot is not None]


def report(title: str, environment: dict[str, Any], found: Findings, *, reference: bool) -> Report:
    """The report of the results. `reference`: the floor's bounds are for this card and this model."""
    device, mixed, host = (_decode(title, group, found) for group, title in DECODE.items())
    return Report(
        title=title,
        environment=environment | conditions(),
        tables=[device, mixed, _floor(found), _lengths(found), _prompts(found), host],
        figures=bounds(found, reference=reference),
        notes=found.notes,
        series=found.series,
    )


def bounds(found: Findings, *, reference: bool) -> list[Figure]:
    """Every figure with a bound that was measured."""
    figures = []
    for key in found.tpot:
        compared = found.compared(key)
        if compared is None or key.case.top_k != found.plan.top_k or key.group == "host":
            continue
        ratio, spread = compared
        bound, goal = (MIXED_BOUND, "") if key.group == "mixed" else (SCORES_BOUND, f" (goal {SCORES_GOAL})")
        figures.append(at_most(f"TPOT / off: {key}", ratio.median, bound, spread=spread, more=goal))
    for key, traffic in found.traffic.items():
        if key.group == "device" and traffic.copies:
            most = 16 * key.requests + 8 * key.requests * (key.case.top_k or 0)
            figures.append(at_most(f"copies a step: {key}", traffic.copies, 1))
            figures.append(at_most(f"waits a step: {key}", traffic.waits, 1))
            figures.append(at_most(f"bytes a step: {key}", traffic.bytes, most))
    whose = "" if reference else ", for qwen3-4b in bfloat16 on an H200"
    for rows, floor, tpot in found.over_floor():
        if rows in FLOOR_BOUNDS:
            bound, stretch, aim = FLOOR_BOUNDS[rows]
            more = f" (stretch {stretch}, goal {aim}{whose})"
            figures.append(at_most(f"decode step / floor, {rows} rows", tpot / floor, bound, more=more))
    for case, series in found.lengths.items():
        value = series.median / found.lengths_floor[case]
        figures.append(at_most(f"decode step / floor, {case}", value, case.bound, more=whose))
    for length in found.prompts:
        ratio, spread = prompt_ratio(found, length)
        figures.append(at_most(f"prompt of {length:,}: scored / plain", ratio.median, PROMPT_BOUND, spread=spread))
    if found.prompt_bytes is not None:
        name = f"prompt of {found.plan.memory_length:,}: GiB more when scored"
        figures.append(at_most(name, found.prompt_bytes / 2**30, PROMPT_GIB))
    return figures


def prompt_ratio(found: Findings, length: int) -> tuple[Series, float]:
    """A scored prompt over a plain one, and the A-against-A spread."""
    plain, scored, again = (found.prompts[length][way].samples for way in PROMPT_WAYS)
    return pairs(scored, between(plain, again)), pairs(again, plain).spread


def _decode(title: str, group: str, found: Findings) -> Table:
    rows = []
    for key, tpot in found.tpot.items():
        if key.group != group:
            continue
        ratio, spread = found.compared(key) or (None, None)
        peak = found.peak_bytes.get(key)
        rows.append(
            [
                *(key.requests, str(key.case), tpot.median, tpot.spread, ratio.median if ratio else None, spread),
                *(found.rate[key].median, *found.traffic.get(key, (None, None, None))),
                *(peak / 2**30 if peak is not None else None, found.replies[group, key.requests], len(tpot.samples)),
            ]
        )
    columns = [
        *(Column("at a time"), Column("case"), Column("TPOT, ms", "ms", "{:.3f}"), Column("spread", "", "±{:.1%}")),
        *(Column("/ off", "", "{:.4f}"), Column("A / A", "", "±{:.2%}"), Column("tok/s", "tok/s", "{:,.0f}")),
        *(Column("D2H copies a step", "", "{:.4g}"), Column("bytes a step", "bytes", "{:,.0f}")),
        *(Column("waits a step", "", "{:.4g}"), Column("peak GiB", "GiB", "{:.2f}"), Column("reply"), Column("rounds")),
    ]
    return Table(title, columns, rows)


def _floor(found: Findings) -> Table:
    rows = [
        [count, floor, tpot, tpot / floor, *FLOOR_BOUNDS.get(count, (None, None, None))]
        for count, floor, tpot in found.over_floor()
    ]
    columns = [Column("rows"), Column("floor, ms", "ms", "{:.3f}"), Column("decode step, ms", "ms", "{:.3f}")]
    columns += [Column("/ floor", "", "{:.3f}"), Column("bound"), Column("stretch"), Column("goal")]
    return Table("A decode step against reading its weights, keys and values once", columns, rows)


def _lengths(found: Findings) -> Table:
    rows = [
        [str(case), floor, series.median, series.spread, series.median / floor, case.bound, len(series.samples)]
        for case, series in found.lengths.items()
        for floor in [found.lengths_floor[case]]
    ]
    columns = [Column("contexts"), Column("floor, ms", "ms", "{:.3f}"), Column("decode step, ms", "ms", "{:.3f}")]
    columns += [Column("spread", "", "±{:.1%}"), Column("/ floor", "", "{:.3f}"), Column("bound"), Column("rounds")]
    return Table("A decode step with long contexts against reading its weights, keys and values once", columns, rows)


def _prompts(found: Findings) -> Table:
    rows = []
    for length, ways in found.prompts.items():
        ratio, spread = prompt_ratio(found, length)
        rows.append([length, *(ways[way].median for way in PROMPT_WAYS[:2]), ratio.median, spread, len(ratio.samples)])
    columns = [Column("tokens", "", "{:,}"), Column("plain, ms", "ms", "{:.2f}")]
    columns += [Column(f"k={found.plan.prompt_top_k}, ms", "ms", "{:.2f}"), Column("/ plain", "", "{:.4f}")]
    columns += [Column("A / A", "", "±{:.2%}"), Column("rounds")]
    return Table("A prompt with its logprobs, from adding it to its first token", columns, rows)
