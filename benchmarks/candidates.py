"""Candidates of a prompt, beside each of them computed from scratch, on the same engine.

python -m benchmarks.candidates --device cpu --out bench/results
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import typer

from neper.bench import report, subject
from neper.bench.report import Column, Figure, Report, Series, Table, at_least, pairs, slug
from neper.bench.subject import Subject
from neper.candidates import compare
from neper.config import DEFAULT_MODEL
from neper.engine.core import EngineCore
from neper.engine.llm import LLM
from neper.engine.plan.scheduler import StepPlan
from neper.engine.step.runner import BegunStep
from neper.guarded import guarded
from neper.types import LogprobParams, SamplingParams

FACTOR = 5.0
"""The least ratio of the two costs."""
TOLERANCE = 1e-4
"""The largest distance of a total from the sum of the whole text's prompt logprobs, in float32."""


@dataclass(frozen=True)
class Plan:
    """The sizes of a run.

    Attributes:
        prompt: tokens of the prompt.
        candidates: their number.
        longest: candidates have 1 to so many tokens, in turn.
        rounds: times that each way is measured.
    """

    prompt: int = 500
    candidates: int = 200
    longest: int = 4
    rounds: int = 3


QUICK = Plan(prompt=70, candidates=12, rounds=1)
Candidates = list[tuple[int, ...]]


def shared(llm: LLM, prompt: list[int], candidates: Candidates) -> list[float]:
    """Totals by `score_candidates`."""
    return [scored.logprob for scored in llm.score_candidates(prompt, list(map(list, candidates)))]


def from_scratch(llm: LLM, prompt: list[int], candidates: Candidates) -> list[float]:
    """Totals of whole texts, each computed alone but together in batches, of which the candidates' rows are scored."""
    texts = [[*prompt, *candidate] for candidate in candidates]
    scores = LogprobParams(prompt_top_k=0, prompt_start=len(prompt))
    replies = llm.generate([*texts], SamplingParams(max_tokens=0), scores)
    rows = [reply.prompt_logprobs for reply in replies]
    return [comparison.logprob for comparison in compare([row.logprob for row in rows if row is not None])]


WAYS: dict[str, Callable[[LLM, list[int], Candidates], list[float]]] = {
    "candidates": shared,
    "each from scratch": from_scratch,
}


class StepTokens:
    """Counts the tokens of an engine's steps.

    Attributes:
        total: since it was made.
    """

    def __init__(self, core: EngineCore) -> None:
        self.total = 0
        self._begin = core.runner.begin
        core.runner.begin = self._count  # type: ignore[assignment, method-assign]

    def _count(self, plan: StepPlan) -> BegunStep:
        self.total += plan.num_tokens
        return self._begin(plan)


def measure(llm: LLM, plan: Plan) -> Report:
    """Both ways in turn, on fresh prompts; where the engine caches no prefixes, they have nothing else in common."""
    generator = random.Random(0)
    vocab_size = llm.tokenizer.vocab_size
    counter = StepTokens(llm.core)
    series = {name: Series(name, "s") for name in WAYS}
    tokens: dict[str, int] = {}
    worst = 0.0
    prompt: list[int] = []
    candidates: Candidates = []
    totals: list[float] = []
    for name, counts, number in report.turns(WAYS, plan.rounds):
        first = name == next(iter(WAYS))
        if first:
            prompt = [generator.randrange(vocab_size // 4, vocab_size) for _ in range(plan.prompt)]
            candidates = [
                tuple(generator.randrange(vocab_size // 4, vocab_size) for _ in range(1 + place % plan.longest))
                for place in range(plan.candidates)
            ]
        before = counter.total
        start = time.perf_counter()
        found = WAYS[name](llm, prompt, candidates)
        seconds = time.perf_counter() - start
        print(f"{number}: {name}: {seconds:.3f} s", file=sys.stderr, flush=True)
        tokens[name] = counter.total - before
        if counts:
            series[name].samples.append(seconds)
        if first:
            totals = found
        else:
            worst = max(worst, *(abs(a - b) for a, b in zip(totals, found, strict=True)))
    once, each = series.values()
    settings = llm.core.settings
    dtype = str(settings.dtype).removeprefix("torch.")
    figures = [
        at_least("time of each from scratch / of candidates", pairs(each.samples, once.samples).median, FACTOR),
        at_least("tokens of each from scratch / of candidates", tokens[each.name] / tokens[once.name], FACTOR),
    ]
    if dtype == "float32":
        figures.append(Figure("largest difference of a total", worst, f"<= {TOLERANCE}", worst <= TOLERANCE))
    columns = [
        Column("way"),
        Column("time", "s", "{:.3f} s"),
        Column("spread", "", "±{:.1%}"),
        Column("tokens computed"),
    ]
    environment = {
        "model": llm.source.name,
        "dtype": dtype,
        "prompt": f"{plan.prompt} tokens",
        "candidates": f"{plan.candidates} of 1 to {plan.longest} tokens",
        "sequences at a time": settings.max_num_seqs,
        "tokens a step": settings.max_num_batched_tokens,
        "rounds": f"{plan.rounds}, ways taking turns, after one to warm up",
    } | report.conditions()
    table = Table("", columns, [[s.name, s.median, s.spread, tokens[s.name]] for s in (once, each)])
    return Report(f"Candidates of a prompt, {llm.source.name}", environment, [table], figures, [], [once, each])


def run(chosen: Subject, out: str | None, plan: Plan) -> None:
    """Measure, print the table, and write `candidates-<card>-<model>.json` and `.md` into the directory `out`."""
    model = chosen.model or DEFAULT_MODEL
    llm = LLM(model, device=str(chosen.device), dtype=chosen.dtype_name, prefix_caching=False)
    found = measure(llm, plan)
    found.title += f" on {chosen.card}"
    report.publish(found, out, f"candidates-{slug(chosen.card)}-{slug(llm.source.name)}")


@guarded
def main(
    model: Annotated[str | None, typer.Option("--model", help="A model as `neper serve` takes it.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    out: Annotated[
        str | None, typer.Option("--out", help="Directory for candidates-<card>-<model>.json and .md.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Times that each way is measured.", min=1)] = Plan.rounds,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test: few and short ones.")] = False,
) -> None:
    """200 candidates after a prompt of 500 tokens, beside each of them computed from scratch."""
    chosen = subject.choose("candidates", model=model or DEFAULT_MODEL, device=device, dtype=dtype)
    run(chosen, out, QUICK if quick else Plan(rounds=rounds))


if __name__ == "__main__":
    typer.run(main)
