"""Device time of one call: a CUDA graph of many calls, replayed between two events. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from neper.bench.report import Series, turns

CALLS = 50
"""Calls of a graph, where bytes or the L2 do not ask for another number."""
MAX_CALLS = 1000
MAX_BYTES = 4 * 2**30
"""Most bytes that the calls of one graph read. A replay of more than some milliseconds says nothing new."""
WARM_UP_ROUNDS = 2
COLD = 4
"""Cold inputs are this many times as large as the L2 together."""


def warm_calls(nbytes: int) -> int:
    """Calls of a graph whose every call reads the same `nbytes`."""
    return max(5, min(CALLS, MAX_BYTES // nbytes))


def cold_inputs(nbytes: int, l2_bytes: int) -> int:
    """The number of inputs of `nbytes` that keeps each call from finding its own in the L2; 1 = one is cold enough."""
    return min(MAX_CALLS, -(-COLD * l2_bytes // nbytes))


def cold_calls(nbytes: int, inputs: int) -> int:
    """Calls of a graph that reads every one of `inputs` of `nbytes` equally often."""
    return inputs * max(1, min(-(-CALLS // inputs), MAX_BYTES // (nbytes * inputs)))


class Replay:
    """Calls of one implementation, captured once and replayed again and again.

    Args:
        call: launches the i-th call.
        calls: the number of calls.

    Attributes:
        why_not_captured: empty if the calls are a graph. Otherwise they are launched one by one, and the time of a
            call includes the gaps between launches where the host is slower than the device.
    """

    def __init__(self, call: Callable[[int], Any], calls: int) -> None:
        self.calls = calls
        self.why_not_captured = ""
        self._call = call
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # a first call compiles and sets up, which a capture cannot do
            for i in range(3):
                call(i)
        stream = torch.cuda.current_stream()
        stream.wait_stream(side)
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(self._graph):
                for i in range(calls):
                    call(i)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own one current
            torch.cuda.synchronize()
            self._graph = None
            first = error.__context__ or error  # the cause; `error` may only say that the capture has ended
            self.why_not_captured = (str(first).splitlines() or [type(first).__name__])[0]

    def run(self) -> None:
        """Launch all calls; does not wait."""
        if self._graph is not None:
            self._graph.replay()
            return
        for i in range(self.calls):
            self._call(i)

    def sample(self) -> float:
        """Microseconds of one call.

        An untimed replay goes first. It fills the L2 as these calls do, and keeps the device busy while the timed one
        is launched.
        """
        self.run()
        self._start.record()
        self.run()
        self._end.record()
        self._end.synchronize()
        milliseconds: float = self._start.elapsed_time(self._end)
        return milliseconds * 1e3 / self.calls


def take_turns(replays: Mapping[str, Replay], rounds: int, series: Mapping[str, Series]) -> None:
    """One sample of each in every round, after some to warm up, into the series of the same key."""
    for key, counts, _ in turns(replays, rounds, warm_up=WARM_UP_ROUNDS):
        value = replays[key].sample()
        if counts:
            series[key].samples.append(value)


def time_copy(nbytes: int, device: torch.device, rounds: int, series: Series) -> None:
    """Microseconds of a copy of `nbytes` on the device, `rounds` samples into the series.

    Launched, not captured: a graph's large copies may be a copy engine's affair, at two thirds of the speed.
    """
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for copies, counts, _ in turns([10], rounds):
        start.record()
        for _ in range(copies):
            target.copy_(source)
        end.record()
        end.synchronize()
        if counts:
            series.samples.append(start.elapsed_time(end) * 1e3 / copies)
