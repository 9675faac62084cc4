"""A look inside the engine's decode steps: beside their CUDA graphs alone, and kernel by kernel.

python -m benchmarks.decode_steps --shape qwen3-4b --out bench/results
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Annotated

import torch
import typer

from neper.bench import engine_drive, engine_rig, subject
from neper.bench.engine_cases import FULL, OFF, OFF_AGAIN, QUICK, Case, Plan
from neper.bench.engine_drive import Clock, Step, decode_steps
from neper.bench.engine_rig import Rig
from neper.bench.report import Column, Figure, Report, Series, Table, at_most, conditions, pairs, publish, slug
from neper.engine.core import EngineCore
from neper.guarded import guarded
from neper.progress import ProgressLine
from neper.types import Request

OVERHEAD_BOUND = 1.03
SIZES = (1, 32)
PROFILED, REPLAYS, WARM_UP_TOKENS = 8, 50, 8
_NAME_WIDTH = 100
SCORING_KERNELS = re.compile(
    r"_?(read|select|restrict|list)_kernel|.*(softmax|logsumexp|topk|sort|radix|bitonic).*", re.IGNORECASE
)
"""Whole names: of the reduction's own kernels, and of those that torch would score with."""


@dataclass(frozen=True)
class StepProfile:
    """The work of a decode step, by a profile of several.

    Attributes:
        kernels: name → how often a step: all that the device did, copies included.
        calls: the same of the CUDA API calls that the host made.
    """

    kernels: dict[str, float] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)

    @property
    def scoring(self) -> dict[str, float]:
        return {name: count for name, count in self.kernels.items() if SCORING_KERNELS.fullmatch(name)}

    @property
    def launches(self) -> float:
        """Calls that start kernels, one by one or as a graph."""
        return sum(count for name, count in self.calls.items() if "Launch" in name)


@contextlib.contextmanager
def running(core: EngineCore, requests: list[Request]) -> Iterator[Iterator[Step]]:
    """The steps of these requests up to the first decode step; what is left at the end is aborted."""
    log = engine_drive.steps(core, requests)
    next(decode_steps(log, len(requests)))
    try:
        yield log
    finally:
        for request in requests:
            core.abort(request.request_id)
        while core.has_work:  # what was launched already
            core.step()


def profile_steps(core: EngineCore, requests: list[Request], count: int) -> StepProfile:
    """Profile `count` decode steps of these requests, on a GPU; the rest of their replies is not computed."""
    with running(core, requests) as log:
        # So that an engine that launches ahead has nothing running when the profile begins or ends: n steps are n
        # launches.
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            for _ in islice(log, count):
                pass
            torch.cuda.synchronize()
    kernels: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profile.events() or []:
        if event.device_type.name == "CUDA":
            if not getattr(event, "is_user_annotation", False):
                kernels[event.name] += 1
        elif re.match(r"cu(da)?[A-Z]", event.name):
            calls[event.name] += 1
    return StepProfile(*({name: n / count for name, n in found.most_common()} for found in (kernels, calls)))


def replay_seconds(
    core: EngineCore,
    requests: list[Request],
    top_k: int | None,
    *,
    after: int,
    replays: int,
    clock: Clock = time.perf_counter,
) -> float | None:
    """Seconds of one replay of the decode graphs alone, without the engine; None where there are none.

    The graphs see what they saw in the decode step number `after` of these requests: contexts of that length.
    """
    if core.runner.graphs is None:
        return None
    with running(core, requests) as log:
        for _ in islice(log, after - 1):
            pass
        replay = core.runner.decode_replay(len(requests), top_k)
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
        start = clock()
        for _ in range(replays):
            replay()
        torch.cuda.synchronize()
        return (clock() - start) / replays


@dataclass
class Findings:
    """The measurements of a run.

    Attributes:
        overhead: by rows: milliseconds a decode step takes, and its graphs alone.
        profiles: of decode steps, by rows and case.
        differences: what must be zero.
    """

    overhead: dict[int, tuple[Series, Series]] = field(default_factory=dict)
    profiles: dict[tuple[int, Case], StepProfile] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def overhead(rig: Rig, found: Findings) -> None:
    """The time of a decode step beside that of replaying its graphs."""
    plan, core = rig.plan, rig.engine("device")
    for count in plan.concurrency:
        rig.progress(0, 1, f"warm-up, {count} at a time")
        rig.batch(core, OFF, count, WARM_UP_TOKENS)
    for number in range(plan.rounds):
        for count in plan.concurrency:
            rig.progress(number, plan.rounds, f"overhead: round {number + 1} of {plan.rounds}, {count} at a time")
            rig.seed += 1
            whole = rig.batch(core, OFF, count, plan.reply).tpot
            # In the middle of the reply: there the contexts are what they are on average.
            alone = replay_seconds(
                core, rig.requests(OFF, count, plan.reply), None, after=plan.reply // 2, replays=REPLAYS
            )
            if alone is None:
                found.notes.append("overhead was left out: this engine replays no graphs")
                return
            name = f"overhead, {count} rows"
            new = Series(f"{name}: decode step", "ms"), Series(f"{name}: graphs alone", "ms")
            for series, seconds in zip(found.overhead.setdefault(count, new), (whole, alone), strict=True):
                series.samples.append(1e3 * seconds)


def steps(rig: Rig, found: Findings) -> None:
    """Compare steps before, with and after scores: they must leave no trace in tokens, bytes and launches."""
    plan, core, on_gpu = rig.plan, rig.engine("device"), rig.subject.on_gpu
    wanted, reply = Case(plan.top_k), max(plan.reply // 4, PROFILED + WARM_UP_TOKENS)
    for count in plan.concurrency:
        rig.progress(0, 1, f"steps: off, {wanted}, off again, {count} at a time")
        rig.seed += 1
        turns = []
        for case in (OFF, wanted, OFF_AGAIN):
            turns.append(rig.batch(core, case, count, reply))
            if on_gpu:
                found.profiles[count, case] = profile_steps(core, rig.requests(case, count, reply), PROFILED)
        what = f"off, {wanted}, off, {count} rows"
        for (a, b), which in zip(pairwise(turns), ("first and second", "second and third"), strict=True):
            found.differences[f"{what}: tokens that differ, {which}"] = sum(
                x != y for name in a.tokens for x, y in zip(a.tokens[name], b.tokens[name], strict=True)
            )
        first, third = turns[0].traffic, turns[2].traffic
        if first is not None and third is not None:
            found.differences[f"{what}: bytes a step, third - first"] = third.bytes - first.bytes
        if on_gpu:
            before, after = found.profiles[count, OFF], found.profiles[count, OFF_AGAIN]
            found.differences[f"{what}: launches, third - first"] = after.launches - before.launches
            found.differences[f"{what}: kernels in one of first and third"] = len(
                set(before.kernels.items()) ^ set(after.kernels.items())
            )
            found.differences[f"scoring kernels in a step without scores, {count} rows"] = sum(before.scoring.values())
    if not on_gpu:
        found.notes.append("the kernels of a step were left out: only on a GPU are they listed")


def report(title: str, environment: dict[str, str], found: Findings) -> Report:
    """The report of what was found."""
    compared = {rows: pairs(whole.samples, alone.samples) for rows, (whole, alone) in found.overhead.items()}
    figures = [
        at_most(f"decode step / its graphs alone, {rows} rows", ratio.median, OVERHEAD_BOUND)
        for rows, ratio in compared.items()
    ]
    figures += [Figure(name, value, "0", value == 0) for name, value in found.differences.items()]
    kernels = [
        Table(
            f"Kernels of a decode step, {rows} rows, {case}",
            [Column("kernel or copy"), Column("a step", "", "{:g}")],
            [[_shortened(name), n] for name, n in profile.kernels.items()],
        )
        for (rows, case), profile in found.profiles.items()
    ]
    return Report(
        title=title,
        environment=environment | conditions(),
        tables=[_overhead(found, compared), _steps(found), *kernels],
        figures=figures,
        notes=found.notes,
        series=[series for pair in found.overhead.values() for series in pair],
    )


def _overhead(found: Findings, compared: dict[int, Series]) -> Table:
    columns = [Column("rows"), Column("decode step, ms", "ms", "{:.3f}"), Column("graphs alone, ms", "ms", "{:.3f}")]
    columns += [Column("ratio", "", "{:.4f}"), Column("spread", "", "±{:.2%}")]
    rows = [
        [rows, whole.median, alone.median, compared[rows].median, compared[rows].spread]
        for rows, (whole, alone) in found.overhead.items()
    ]
    return Table("A decode step against its graphs alone", columns, rows)


def _steps(found: Findings) -> Table:
    def listed(counts: dict[str, float]) -> str:
        return ", ".join(f"{name} x {n:g}" for name, n in counts.items())

    rows = [
        [count, str(case), sum(p.kernels.values()), p.launches, listed(p.scoring) or "none", listed(p.calls)]
        for (count, case), p in found.profiles.items()
    ]
    columns = [Column("rows"), Column("case"), Column("kernels and copies", "", "{:g}"), Column("launches", "", "{:g}")]
    return Table("What a decode step does", [*columns, Column("of scoring"), Column("calls of the host")], rows)


def _shortened(name: str) -> str:
    name = name.replace("|", "/")
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 3] + "..."


def run(out: str | None, plan: Plan, model: str | None, shape: str | None, device: str | None) -> None:
    """Measure, print the tables, and write `steps-<card>-<model>.json` and `.md` into the directory `out`."""
    chosen = subject.choose("decode_steps", model=model, shape=shape, device=device)
    plan = dataclasses.replace(plan, prompt_lengths=(), memory_length=0)
    found = Findings()
    with ProgressLine(sys.stderr) as progress:
        rig = engine_rig.load(chosen, plan, progress)
        overhead(rig, found)
        steps(rig, found)  # after what is timed: a profiler that was once on may stay felt
    title = f"Decode steps of neper's engine on {chosen.card}, {rig.source.name}"
    publish(report(title, rig.environment(), found), out, f"steps-{slug(chosen.card)}-{slug(rig.source.name)}")


@guarded
def main(
    model: Annotated[str | None, typer.Option("--model", help="A model as `neper serve` takes it.")] = None,
    shape: Annotated[str | None, typer.Option("--shape", help="Random weights: qwen3-4b, qwen3-0.6b.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda.")] = None,
    out: Annotated[str | None, typer.Option("--out", help="Directory for steps-<card>-<model>.json and .md.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test: short replies.")] = False,
) -> None:
    """A decode step beside replaying its CUDA graphs alone; off, 20, off again: tokens, bytes, launches, kernels."""
    run(out, dataclasses.replace(QUICK if quick else FULL, concurrency=(8,) if quick else SIZES), model, shape, device)


if __name__ == "__main__":
    typer.run(main)
