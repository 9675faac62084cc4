"""The report of `neper bench http`: a table and bounds from samples. Needs no server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from neper import machine
from neper.bench import http_load
from neper.bench.http_load import Batch
from neper.bench.report import Column, Figure, Report, Series, Table, at_least, at_most, between, conditions, pairs

SCORES_BOUND = 0.97
CPU_BOUND = 20
FLOOD_BOUND = 0.95
NOISY = 0.1
"""A spread of A against A beyond which bounds say little."""
FLOOD = 200
"""Requests beyond those that the server takes."""


@dataclass(frozen=True)
class Way:
    """A case: the options of its streams, and a flood of more requests or none.

    Attributes:
        top_k: alternatives of each token; None = no logprobs.
    """

    name: str
    top_k: int | None = None
    flooded: bool = False


OFF = Way("off")
NO_ALTERNATIVES = Way("top_logprobs 0", top_k=0)
SCORED = Way("top_logprobs 20", top_k=20)
FLOODED = Way(f"off, {FLOOD} more refused", flooded=True)
OFF_AGAIN = Way("off again")
WAYS = (OFF, NO_ALTERNATIVES, SCORED, FLOODED, OFF_AGAIN)
COLUMNS = [
    Column("case"),
    Column("tok/s", "tok/s", "{:.1f}"),
    Column("spread", "", "±{:.1%}"),
    Column("/ off", "", "{:.3f}"),
    Column("API process, CPU us a token", "us", "{:.1f}", "not measured"),
    Column("client, CPU us a token", "us", "{:.1f}"),
    Column("samples"),
]


@dataclass
class Findings:
    """The samples of a run, one per round in every series.

    Attributes:
        rates: tokens per second of all streams, by way.
        api: CPU microseconds of the API process per token, by way; without samples where the system does not tell.
        client: the same of this process.
        refused: requests of a flood that were refused with a time to come again. flood: milliseconds until the last.
    """

    streams: int
    reply: int
    rates: dict[Way, Series] = field(default_factory=lambda: _series("tok/s", "tok/s"))
    api: dict[Way, Series] = field(default_factory=lambda: _series("API process, CPU a token", "us"))
    client: dict[Way, Series] = field(default_factory=lambda: _series("client, CPU a token", "us"))
    refused: Series = field(default_factory=lambda: Series("refused", "requests"))
    flood: Series = field(default_factory=lambda: Series("until all were refused", "ms"))

    @property
    def tokens(self) -> int:
        """The tokens of a batch."""
        return self.streams * self.reply

    def rate(self, batch: Batch) -> float:
        return self.tokens / batch.seconds

    def add(self, way: Way, batch: Batch, api_seconds: float | None) -> None:
        """One more batch of a case; `api_seconds`: CPU time of the API process, None where it is not known."""
        self.rates[way].samples.append(self.rate(batch))
        self.client[way].samples.append(1e6 * batch.client_seconds / self.tokens)
        if api_seconds is not None:
            self.api[way].samples.append(1e6 * api_seconds / self.tokens)
        if way.flooded:
            self.refused.samples.append(sum(map(http_load.refused, batch.flood)))
            self.flood.samples.append(1e3 * batch.flood_seconds)

    def over_off(self, way: Way) -> Series:
        """Tokens per second of a case over those without logprobs, one ratio per round."""
        return pairs(self.rates[way].samples, between(self.rates[OFF].samples, self.rates[OFF_AGAIN].samples))

    @property
    def spread(self) -> float:
        """The spread of A against A: half the range of off again / off."""
        return pairs(self.rates[OFF_AGAIN].samples, self.rates[OFF].samples).spread


def report(title: str, environment: dict[str, Any], found: Findings) -> Report:
    """The report of a run from its samples."""
    rows = []
    for way in WAYS:
        rate, api = found.rates[way], found.api[way].median if found.api[way].samples else None
        over, client = found.over_off(way).median, found.client[way].median
        rows.append([way.name, rate.median, rate.spread, over, api, client, len(rate.samples)])
    series = [*found.rates.values(), *found.api.values(), *found.client.values(), found.refused, found.flood]
    return Report(
        title=title,
        environment=environment | conditions(),
        tables=[Table("All streams together", COLUMNS, rows)],
        figures=_bounds(found),
        notes=_notes(found),
        series=[one for one in series if one.samples],
    )


def _series(what: str, unit: str) -> dict[Way, Series]:
    return {way: Series(f"{way.name}: {what}", unit) for way in WAYS}


def _bounds(found: Findings) -> list[Figure]:
    bounds = [
        at_least(f"tok/s: {way.name} / off", found.over_off(way).median, bound, spread=found.spread)
        for way, bound in ((SCORED, SCORES_BOUND), (NO_ALTERNATIVES, SCORES_BOUND), (FLOODED, FLOOD_BOUND))
    ]
    if found.api[SCORED].samples:
        bounds.append(at_most(f"API process, CPU us a token, {SCORED.name}", found.api[SCORED].median, CPU_BOUND))
    fewest = min(found.refused.samples)
    return [
        *bounds,
        Figure("refused with Retry-After, in the worst round", fewest, f"{FLOOD} of them", fewest == FLOOD),
    ]


def _notes(found: Findings) -> list[str]:
    notes = [
        "tok/s: all tokens over the time from the first connection to the last stream's end, prompts included",
        "CPU of the API process: user and system time of all its threads, without the engine's process and with what a "
        "request costs; the system counts in ticks, of 10 ms usually",
        f"the {FLOOD} come at once when all streams are under way, each on a connection of its own; the last one was "
        f"refused after {found.flood.median:.0f} ms (median of the rounds); their CPU time is in that of the tokens",
        f"engine, API process and client share {machine.cpus().usable} CPUs; of few each of the three takes from the "
        "others, and tok/s includes that",
        f"A against A (off again / off): ±{found.spread:.1%}",
    ]
    if found.spread > NOISY:
        notes[-1] += "; this machine was busy with other things, and the bounds on tok/s say little"
    if not found.api[OFF].samples:
        notes.append("the CPU time of another process was not measured: this system has no /proc")
    return notes
