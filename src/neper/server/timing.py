"""Timing: the times of a choice's tokens, and histograms that cost a fraction of a microsecond per token."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(eq=False, slots=True)
class ChoiceTiming:
    """Moments of one choice, on time.monotonic's clock; 0.0 = not yet.

    Attributes:
        begun: the time when the engine got it.
        first_token, last_token: the times when the server got them.
        queue_seconds: the engine's own measure.
        finish_reason: the one that its client got, or "error"; None where the client left, or another choice failed.
    """

    begun: float = field(default_factory=time.monotonic)
    first_token: float = 0.0
    last_token: float = 0.0
    queue_seconds: float = 0.0
    finish_reason: str | None = None


class Tally(Collector):
    """A histogram without labels. (That of prometheus_client takes a lock and costs 2 us, too much per token.)

    Args:
        bounds: upper bounds of its buckets, ascending, without the infinite one.
    """

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, inf), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == inf else str(float(bound)), total))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)
