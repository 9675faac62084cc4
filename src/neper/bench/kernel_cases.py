"""The cases of `neper bench kernels`, and their random inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A reduction of R rows of V logits to lists of k; `goal` in microseconds on an H200, logits warm in the L2."""

    rows: int
    top_k: int
    vocab_size: int = 151_936
    dtype: torch.dtype = torch.bfloat16
    goal: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the logits."""
        return self.rows * self.vocab_size * self.dtype.itemsize

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"R={self.rows} k={self.top_k} V={self.vocab_size:,} {kind}"


@dataclass(frozen=True)
class SetCase:
    """A set of `size` random ids in each row, as the argument `kind` of token_logprobs; no ids = no sets."""

    kind: str
    size: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.size:,} id{'s' * (self.size > 1)}" if self.size else "no sets"


@dataclass(frozen=True)
class Plan:
    """The cases of a run.

    Attributes:
        row_cases: those of neper and of the baselines.
        set_rows: the reduction that is given sets of ids.
        set_cases: the sets.
        host_cases: those of scoring on the device, and of copying the rows and scoring on the host.
        rounds: samples of everything.
        copy_bytes: bytes of the copy that speeds are compared with.
    """

    row_cases: tuple[Case, ...]
    set_rows: Case
    set_cases: tuple[SetCase, ...]
    host_cases: tuple[Case, ...]
    rounds: int
    copy_bytes: int = 2**28


_HOST_CASES = (Case(4, 20, vocab_size=248_320), Case(4, 20, vocab_size=248_320, dtype=torch.float32))
FULL = Plan(
    row_cases=(
        Case(1, 20, goal=8),
        Case(8, 20, goal=9),
        Case(32, 20, goal=11),
        Case(1024, 20, goal=110),
        Case(1024, 5, goal=100),
        Case(32, 0),
        Case(32, 64),
        Case(32, 20, dtype=torch.float16),
        Case(32, 20, dtype=torch.float32),
        *_HOST_CASES,
    ),
    set_rows=Case(32, 20),
    set_cases=(
        SetCase("allowed", 0),
        *(SetCase("allowed", size) for size in (1, 100, 1_000, 20_000)),
        *(SetCase("logprob_token_ids", size) for size in (128, 20_000)),
    ),
    host_cases=_HOST_CASES,
    rounds=9,
)
QUICK = Plan(
    row_cases=(Case(1, 20, goal=8), Case(32, 20, goal=11)),
    set_rows=Case(32, 20),
    set_cases=(SetCase("allowed", 0), SetCase("allowed", 100), SetCase("logprob_token_ids", 128)),
    host_cases=_HOST_CASES[:1],
    rounds=3,
)


def random_logits(case: Case, generator: torch.Generator) -> Tensor:
    """[R, V] normal x 3, on the generator's device."""
    shape = (case.rows, case.vocab_size)
    return torch.randn(shape, generator=generator, device=generator.device).mul_(3).to(case.dtype)


def random_sets(case: Case, size: int, generator: torch.Generator) -> list[Tensor]:
    """R ascending sets of `size` distinct ids, [size] int64 on the CPU."""
    return [torch.randperm(case.vocab_size, generator=generator)[:size].sort().values for _ in range(case.rows)]
