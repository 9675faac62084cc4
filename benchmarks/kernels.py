"""`neper bench kernels`, with torch.compile among the baselines, and the time that the kernels take to compile.

python -m benchmarks.kernels --out bench/results
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from neper.bench import kernels, reductions
from neper.bench.kernels import BASELINES, Measurement, Reduction
from neper.bench.report import Figure, Report, at_most
from neper.guarded import guarded

COMPILED = "torch.compile(logsumexp + topk)"
COLD_SECONDS = 8
WARM_SECONDS = 1


class CompiledToo(Measurement):
    """The measurement of users, and what is compiled."""

    def baselines(self) -> dict[str, Reduction]:
        if any(COMPILED in note for note in self.notes):  # failed once, fails for each shape, and takes its time to
            return BASELINES
        torch.compiler.reset()  # else the ninth shape is silently not compiled
        return BASELINES | {COMPILED: torch.compile(reductions.logsumexp_top_k, dynamic=False, fullgraph=True)}

    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        return [*super().steps(), ("compile times", self._compile_times)]

    def report(self, baselines: tuple[str, ...] = (*BASELINES, COMPILED)) -> Report:
        report = super().report(baselines)
        if cold := self.series.get("compile, cold cache"):
            report.figures.append(at_most("compile all kernels, cold cache, s", cold.median, COLD_SECONDS))
        if warm := self.series.get("compile, warm cache"):
            met = warm.median < WARM_SECONDS
            report.figures.append(Figure("compile all kernels, warm cache, s", warm.median, f"< {WARM_SECONDS}", met))
        return report

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
                self.new_series(f"compile, {state} cache", "s").samples.append(float(result.stdout.split()[-1]))


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


@guarded
def main(
    out: Annotated[str | None, typer.Option("--out", help="Directory for kernels-<card>.json and .md.")] = None,
    device: Annotated[str, typer.Option("--device", help="The GPU: cuda or cuda:N.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test: fewer cases, fewer rounds.")] = False,
) -> None:
    """Device time of logprobs on this GPU, beside torch's and torch.compile's, and times of compilation."""
    kernels.measure(CompiledToo, out, device, quick)


if __name__ == "__main__":
    typer.run(main)
