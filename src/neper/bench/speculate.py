"""`neper bench speculate`: an engine that drafts beside one that does not, on the same weights."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from neper.bench import engine_rig, report
from neper.bench.engine_drive import run_batch
from neper.bench.engine_rig import Rig
from neper.bench.report import Column, Report, Series, Table, at_least, at_most, between, pairs, slug
from neper.bench.speculate_cases import DRAFTS, FORCED, RIGHT, TEXTS, Group, OneWrong, forced, texts
from neper.bench.subject import Subject
from neper.config import DEFAULT_MODEL
from neper.engine.core import EngineCore
from neper.engine.draft.drafting import Drafting
from neper.errors import NeperError
from neper.progress import ProgressLine

TOP_K = 20
WAYS = ("off", "drafts", f"drafts, k={TOP_K}", "drafts again", "off again")
COPIED = 0.6
"""The fraction of a copying reply that must be accepted drafts."""
COLUMNS = [
    *(Column("case"), Column("off", "tok/s", "{:,.1f} tok/s")),
    *(Column("drafts", "tok/s", "{:,.1f} tok/s"), Column("/ off", "", "{:.3f}"), Column("A / A", "", "±{:.2%}")),
    *(Column(f"time with k={TOP_K}", "", "{:.4f} x"), Column("A / A, drafts", "", "±{:.2%}")),
    *(Column("drafts accepted", "", "{:.1%}"), Column("tokens a step", "", "{:.2f}"), Column("rounds")),
]


def run(chosen: Subject, out: str | None, *, rounds: int | None = None, quick: bool = False) -> None:
    """Measure, print the table, and write `speculate-<card>-<model>.json` and `.md` into the directory `out`.

    Args:
        out: None = print only.
        rounds: batches of each case; None = 5, or 2 with `quick`.

    Raises:
        StartupError: arguments that do not go together, or that the machine cannot meet.
        NeperError: a request failed, or a shape did not repeat its last token.
    """
    plan = FORCED if chosen.shape else TEXTS
    if quick:
        plan = replace(plan, reply=17, rounds=2)
    found = Report(f"Speculative decoding on {chosen.card}", {}, [Table("", COLUMNS, [])], [], [], [])
    with ProgressLine(sys.stderr) as progress:
        rig = engine_rig.load(chosen, plan, progress, rounds=rounds)
        groups = forced(rig) if chosen.shape else texts(rig)
        plain = rig.engine("device")
        progress(0, 1, "starting an engine that drafts")
        wanted: dict[str, Any] = {"draft_tokens": DRAFTS} if chosen.shape else {}
        drafting = EngineCore(rig.config("device", speculative="ngram", **wanted), rig.source, decoder=rig.decoder)
        if chosen.shape:
            vocab_size = rig.source.config.vocab_size
            rows = drafting.settings.draft_rows
            drafting._drafting = Drafting(OneWrong(vocab_size), most=DRAFTS, rows=rows, vocab_size=vocab_size)
        for group in groups:
            _measure(group, rig, plain, drafting, found)
    found.title += f", {rig.source.name}"
    found.environment = rig.environment() | _method(rig) | report.conditions()
    report.publish(found, out, f"speculate-{slug(chosen.card)}-{slug(rig.source.name)}")


def _measure(group: Group, rig: Rig, plain: EngineCore, drafting: EngineCore, found: Report) -> None:
    """Compute a group's requests in each way in turn, and add what was found to the report."""
    series = [Series(f"{group.name}, {way}", "tok/s") for way in WAYS]
    rounds = rig.plan.rounds
    before = drafting.stats()
    for done, (place, counts, number) in enumerate(report.turns(range(len(WAYS)), rounds)):
        way = WAYS[place]
        rig.progress(done, len(WAYS) * (rounds + 1), f"{group.name}: {number}, {way}")
        rig.seed += place == 0
        requests = group.requests(TOP_K if "k=" in way else None)
        batch = run_batch(drafting if "drafts" in way else plain, requests)
        if rig.subject.shape and any(set(batch.tokens[r.request_id]) != {r.prompt_token_ids[-1]} for r in requests):
            raise NeperError(f"{rig.source.name} does not repeat its last token, on which the drafts rely")
        if counts:
            series[place].samples.append(batch.decode_rate)
    after = drafting.stats()
    # Each batch has a prefill, which is one step and brings a token to each request.
    batches = (rounds + 1) * sum("drafts" in way for way in WAYS)
    tokens = after.generated_tokens - before.generated_tokens - batches * group.count
    proposed, accepted = after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens
    per_step = tokens / group.count / (after.steps - before.steps - batches)

    off, drafts, listed, drafts_again, off_again = (one.samples for one in series)
    gain, spread = pairs(between(drafts, drafts_again), between(off, off_again)), pairs(off_again, off).spread
    cost, cost_spread = pairs(between(drafts, drafts_again), listed), pairs(drafts_again, drafts).spread
    found.series += series
    found.tables[0].rows.append(
        [
            *(group.name, series[0].median, series[1].median, gain.median, spread, cost.median),
            *(cost_spread, accepted / proposed if proposed else None, per_step, rounds),
        ]
    )
    # A gain is no difference between repetitions. Only a bound below 1 gives way to that.
    found.figures.append(
        at_least(f"tok/s / off: {group.name}", gain.median, group.bound, spread=spread * (group.bound < 1))
    )
    if rig.subject.shape:
        found.figures.append(at_most(f"time with k={TOP_K}: {group.name}", cost.median, 1.01, spread=cost_spread))
    elif group.copies:
        found.figures.append(at_least(f"tokens that were drafts: {group.name}", accepted / tokens, COPIED))


def _method(rig: Rig) -> dict[str, str]:
    plan = rig.plan
    if rig.subject.shape:
        requests = f"{plan.prompt} random tokens in, {plan.reply} out, greedy"
        drafts = (
            f"{RIGHT} right tokens and a wrong one in each step; the layers' norms are scaled down, so that the model "
            "repeats its last token and a step takes no other time"
        )
        bounds = "for qwen3-4b in bfloat16 on an H200"
    else:
        requests = f"{plan.reply} tokens out; the copy is greedy, the other text is drawn at temperature 1"
        drafts, bounds = "ngram, with its defaults", f"for {DEFAULT_MODEL} on a CPU"
    return {
        "requests": f"{requests}; no prefix cache",
        "drafts": drafts,
        "tok/s": "of all requests, from the first token to the last",
        "/ off": "median of the rounds",
        "time": f"with k={TOP_K} over without, both with drafts",
        "A / A": "half the range of off again / off, and of drafts again / drafts",
        "rounds": f"{plan.rounds}, cases taking turns, after one to warm up",
        "bounds": bounds,
    }
