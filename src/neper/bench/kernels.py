"""`neper bench kernels`: device time of the reduction of logits to scores, beside torch's, on this GPU.

Each case is checked against plain torch on the CPU before it is timed. The implementations take turns: every round
takes one sample of each, so that a slow moment of the card affects all of them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from neper.bench import kernel_report, reductions
from neper.bench.device_time import Replay, cold_calls, cold_inputs, take_turns, warm_calls
from neper.bench.kernel_cases import FULL, QUICK, Case, Plan, random_logits, random_sets
from neper.bench.kernel_report import NEPER, series_name
from neper.bench.report import Report, Series, first_line, publish, slug, turns
from neper.engine import settings
from neper.errors import NeperError, StartupError
from neper.ops import LogprobBuffers, TokenLogprobs, TokenSets, backends, token_logprobs
from neper.ops.packing.reference import pack_scores
from neper.progress import ProgressLine
from neper.types import packed_width

Reduction = Callable[[Tensor, Tensor, int], Any]
"""Called with logits, token ids and top_k."""

BASELINES: dict[str, Reduction] = {
    "torch log_softmax + topk": reductions.log_softmax_top_k,
    "torch logsumexp + topk": reductions.logsumexp_top_k,
}
"""The implementations beside which neper is timed."""


def run(out: str | None, *, device: str = "cuda", quick: bool = False) -> None:
    """Measure, print the tables, and write `kernels-<card>.json` and `.md` into the directory `out` if there is one.

    Raises:
        StartupError: without such a GPU.
        NeperError: if a kernel's result is wrong.
    """
    measure(Measurement, out, device, quick)


def measure(kind: type[Measurement], out: str | None, device: str, quick: bool) -> None:
    """One run of a kind of measurement. Arguments and errors as in `run`."""
    target = gpu(device)
    torch.cuda.set_device(target)
    with torch.inference_mode(), ProgressLine(sys.stderr) as progress:
        found = kind(target, QUICK if quick else FULL, progress).run()
    publish(found, out, f"kernels-{slug(torch.cuda.get_device_name(target))}")


def gpu(device: str) -> torch.device:
    """The CUDA device of this name.

    Raises:
        StartupError: if it is no CUDA device, or not on this machine.
    """
    try:
        target = torch.device(device)
    except RuntimeError:
        target = torch.device("cpu")
    if target.type != "cuda":
        raise StartupError(f"bench kernels times CUDA graphs: --device must be cuda or cuda:N, not {device}")
    if not torch.cuda.is_available():
        build = torch.version.cuda or torch.version.hip
        why = "torch sees none here" if build else "this torch is a build without CUDA"
        raise StartupError(f"bench kernels needs a GPU: {why}")
    return torch.device("cuda", settings.choose_device(device).index or 0)


@dataclass
class Measurement:
    """One run: its progress, and its results so far."""

    device: torch.device
    plan: Plan
    progress: ProgressLine
    series: dict[str, Series] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self) -> Report:
        steps = self.steps()
        for done, (what, step) in enumerate(steps):
            self.progress(done, len(steps), what)
            step()
            torch.cuda.empty_cache()  # graphs keep the memory of their calls as long as they live
        return self.report()

    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        """The steps of the measurement, with their names."""
        steps: list[tuple[str, Callable[[], None]]] = [("copy on the device", self._copy)]
        steps += [(str(case), partial(self._rows, case)) for case in self.plan.row_cases]
        steps += [("sets of ids", self._sets)]
        return steps + [(f"{case} against the host", partial(self._host, case)) for case in self.plan.host_cases]

    def baselines(self) -> dict[str, Reduction]:
        """The implementations beside which the next case is timed."""
        return BASELINES

    def report(self, baselines: tuple[str, ...] = tuple(BASELINES)) -> Report:
        card = torch.cuda.get_device_name(self.device)
        return kernel_report.report(card, self._environment(), self.series, self.notes, self.plan, baselines)

    def new_series(self, name: str, unit: str = "us") -> Series:
        return self.series.setdefault(name, Series(name, unit))

    def _copy(self) -> None:
        source = torch.empty(self.plan.copy_bytes, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        take_turns({"": Replay(lambda _: target.copy_(source), 20)}, self.plan.rounds, {"": self.new_series("copy")})

    def _rows(self, case: Case) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        inputs = [random_logits(case, generator) for _ in range(cold_inputs(case.nbytes, l2_bytes))]
        token_ids = torch.randint(case.vocab_size, (case.rows,), generator=generator, device=self.device)
        out = self._buffers(case, case.top_k)
        checked = token_logprobs(inputs[0], token_ids, case.top_k, out=out)
        reductions.check(str(case), checked, inputs[0], token_ids, case.top_k)
        checked = TokenLogprobs(*(t.clone() for t in checked))
        ways: dict[str, Reduction] = {NEPER: partial(token_logprobs, out=out)}
        replays: dict[str, Replay] = {}
        for way, reduce in (ways | self.baselines()).items():
            states = {"warm": (inputs[:1], warm_calls(case.nbytes))}
            if len(inputs) > 1:
                states["cold"] = (inputs, cold_calls(case.nbytes, len(inputs)))
            try:
                made = {
                    series_name(case, state, way): Replay(_rotating(reduce, rows, token_ids, case.top_k), calls)
                    for state, (rows, calls) in states.items()
                }
            except Exception as error:
                if way == NEPER:
                    raise
                self.notes.append(f"{case}: {way} was left out: {first_line(error)}")
                continue
            replays |= made
        self._take_turns(replays)
        # The graphs' calls overlap, which the checked one could not: they must still write the very same bits.
        replays[series_name(case, "warm", NEPER)].run()
        if not all(map(torch.equal, checked, out.view(case.rows, case.top_k))):
            raise NeperError(f"wrong result: {case}: calls in a CUDA graph differ from the same call alone")

    def _sets(self) -> None:
        rows = self.plan.set_rows
        logits = random_logits(rows, torch.Generator(self.device).manual_seed(0))
        top_k = rows.top_k
        replays: dict[str, Replay] = {}
        for case in self.plan.set_cases:
            # Sets of different sizes must have different ids.
            sets = random_sets(rows, case.size, torch.Generator().manual_seed(case.size))
            # A token of its own set, so that there is something to score.
            token_ids = torch.tensor([int(ids[0]) if len(ids) else 0 for ids in sets], device=self.device)
            given: dict[str, Any] = {case.kind: TokenSets.of([ids.tolist() for ids in sets], self.device)}
            call = partial(token_logprobs, logits, token_ids, top_k, **given)
            call = partial(call, out=self._buffers(rows, call().top_ids.shape[1]))
            reductions.check(str(case), call(), logits, token_ids, top_k, **{case.kind: sets})
            replay = Replay(_ignoring_index(call), warm_calls(rows.nbytes))
            replays[series_name(rows, "warm", str(case))] = replay
        self._take_turns(replays)

    def _host(self, case: Case) -> None:
        """Wall-clock time until the scores are in host memory, by the two ways."""
        logits = random_logits(case, torch.Generator(self.device).manual_seed(0))
        here = torch.randint(case.vocab_size, (case.rows,), generator=torch.Generator().manual_seed(0))
        there = here.to(self.device)
        pinned = self.device.type == "cuda"
        rows = torch.empty(logits.shape, dtype=case.dtype, pin_memory=pinned)
        words = torch.empty(case.rows * packed_width(case.top_k), dtype=torch.int32, pin_memory=pinned)
        out = self._buffers(case, case.top_k)

        def on_device() -> None:
            scores = token_logprobs(logits, there, case.top_k, out=out)
            words.copy_(pack_scores(there, scores, case.top_k), non_blocking=True)
            torch.cuda.synchronize()

        ways: dict[str, Callable[[], Any]] = {
            "host": partial(reductions.host_scan, logits, here, case.top_k, rows),
            "device": on_device,
        }
        for way, counts, _ in turns(ways, self.plan.rounds):
            torch.cuda.synchronize()
            start = time.perf_counter()
            ways[way]()
            seconds = time.perf_counter() - start
            if counts:
                self.new_series(series_name(case, "wall clock", way)).samples.append(1e6 * seconds)

    def _buffers(self, case: Case, width: int) -> LogprobBuffers:
        """Buffers that hold nonsense, so that the check notices places that are not written."""
        out = LogprobBuffers.allocate(case.rows, case.vocab_size, width, self.device)
        for score in out.scores:
            score.fill_(77)
        return out

    def _take_turns(self, replays: dict[str, Replay]) -> None:
        for name, replay in replays.items():
            self.new_series(name)
            if replay.why_not_captured:
                self.notes.append(f"{name}: no CUDA graph, timed call by call: {replay.why_not_captured}")
        take_turns(replays, self.plan.rounds, self.series)

    def _environment(self) -> dict[str, Any]:
        card = torch.cuda.get_device_properties(self.device)
        backend = backends.chosen(self.device)["scoring"]
        return {
            "gpu": f"{card.name}, {card.total_memory / 2**30:.0f} GiB, {card.L2_cache_size / 2**20:.0f} MiB of L2",
            "driver": _driver_version(),
            "cuda": torch.version.cuda or f"HIP {torch.version.hip}",
            "triton": _triton_version(),
            "neper's reduction": f"{backend.name} ({backend.why})",
            "logits": "normal x 3, a fixed seed; random tokens",
            "time": "device time of a call: a CUDA graph of about 50 calls, replayed, divided by their number",
            "rounds": f"{self.plan.rounds}, implementations taking turns, after two to warm up; spread: A against A",
        }


def _rotating(reduce: Reduction, inputs: list[Tensor], token_ids: Tensor, top_k: int) -> Callable[[int], Any]:
    return lambda i: reduce(inputs[i % len(inputs)], token_ids, top_k)


def _ignoring_index(call: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda _: call()


def _driver_version() -> str:
    """The NVIDIA driver's version; torch does not tell it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown (nvidia-smi does not answer)"
    return result.stdout.split()[0] if result.stdout.strip() else "unknown"


def _triton_version() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "not installed"
