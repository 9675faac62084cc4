"""Drives an engine through one batch and takes its times: nothing is looked at before the last token is there."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from neper.engine.core import EngineCore
from neper.engine.interface import EngineStats
from neper.errors import NeperError
from neper.types import FinishReason, Request, TokenChunk

Clock = Callable[[], float]


class Step(NamedTuple):
    """The results of one call of EngineCore.step, their time, and the engine's stats then where they were asked for."""

    time: float
    chunks: list[TokenChunk]
    stats: EngineStats | None


class Traffic(NamedTuple):
    """Traffic from the device to the host per decode step: copies, their bytes, and the waits of the host."""

    copies: float
    bytes: float
    waits: float


@dataclass(frozen=True)
class Batch:
    """Requests that started together, computed to their ends.

    Attributes:
        seconds: from adding them to the last token.
        times: seconds, from any origin, at which the results of each decode step were there. A decode step brings every
            request a token that is not its first.
        tokens: generated ids by request.
        traffic: of the decode steps; None where there are too few to tell.
        peak_bytes: most device memory in use; None on a CPU.
        prefill: seconds from adding them until each had its first token.
    """

    seconds: float
    times: list[float]
    tokens: dict[str, list[int]]
    traffic: Traffic | None
    peak_bytes: int | None
    prefill: float

    @property
    def decode_rate(self) -> float:
        """Tokens per second of all requests, without the prefill and the tokens that it brought."""
        return sum(len(ids) - 1 for ids in self.tokens.values()) / (self.seconds - self.prefill)

    @property
    def tpot(self) -> float:
        """Seconds from one decode step's results to the next, on average."""
        if len(self.times) < 2:
            raise NeperError("a batch had less than two decode steps in common: its replies are too short")
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def steps(
    core: EngineCore, requests: Iterable[Request], clock: Clock = time.perf_counter, *, stats_every: int = 1
) -> Iterator[Step]:
    """Add the requests and step until all have ended.

    Args:
        stats_every: the interval, in steps, at which the engine's stats are noted. They take time to make.
    """
    for request in requests:
        core.add(request)
    number = 0
    while core.has_work:
        chunks = core.step()
        yield Step(clock(), chunks, core.stats() if number % stats_every == 0 else None)
        number += 1


def decode_steps(log: Iterable[Step], count: int) -> Iterator[Step]:
    """Those steps of a log that brought each of `count` requests a token, and none its first."""
    started: set[str] = set()
    for step in log:
        found = {chunk.request_id for chunk in step.chunks if chunk.tokens}
        if len(found) == count and found <= started:
            yield step
        started |= found


def run_batch(core: EngineCore, requests: list[Request], clock: Clock = time.perf_counter) -> Batch:
    """Compute the requests together.

    Raises:
        NeperError: one of them failed, or has not the tokens that it asked for.
    """
    on_gpu = core.settings.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    longest = max(request.sampling.max_tokens or 1 for request in requests)
    # A server lets chunks go at once. Here all of them are kept, and the collections that this provokes are no cost of
    # the engine's: a full one takes as long as some hundred steps.
    collects = gc.isenabled()
    gc.disable()
    try:
        start = clock()
        log = list(steps(core, requests, clock, stats_every=max(1, longest // 16)))
    finally:
        if collects:
            gc.enable()
    return Batch(
        seconds=log[-1].time - start,
        times=[step.time for step in decode_steps(log, len(requests))],
        tokens=_tokens(log, requests),
        traffic=_traffic(log, len(requests)),
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else None,
        prefill=max(_first_times(log).values()) - start,
    )


def _first_times(log: list[Step]) -> dict[str, float]:
    """The time of each request's first token."""
    times: dict[str, float] = {}
    for step in log:
        for chunk in step.chunks:
            if chunk.tokens:
                times.setdefault(chunk.request_id, step.time)
    return times


def _tokens(log: list[Step], requests: list[Request]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for step in log:
        for chunk in step.chunks:
            if chunk.finish_reason is FinishReason.ERROR:
                raise NeperError(f"a request failed: {chunk.error}")
            if chunk.tokens:
                tokens[chunk.request_id] += chunk.tokens.token_ids.tolist()
    for request in requests:
        found, wanted = len(tokens[request.request_id]), request.sampling.max_tokens
        if found != wanted:
            raise NeperError(f"a request brought {found} tokens instead of {wanted}")
    return tokens


def _traffic(log: list[Step], count: int) -> Traffic | None:
    # Not the last decode step: an engine that launches ahead has nothing to launch in it any more.
    inside = {id(step) for step in list(decode_steps(log, count))[:-1]}
    noted = [(i, step.stats) for i, step in enumerate(log) if id(step) in inside and step.stats is not None]
    if len(noted) < 2:
        return None
    (first, before), (last, after) = noted[0], noted[-1]
    between = last - first
    return Traffic(
        (after.d2h_copies - before.d2h_copies) / between,
        (after.d2h_bytes - before.d2h_bytes) / between,
        (after.d2h_waits - before.d2h_waits) / between,
    )
