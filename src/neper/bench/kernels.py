"""`neper bench kernels`: device time of the reduction of logits to scores, beside torch's, on this GPU.

Each case is held against float64 and a stable sort before it is timed. What is compared takes turns: every round takes
one sample of each implementation, so that a slow moment of the card falls on all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neper.bench import kernel_report, reductions
from neper.bench.device_time import Replay, cold_calls, cold_inputs, take_turns, warm_calls
from neper.bench.kernel_cases import FULL, QUICK, Case, Plan, random_logits, random_sets, sampled_rows
from neper.bench.kernel_report import BASELINES, NEPER, row_words, series_name
from neper.bench.report import Report, Series
from neper.errors import NeperError, StartupError
from neper.ops import LogprobBuffers, TokenLogprobs, TokenSets, backends, token_logprobs
from neper.ops.packing.reference import pack_scores
from neper.progress import ProgressLine

Reduction = Callable[[Tensor, Tensor, int], Any]
"""Called with logits, token ids and top_k."""


def run(out: str | None, *, device: str = "cuda", quick: bool = False, compiled: bool = True) -> None:
    """Measure, print the tables, and write `kernels-<card>.json` and `.md` into the directory `out` if there is one.

    Raises:
        StartupError: without such a GPU.
        NeperError: if a kernel's result is wrong.
    """
    target = gpu(device)
    torch.cuda.set_device(target)
    with torch.inference_mode(), ProgressLine(sys.stderr) as progress:
        report = _Measurement(target, QUICK if quick else FULL, compiled, progress).run()
    if out is not None:
        report.save(Path(out), f"kernels-{kernel_report.slug(torch.cuda.get_device_name(target))}")
    print(report.markdown(), end="")


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
    count = torch.cuda.device_count()
    if target.index is not None and target.index >= count:
        raise StartupError(f"bench kernels: there is no {device}, the last of {count} is cuda:{count - 1}")
    return torch.device("cuda", target.index or 0)


def check(
    what: str,
    got: TokenLogprobs,
    logits: Tensor,
    token_ids: Tensor,
    top_k: int,
    *,
    allowed: list[Tensor] | None = None,
    named: list[Tensor] | None = None,
) -> None:
    """Hold some rows of a result against float64.

    Args:
        what: the case, for the message.
        allowed, named: a set a row, ascending int64 on the CPU.

    Raises:
        NeperError: on a difference.
    """
    here = TokenLogprobs(*(t.cpu() for t in got))
    for row in sampled_rows(len(logits)):
        wrong = reductions.mismatch(
            here,
            row,
            logits[row].cpu(),
            int(token_ids[row]),
            top_k,
            allowed=allowed[row] if allowed is not None else None,
            named=named[row] if named is not None else None,
        )
        if wrong is not None:
            raise NeperError(f"wrong result, nothing is timed: {what}, row {row}: {wrong}")


def baselines(compiled: bool) -> dict[str, Reduction]:
    """What neper is timed against, by name."""
    ways: list[Reduction] = [reductions.log_softmax_top_k, reductions.logsumexp_top_k]
    if compiled:
        ways.append(torch.compile(reductions.logsumexp_top_k, dynamic=False, fullgraph=True))
    return dict(zip(BASELINES, ways, strict=False))


@dataclass
class _Measurement:
    """One run: its progress, and what it has found so far."""

    device: torch.device
    plan: Plan
    compiled: bool
    progress: ProgressLine
    series: dict[str, Series] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self) -> Report:
        if not self.compiled:
            self.notes.append(f"{BASELINES[-1]} was left out: --no-compile")
        steps: list[tuple[str, Callable[[], None]]] = [("copy on the device", self._copy)]
        steps += [(str(case), partial(self._rows, case)) for case in self.plan.row_cases]
        steps += [("sets of ids", self._sets)]
        steps += [(f"{case} against the host", partial(self._host, case)) for case in self.plan.host_cases]
        steps += [("compile times", self._compile_times)]
        for done, (what, step) in enumerate(steps):
            self.progress(done, len(steps), what)
            step()
            torch.cuda.empty_cache()  # graphs keep the memory of their calls as long as they live
        card = torch.cuda.get_device_name(self.device)
        return kernel_report.report(card, self._setup(), self.series, self.notes, self.plan)

    def _new(self, name: str, unit: str = "us") -> Series:
        return self.series.setdefault(name, Series(name, unit))

    def _copy(self) -> None:
        source = torch.empty(self.plan.copy_bytes, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        take_turns({"": Replay(lambda _: target.copy_(source), 20)}, self.plan.rounds, {"": self._new("copy")})

    def _rows(self, case: Case) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        inputs = [random_logits(case, generator) for _ in range(cold_inputs(case.nbytes, l2_bytes))]
        token_ids = torch.randint(case.vocab_size, (case.rows,), generator=generator, device=self.device)
        out = self._buffers(case, case.top_k)
        checked = token_logprobs(inputs[0], token_ids, case.top_k, out=out)
        check(str(case), checked, inputs[0], token_ids, case.top_k)
        checked = TokenLogprobs(*(t.clone() for t in checked))
        torch.compiler.reset()  # else the ninth shape is silently not compiled
        ways: dict[str, Reduction] = {NEPER: partial(token_logprobs, out=out)}
        replays: dict[str, Replay] = {}
        for way, reduce in (ways | baselines(self.compiled)).items():
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
                self.notes.append(f"{case}: {way} was left out: {_first_line(error)}")
                if way == BASELINES[-1]:
                    self.compiled = False  # what fails once, fails for each shape, and takes its time to
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
            # Sets of another size must not be the same ids but for their number.
            sets = random_sets(rows, case.size, torch.Generator().manual_seed(case.size))
            # A token of its own set, so that there is something to score.
            token_ids = torch.tensor([int(ids[0]) if len(ids) else 0 for ids in sets], device=self.device)
            given = TokenSets.of([ids.tolist() for ids in sets], self.device)
            restricts = case.kind == "allowed"
            call = partial(
                token_logprobs,
                logits,
                token_ids,
                top_k,
                allowed=given if restricts else None,
                logprob_token_ids=None if restricts else given,
            )
            call = partial(call, out=self._buffers(rows, call().top_ids.shape[1]))
            check(
                str(case),
                call(),
                logits,
                token_ids,
                top_k,
                allowed=sets if case.size and restricts else None,
                named=sets if case.size and not restricts else None,
            )
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
        words = torch.empty(case.rows * row_words(case.top_k), dtype=torch.int32, pin_memory=pinned)
        out = self._buffers(case, case.top_k)

        def on_device() -> None:
            scores = token_logprobs(logits, there, case.top_k, out=out)
            words.copy_(pack_scores(there, scores, case.top_k), non_blocking=True)
            torch.cuda.synchronize()

        ways: dict[str, Callable[[], Any]] = {
            "host": partial(reductions.host_scan, logits, here, case.top_k, rows),
            "device": on_device,
        }
        for number in range(-1, self.plan.rounds):
            for way, call in ways.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                call()
                if number >= 0:
                    self._new(series_name(case, "wall clock", way)).samples.append(1e6 * (time.perf_counter() - start))

    def _compile_times(self) -> None:
        """Seconds in which a fresh process has every kernel that serving needs, with an empty and a filled cache."""
        rows = self.plan.set_rows
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                result = subprocess.run(
                    [sys.executable, "-c", _WARM_UP, str(self.device), str(rows.vocab_size), str(rows.top_k)],
                    env=os.environ | {"TRITON_CACHE_DIR": cache},
                    capture_output=True,
                    text=True,
                )
                if result.returncode != 0:
                    last = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[-1]
                    self.notes.append(f"compile times were not measured: {last}")
                    return
                self._new(f"compile, {state} cache", "s").samples.append(float(result.stdout.split()[-1]))

    def _buffers(self, case: Case, width: int) -> LogprobBuffers:
        """Buffers that hold nonsense, so that the check sees what is not written."""
        out = LogprobBuffers.allocate(case.rows, case.vocab_size, width, self.device)
        for score in out.scores:
            score.fill_(77)
        return out

    def _take_turns(self, replays: dict[str, Replay]) -> None:
        for name, replay in replays.items():
            self._new(name)
            if replay.why_not_captured:
                self.notes.append(f"{name}: no CUDA graph, timed call by call: {replay.why_not_captured}")
        take_turns(replays, self.plan.rounds, self.series)

    def _setup(self) -> dict[str, Any]:
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


_WARM_UP = """
import sys, time, torch
device, vocab_size, top_k = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.cuda.set_device(device)
torch.zeros(1, device=device)
import triton, neper.ops  # importing is not compiling
start = time.perf_counter()
neper.ops.warm_up(vocab_size=vocab_size, dtype=torch.bfloat16, max_top_k=top_k, device=device)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def _rotating(reduce: Reduction, inputs: list[Tensor], token_ids: Tensor, top_k: int) -> Callable[[int], Any]:
    return lambda i: reduce(inputs[i % len(inputs)], token_ids, top_k)


def _ignoring_index(call: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda _: call()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


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
