"""`neper bench engine`: the cost of logprobs in a whole engine, and the distance of its decode steps from their floor.

Everything is a ratio within one run: the cases of a table take turns, one batch of each per round. The run has parts.
The results of a part are on disk when the next one begins.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from neper.bench import engine_cases, engine_plot, engine_report, engine_rig
from neper.bench.device_time import time_copy
from neper.bench.engine_cases import FULL, OFF, OFF_AGAIN, PARTS, QUICK, Case
from neper.bench.engine_report import PROMPT_WAYS, Findings, Key
from neper.bench.engine_rig import OutOfTime, Rig, decode_bytes
from neper.bench.report import Report, Series, first_line, markdown, slug
from neper.bench.subject import Subject
from neper.engine.core import EngineCore
from neper.errors import NeperError, StartupError
from neper.progress import ProgressLine

_WARM_UP_TOKENS = 8
_SHORTEST_REPLY = 4

logger = logging.getLogger("neper.bench")


def run(
    chosen: Subject,
    out: str | None,
    *,
    rounds: int | None = None,
    concurrency: tuple[int, ...] | None = None,
    parts: tuple[str, ...] = PARTS,
    quick: bool = False,
    time_limit: float | None = None,
) -> None:
    """Measure, print the tables, and write `engine-<card>-<model>.json` and `.md` into the directory `out`.

    Args:
        out: None = print only.
        time_limit: seconds after which no further batch is begun.

    Raises:
        StartupError: arguments that do not go together, or that the machine cannot meet.
        NeperError: a part failed; the others are measured and written before.
    """
    started = time.perf_counter()
    if unknown := [part for part in parts if part not in PARTS]:
        raise StartupError(f"bench engine: no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    deadline = None if time_limit is None else started + time_limit
    measurement: Measurement | None = None
    try:
        with ProgressLine(sys.stderr) as progress:
            plan = QUICK if quick else FULL
            rig = engine_rig.load(chosen, plan, progress, rounds=rounds, concurrency=concurrency, deadline=deadline)
            measurement = Measurement(rig, None if out is None else Path(out))
            measurement.run(tuple(part for part in PARTS if part in parts))
    finally:  # an interrupted run has results too
        if measurement is not None:
            print(markdown(measurement.report()), end="")
    if measurement.failed:
        raise NeperError(f"{', '.join(measurement.failed)} failed; the notes of the report say how")


@dataclass
class Measurement:
    """One run: its parts, their results so far, and the place to write them.

    Attributes:
        took: seconds, by part.
        failed: parts that ended with an error.
    """

    rig: Rig
    out: Path | None
    took: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.found = Findings(self.rig.plan)

    def run(self, parts: tuple[str, ...]) -> None:
        """Run the parts in this order. One that fails is a note, and the next one gets a new engine."""
        for part in parts:
            begun = time.perf_counter()
            try:
                getattr(self, part)()  # the method of that name
            except OutOfTime:
                self.found.notes.append(f"{part} was left out or cut short by the time limit")
            except KeyboardInterrupt:
                self.found.notes.append(f"the run was interrupted in {part}")
                self.save()
                raise
            except Exception as error:  # the minutes of the other parts must not be lost with it
                logger.exception("%s failed", part)
                self.found.notes.append(f"{part} failed: {first_line(error)}")
                self.failed.append(part)
                self.rig.drop_engine()
            self.took[part] = time.perf_counter() - begun
            self.save()
        if self.out is not None and (note := engine_plot.save(self.report(), self.out, self.stem)):
            self.found.notes.append(note)
            self.save()

    def matrix(self) -> None:
        """Every number of alternatives at every concurrency."""
        core, plan = self.rig.engine("device"), self.rig.plan
        self._warm_up(core, plan.cases, plan.concurrency)
        self._turns(core, "device", plan.cases, plan.concurrency, plan.rounds)

    def mixed(self) -> None:
        """One request of a batch asks for scores."""
        core, plan = self.rig.engine("device"), self.rig.plan
        cases = (OFF, Case(plan.top_k, asking=1), OFF_AGAIN)
        self._warm_up(core, cases, plan.mixed)
        self._turns(core, "mixed", cases, plan.mixed, plan.rounds)

    def floor(self) -> None:
        """The time in which the memory delivers the bytes that a decode step must read."""
        rig, plan, found = self.rig, self.rig.plan, self.found
        if not rig.subject.on_gpu:
            found.notes.append("floor was left out: it is the speed of a copy on a GPU")
            return
        core = rig.engine("device")
        missing = tuple(count for count in plan.concurrency if found.off_tpot(count) is None)
        self._warm_up(core, (OFF,), missing)
        self._turns(core, "device", (OFF, OFF_AGAIN), missing, plan.rounds if missing else 0)
        rig.progress(0, 1, "floor: a copy on the device")
        time_copy(plan.copy_bytes, rig.subject.device, max(5, plan.rounds), found.copy)
        context = plan.prompt + plan.reply / 2  # of the decode steps, on average
        for count in plan.concurrency:
            found.floor_seconds[count] = self._floor(count * context)

    def lengths(self) -> None:
        """Decode steps with long contexts, of one length and of several, beside reading what they must."""
        rig, plan, found = self.rig, self.rig.plan, self.found
        if not rig.subject.on_gpu:
            found.notes.append("lengths was left out: its floor is the speed of a copy on a GPU")
            return
        if not plan.lengths:
            found.notes.append("lengths was left out: the model's context holds none of them")
            return
        if not found.copy.samples:
            time_copy(plan.copy_bytes, rig.subject.device, max(5, plan.rounds), found.copy)
        core = rig.engine("device", long=True)
        for number in range(-1, plan.rounds):  # round -1 warms up
            rig.seed += 1
            for case in plan.lengths:
                rig.progress(max(0, number), plan.rounds, f"lengths: {case}")
                batch = rig.lengths(core, case)
                if number >= 0:
                    series = found.lengths.setdefault(case, Series(f"lengths, {case}: TPOT", "ms"))
                    series.samples.append(1e3 * batch.tpot)
                    tokens = sum(case.prompts) + len(case.prompts) * plan.lengths_reply / 2
                    found.lengths_floor[case] = 1e3 * self._floor(tokens)
            self.save()
        rig.drop_engine()

    def prompt(self) -> None:
        """The cost of scoring a prompt, in time and in memory."""
        rig, plan, found = self.rig, self.rig.plan, self.found
        core = rig.engine("device")
        asked = dict(zip(PROMPT_WAYS, (None, plan.prompt_top_k, None), strict=True))
        for length in plan.prompt_lengths:
            rounds = 2 * plan.rounds  # they are short
            series = {way: Series(f"prompt of {length:,}, {way}", "ms") for way in asked}
            for number in range(-1, rounds):  # round -1 warms up
                rig.progress(max(0, number), rounds, f"prompt of {length:,} tokens")
                rig.seed += 1
                seconds = [rig.prompt(core, length, top_k).seconds for top_k in asked.values()]
                if number >= 0:
                    for way, value in zip(asked, seconds, strict=True):
                        series[way].samples.append(1e3 * value)
                    found.prompts[length] = series
        if not rig.subject.on_gpu:
            found.notes.append("the memory of a scored prompt was left out: it is measured on a GPU")
        elif plan.memory_length:
            rig.progress(0, 1, f"prompt of {plan.memory_length:,} tokens: memory")
            peaks = [rig.prompt(core, plan.memory_length, top_k).peak_bytes or 0 for top_k in asked.values()]
            # Buffers that scores need and that exist from the start are no part of a difference of peaks.
            found.prompt_bytes = peaks[1] - max(peaks[0], peaks[2]) + core.runner.logprob_bytes

    def host(self) -> None:
        """The matrix where whole rows are copied and scanned: shorter replies, fewer rounds."""
        rig, plan = self.rig, self.rig.plan
        core, wanted = rig.engine("host"), Case(plan.top_k)
        self._warm_up(core, (OFF, wanted), plan.concurrency[:1])
        for count in plan.concurrency:
            rig.progress(0, 1, f"host: the time of a step, {count} at a time")
            step = rig.batch(core, wanted, count, _SHORTEST_REPLY).tpot
            reply = min(plan.host_reply, max(_SHORTEST_REPLY, int(plan.host_seconds / step)))
            self.found.replies["host", count] = reply
            self._turns(core, "host", plan.cases, (count,), plan.host_rounds)

    def _floor(self, tokens: float) -> float:
        """Seconds in which a copy reads the weights, and the keys and values of so many tokens."""
        rig, copy_bytes = self.rig, self.rig.plan.copy_bytes
        needed = decode_bytes(rig.source.config, rig.subject.dtype.itemsize, tokens=tokens)
        return needed * self.found.copy.median / 1e6 / (2 * copy_bytes)

    def _warm_up(self, core: EngineCore, cases: tuple[Case, ...], sizes: tuple[int, ...]) -> None:
        for count in sizes:
            for case in cases:
                self.rig.progress(0, 1, f"warm-up, {count} at a time")
                self.rig.batch(core, case, count, _WARM_UP_TOKENS)

    def _turns(
        self, core: EngineCore, group: str, cases: tuple[Case, ...], sizes: tuple[int, ...], rounds: int
    ) -> None:
        """Run a batch of each case in each round. A round of one size counts when all of its cases are done."""
        rig, found = self.rig, self.found
        for number in range(rounds):
            for count in sizes:
                rig.seed += 1
                reply = found.replies.setdefault((group, count), rig.plan.reply)
                rig.progress(number, rounds, f"{group}: round {number + 1} of {rounds}, {count} at a time")
                batches = {case: rig.batch(core, case, count, reply) for case in cases}
                for case, batch in batches.items():
                    found.add(Key(group, count, case), batch, reply)
            self.save()

    @property
    def stem(self) -> str:
        return f"engine-{slug(self.rig.subject.card)}-{slug(self.rig.source.name)}"

    def save(self) -> None:
        """Write the results so far, if there is a place for them."""
        if self.out is not None:
            self.report().save(self.out, self.stem)

    def report(self) -> Report:
        card, name = self.rig.subject.card, self.rig.source.name
        reference = "H200" in card and name == "qwen3-4b" and self.rig.subject.dtype == torch.bfloat16
        title = f"neper's engine on {card}, {name}"
        return engine_report.report(title, self._environment(), self.found, reference=reference)

    def _environment(self) -> dict[str, Any]:
        plan, copy = self.rig.plan, self.found.copy
        environment = self.rig.environment()
        if copy.samples:
            speed = 2 * plan.copy_bytes / copy.median / 1e6
            environment["copy"] = f"{speed:.2f} TB/s read and written, ±{copy.spread:.1%}"
        return environment | {
            "requests": (
                f"{plan.prompt} random tokens in, {plan.reply} out; greedy, and sampled at temperature "
                f"{engine_cases.TEMPERATURE}, top_p {engine_cases.TOP_P}; no prefix cache"
            ),
            "TPOT": (
                "from the first decode step's results to the last one's, a step; all requests of a batch start together"
            ),
            "rounds": (
                f"{plan.rounds}, cases taking turns; / off: median of the rounds; A / A: half the range of off again "
                "/ off"
            ),
            "seconds": ", ".join(f"{part} {seconds:.0f}" for part, seconds in self.took.items()) or "0",
        }
