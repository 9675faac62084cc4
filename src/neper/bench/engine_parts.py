"""The parts of `neper bench engine`: each drives the rig through its batches and leaves its figures in the findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from neper.bench import engine_probes
from neper.bench.engine_cases import OFF, OFF_AGAIN, PARTS, Case
from neper.bench.engine_report import PROMPT_WAYS, Findings, Key
from neper.bench.engine_rig import Rig
from neper.bench.report import Series
from neper.engine.core import EngineCore

_WARM_UP_TOKENS = 8
_SHORTEST_REPLY = 4


@dataclass(frozen=True)
class Parts:
    """What measures, and where its figures go.

    Attributes:
        save: called when a round of a long part is complete.
    """

    rig: Rig
    found: Findings
    save: Callable[[], None]

    def run(self, part: str) -> None:
        """Run one of PARTS: the method of that name.

        Raises:
            OutOfTime: the deadline came first. Complete rounds are among the findings.
        """
        assert part in PARTS
        getattr(self, part)()

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

    def overhead(self) -> None:
        """What a decode step takes beside replaying its graphs."""
        rig, plan = self.rig, self.rig.plan
        core = rig.engine("device")
        self._warm_up(core, (OFF,), plan.overhead_at)
        for number in range(plan.rounds):
            for count in plan.overhead_at:
                rig.progress(number, plan.rounds, f"overhead: round {number + 1} of {plan.rounds}, {count} at a time")
                rig.seed += 1
                whole = rig.batch(core, OFF, count, plan.reply).tpot
                # In the middle of the reply: there the contexts are what they are on average.
                alone = engine_probes.replay_seconds(
                    core, rig.requests(OFF, count, plan.reply), None, after=plan.reply // 2, replays=plan.replays
                )
                if alone is None:
                    self.found.notes.append("overhead was left out: this engine replays no graphs")
                    return
                name = f"overhead, {count} rows"
                new = Series(f"{name}: decode step", "ms"), Series(f"{name}: graphs alone", "ms")
                for series, seconds in zip(self.found.overhead.setdefault(count, new), (whole, alone), strict=True):
                    series.samples.append(1e3 * seconds)

    def floor(self) -> None:
        """How long the memory takes to deliver what a decode step must read."""
        rig, plan, found = self.rig, self.rig.plan, self.found
        if not rig.on_gpu:
            found.notes.append("floor was left out: it is the speed of a copy on a GPU")
            return
        core = rig.engine("device")
        missing = tuple(count for count in plan.concurrency if found.off_tpot(count) is None)
        self._warm_up(core, (OFF,), missing)
        self._turns(core, "device", (OFF, OFF_AGAIN), missing, plan.rounds if missing else 0)
        rig.progress(0, 1, "floor: a copy on the device")
        engine_probes.time_copy(plan.copy_bytes, rig.device, max(5, plan.rounds), found.copy)
        bytes_a_second = 2 * plan.copy_bytes / (found.copy.median / 1e6)
        context = plan.prompt + plan.reply / 2  # of the decode steps, on average
        for count in plan.concurrency:
            needed = engine_probes.decode_bytes(rig.source.config, rig.dtype.itemsize, rows=count, context=context)
            found.floor_seconds[count] = needed / bytes_a_second

    def prompt(self) -> None:
        """What scoring a prompt costs, in time and in memory."""
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
        if not rig.on_gpu:
            found.notes.append("the memory of a scored prompt was left out: it is measured on a GPU")
        elif plan.memory_length:
            rig.progress(0, 1, f"prompt of {plan.memory_length:,} tokens: memory")
            peaks = [rig.prompt(core, plan.memory_length, top_k).peak_bytes or 0 for top_k in asked.values()]
            # Buffers that scores need and that exist from the start are no part of a difference of peaks.
            found.prompt_bytes = peaks[1] - max(peaks[0], peaks[2]) + core.runner.logprob_bytes

    def steps(self) -> None:
        """Off, then scores, then off again: the same tokens, bytes and launches as if nothing had been in between."""
        rig, plan, found = self.rig, self.rig.plan, self.found
        core, wanted = rig.engine("device"), Case(plan.top_k)
        reply = max(plan.reply // 4, plan.profiled + _WARM_UP_TOKENS)
        for count in plan.steps_at:
            rig.progress(0, 1, f"steps: off, {wanted}, off again, {count} at a time")
            rig.seed += 1
            turns = []
            for case in (OFF, wanted, OFF_AGAIN):
                turns.append(rig.batch(core, case, count, reply))
                if rig.on_gpu:
                    found.profiles[count, case] = engine_probes.profile_steps(
                        core, rig.requests(case, count, reply), plan.profiled
                    )
            what = f"off, {wanted}, off, {count} rows"
            for (a, b), which in zip(pairwise(turns), ("first and second", "second and third"), strict=True):
                found.differences[f"{what}: tokens that differ, {which}"] = sum(
                    x != y for name in a.tokens for x, y in zip(a.tokens[name], b.tokens[name], strict=True)
                )
            first, third = turns[0].traffic, turns[2].traffic
            if first is not None and third is not None:
                found.differences[f"{what}: bytes a step, third - first"] = third.bytes - first.bytes
            if rig.on_gpu:
                before, after = found.profiles[count, OFF], found.profiles[count, OFF_AGAIN]
                found.differences[f"{what}: launches, third - first"] = after.launches - before.launches
                found.differences[f"{what}: kernels in one of first and third"] = len(
                    set(before.kernels.items()) ^ set(after.kernels.items())
                )
                found.differences[f"scoring kernels in a step without scores, {count} rows"] = sum(
                    before.scoring.values()
                )
        if not rig.on_gpu:
            found.notes.append("the kernels of a step were left out: only on a GPU are they listed")

    def host(self) -> None:
        """The matrix where whole rows are copied and scanned: shorter replies, fewer rounds."""
        rig, plan = self.rig, self.rig.plan
        core, wanted = rig.engine("host"), Case(plan.top_k)
        self._warm_up(core, (OFF, wanted), plan.concurrency[:1])
        for count in plan.concurrency:
            rig.progress(0, 1, f"host: how long a step takes, {count} at a time")
            step = rig.batch(core, wanted, count, _SHORTEST_REPLY).tpot
            reply = min(plan.host_reply, max(_SHORTEST_REPLY, int(plan.host_seconds / step)))
            self.found.replies["host", count] = reply
            self._turns(core, "host", plan.cases, (count,), plan.host_rounds)

    def _warm_up(self, core: EngineCore, cases: tuple[Case, ...], sizes: tuple[int, ...]) -> None:
        for count in sizes:
            for case in cases:
                self.rig.progress(0, 1, f"warm-up, {count} at a time")
                self.rig.batch(core, case, count, _WARM_UP_TOKENS)

    def _turns(
        self, core: EngineCore, group: str, cases: tuple[Case, ...], sizes: tuple[int, ...], rounds: int
    ) -> None:
        """A batch of each case in each round; a round of one size counts when all of its cases are done."""
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
