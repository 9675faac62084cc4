"""Metrics for Prometheus: the engine's own counts, read when somebody asks, and each HTTP request, once it has ended.

Nothing here runs per token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from neper.server.exchange import Exchange

if TYPE_CHECKING:
    from neper.server.service import Service

# What EngineStats' fields are called outside, and what they are. The first ones go up and down.
_GAUGES = {
    "running": ("requests_running", "Choices that the engine computes."),
    "waiting": ("requests_waiting", "Choices that wait for the engine."),
    "total_blocks": ("cache_blocks", "Blocks of the KV cache."),
    "free_blocks": ("cache_blocks_free", "Blocks of the KV cache that nobody holds."),
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens, computed or found in the cache."),
    "cached_tokens": ("cached_tokens", "Prompt tokens found in the cache."),
    "generated_tokens": ("generated_tokens", "Sampled tokens."),
    "preemptions": ("preemptions", "Times that a sequence gave its blocks to others, to be computed again."),
    "steps": ("engine_steps", "Steps of the engine."),
    "restarts": ("engine_restarts", "Times that the engine was started again after it died."),
    "d2h_copies": ("device_to_host_copies", "Copies of results from the device to the host."),
    "d2h_bytes": ("device_to_host_bytes", "Bytes of results copied from the device to the host."),
    "d2h_waits": ("device_to_host_waits", "Times that the host waited for such a copy."),
    "scored_rows": ("scored_rows", "Rows of logits whose logprobs were reduced."),
}
# Seconds, from a cached token on a GPU to a long reply on a CPU.
_FIRST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_DURATION_BUCKETS = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# For a client that was gone before anything was sent; no such status travels.
_CLIENT_GONE = "499"


class Metrics:
    """The metrics of one application, in a registry of its own."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineCounts(service))
        self._requests = Counter(
            "neper_http_requests",
            "HTTP requests answered, by route and status.",
            ["endpoint", "status"],
            registry=self._registry,
        )
        self._errors = Counter(
            "neper_request_errors",
            "Requests that ended with an error, in a stream too, by its code.",
            ["code"],
            registry=self._registry,
        )
        self._first_results = Histogram(
            "neper_time_to_first_token_seconds",
            "From a request's arrival to the engine's first results for it.",
            ["endpoint"],
            buckets=_FIRST_BUCKETS,
            registry=self._registry,
        )
        self._duration = Histogram(
            "neper_http_request_duration_seconds",
            "From a request's arrival to the end of its answer.",
            ["endpoint"],
            buckets=_DURATION_BUCKETS,
            registry=self._registry,
        )

    def observe(self, exchange: Exchange, endpoint: str) -> None:
        """Count a request that has ended. `endpoint` is its route, so that the number of series is bounded."""
        self._requests.labels(endpoint, str(exchange.status or _CLIENT_GONE)).inc()
        self._duration.labels(endpoint).observe(time.monotonic() - exchange.started)
        if exchange.first_results is not None:
            self._first_results.labels(endpoint).observe(exchange.first_results - exchange.started)
        if exchange.error is not None:
            self._errors.labels(exchange.error.code or exchange.error.type).inc()

    def write(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the format that an Accept header prefers, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _EngineCounts(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        stats = service.engine.stats()
        for field, (name, help) in _GAUGES.items():
            yield GaugeMetricFamily(f"neper_{name}", help, value=getattr(stats, field))
        for field, (name, help) in _COUNTERS.items():
            yield CounterMetricFamily(f"neper_{name}", help, value=getattr(stats, field))
        yield GaugeMetricFamily("neper_engine_up", "1 while the engine can take requests.", value=service.engine.alive)
        yield GaugeMetricFamily(
            "neper_http_requests_in_progress", "HTTP requests being answered.", value=service.num_requests
        )
        yield GaugeMetricFamily(
            "neper_choices_in_progress", "Choices in flight, running and waiting.", value=service.num_choices
        )
