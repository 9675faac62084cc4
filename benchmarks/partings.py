"""Replies with drafts beside those without, where products of several rows round differently from those of one.

python -m benchmarks.partings --shape qwen3-4b --dtype bfloat16 --out bench/results

Each reply is followed up to its first parting: the first token that is another one with drafts. There both runs chose
the id with the best key, its logprob as it was drawn from plus its noise. What one run's key lacks to the other's is
what rounding must account for.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
import typer

from neper.bench import engine_rig, subject
from neper.bench.engine_cases import FULL
from neper.bench.engine_rig import Rig
from neper.bench.report import Column, Report, Series, Table, at_most, conditions, publish, slug
from neper.bench.speculate_cases import OneWrong
from neper.engine.core import EngineCore
from neper.engine.draft.drafting import Drafting
from neper.engine.plan.sequence import Sequence
from neper.guarded import guarded
from neper.ops.sampling.reference import gumbel, noise_keys
from neper.progress import ProgressLine
from neper.types import LogprobParams, PackedRows, Request, SamplingParams

TOP_K, REPLY, TOGETHER, DRAFTS = 20, 48, 8, 4
MEAN, P99, REGRET = 0.06, 0.20, 0.20
"""Bounds of the mean and the 99th percentile of differences of logprobs, and of a key's lack: nats."""


class Known(OneWrong):
    """Drafts from the replies without drafts, of which each fourth is another id."""

    def __init__(self, replies: Mapping[str, PackedRows], vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._replies = replies

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        drafts = {}
        for seq, most in wanted.items():
            start = len(seq.token_ids) - seq.num_prompt_tokens
            ids = self._replies[seq.request.request_id].token_ids[start : start + most].tolist()
            drafts[seq] = [(token_id + (start + n) % 4 // 3) % self._vocab_size for n, token_id in enumerate(ids)]
        return drafts


@dataclass
class Partings:
    """Attributes:
    tokens: compared, up to the first parting of each reply.
    differences: of the logprobs of tokens that both runs chose.
    lacks: at each parting, the larger of what each run's chosen key lacks in the other run, in nats.
    unlisted: partings where a run does not list the other's id: it is not among its best, or filtered.
    """

    tokens: int = 0
    differences: list[float] = field(default_factory=list)
    lacks: list[float] = field(default_factory=list)
    unlisted: int = 0

    def add(self, request: Request, off: PackedRows, on: PackedRows) -> None:
        """Compare the two replies of a request."""
        count = min(len(off), len(on))
        apart = np.flatnonzero(off.token_ids[:count] != on.token_ids[:count])
        end = int(apart[0]) if len(apart) else count
        self.tokens += end + len(apart[:1])
        self.differences += np.abs(off.logprob[:end] - on.logprob[:end]).tolist()
        if not len(apart):
            return
        ids = int(off.token_ids[end]), int(on.token_ids[end])
        keys = [_keys(request, rows, end) for rows in (off, on)]
        if not all(token_id in each for each in keys for token_id in ids):
            self.unlisted += 1
            return
        self.lacks.append(max(keys[0][ids[0]] - keys[0][ids[1]], keys[1][ids[1]] - keys[1][ids[0]]))


def _keys(request: Request, rows: PackedRows, place: int) -> dict[int, float]:
    """The keys of the listed ids at a place of a reply. A greedy choice has no noise."""
    ids, logprobs = rows.top_ids[place], rows.top_logprobs[place].astype(np.float64)
    if not request.sampling.greedy:
        assert request.sampling.seed is not None
        keys = torch.tensor([noise_keys(request.sampling.seed, place)])
        logprobs = logprobs + gumbel(keys, torch.from_numpy(ids.astype(np.int64))[None])[0].double().numpy()
    return {int(i): float(key) for i, key in zip(ids, logprobs, strict=True) if np.isfinite(key)}


def requests(count: int, vocab_size: int, seed: int = 0) -> Iterator[Request]:
    """Greedy ones, and draws with each filter."""
    rng = random.Random(seed)
    draws: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"top_n_sigma": 1.5})
    for number in range(count):
        sampling: dict[str, Any] = {"temperature": 0.0} if number % 3 == 0 else {"temperature": rng.uniform(0.3, 1.2)}
        yield Request(
            request_id=str(number),
            prompt_token_ids=[rng.randrange(vocab_size) for _ in range(rng.randint(1, 200))],
            sampling=SamplingParams(
                **sampling, **rng.choice(draws), seed=rng.getrandbits(40), max_tokens=REPLY, ignore_eos=True
            ),
            logprobs=LogprobParams(top_k=TOP_K, mode="processed_logprobs"),
        )


def replies(core: EngineCore, asked: list[Request], rig: Rig, what: str) -> dict[str, PackedRows]:
    """What each request generates, so many at a time."""
    found: dict[str, list[PackedRows]] = {request.request_id: [] for request in asked}
    waiting = list(reversed(asked))
    while waiting or core.has_work:
        while waiting and core.stats().running + core.stats().waiting < TOGETHER:
            core.add(waiting.pop())
        for chunk in core.step():
            found[chunk.request_id] += [] if chunk.tokens is None else [chunk.tokens]
        rig.progress(len(asked) - len(waiting), len(asked), what)
    return {name: PackedRows(TOP_K, b"".join(rows.data for rows in each)) for name, each in found.items()}


def run(out: str | None, count: int, chosen: subject.Subject) -> None:
    """Measure, print the table, and write `partings-<card>-<model>.json` and `.md` into the directory `out`."""
    columns = [Column("drafts"), Column("accepted", "", "{:.0%}"), Column("tokens"), Column("partings")]
    columns += [Column("mean difference", "nat", "{:.4f}"), Column("99th percentile", "nat", "{:.4f}")]
    columns += [Column("largest lack", "nat", "{:.4f}"), Column("not listed")]
    found = Report("", {}, [Table("", columns, [])], [], [], [])
    with ProgressLine(sys.stderr) as progress:
        rig = engine_rig.load(chosen, FULL, progress)
        vocab_size = rig.source.config.vocab_size
        asked = list(requests(count, vocab_size))
        off = replies(rig.engine("device"), asked, rig, "without drafts")
        rig.drop_engine()
        config = rig.config("device", speculative="ngram", draft_tokens=DRAFTS)
        drafting = EngineCore(config, rig.source, decoder=rig.decoder)
        rows = drafting.settings.draft_rows
        for name in ("ngram", "known, 3 of 4 right"):
            if name != "ngram":
                known = Known(off, vocab_size)
                drafting._drafting = Drafting(known, most=DRAFTS, rows=rows, vocab_size=vocab_size)
            on = replies(drafting, asked, rig, name)
            _report(found, name, drafting, _compared(asked, off, on))
    found.title = f"Replies with drafts beside those without, on {chosen.card}, {rig.source.name}"
    found.environment = rig.environment() | {"requests": f"{count}, {TOGETHER} at a time"} | conditions()
    publish(found, out, f"partings-{slug(chosen.card)}-{slug(rig.source.name)}")


def _compared(asked: list[Request], off: dict[str, PackedRows], on: dict[str, PackedRows]) -> Partings:
    partings = Partings()
    for request in asked:
        partings.add(request, off[request.request_id], on[request.request_id])
    return partings


def _report(found: Report, name: str, drafting: EngineCore, partings: Partings) -> None:
    stats = drafting.stats()
    accepted = stats.accepted_tokens / stats.draft_tokens if stats.draft_tokens else None
    mean, p99 = float(np.mean(partings.differences)), float(np.quantile(partings.differences, 0.99))
    lack, count = max(partings.lacks, default=0.0), len(partings.lacks) + partings.unlisted
    found.tables[0].rows.append([name, accepted, partings.tokens, count, mean, p99, lack, partings.unlisted])
    if partings.lacks:
        found.series.append(Series(f"{name}: lack at each parting", "nat", partings.lacks))
    found.figures += [
        at_most(f"mean difference: {name}", mean, MEAN),
        at_most(f"99th percentile of differences: {name}", p99, P99),
        at_most(f"largest lack at a parting: {name}", lack, REGRET),
    ]


@guarded
def main(
    model: Annotated[str | None, typer.Option("--model", help="A model as `neper serve` takes it.")] = None,
    shape: Annotated[str | None, typer.Option("--shape", help="Random weights: qwen3-4b, qwen3-0.6b.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32 or bfloat16.")] = None,
    count: Annotated[int, typer.Option("--requests", help="Random requests.")] = 300,
    out: Annotated[str | None, typer.Option("--out", help="Directory for partings-<card>-<model>.json, .md.")] = None,
) -> None:
    """How often replies part from those without drafts, and by how little."""
    run(out, count, subject.choose("partings", model=model, shape=shape, device=device, dtype=dtype))


if __name__ == "__main__":
    typer.run(main)
