"""Metrics for Prometheus: the engine's own counts, read when somebody asks; each HTTP request and choice, at its end.

The time between tokens is all that is noted per token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from neper.engine.interface import Engine
from neper.server.timing import ChoiceTiming, Tally
from neper.server.transport.connections import Connections
from neper.server.transport.exchange import Exchange
from neper.types import TokenChunk

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
    "drafts": ("drafts", "Times that tokens were drafted for a sequence."),
    "draft_tokens": ("draft_tokens", "Drafted tokens."),
    "accepted_tokens": ("draft_tokens_accepted", "Drafted tokens that the model sampled too."),
    "scored_rows": ("scored_rows", "Rows of logits whose logprobs were reduced."),
}
# Seconds, from a token of a small model on a GPU to one of a large model on a CPU.
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2.5, 5, 10)
_LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
# Seconds, from a cached token on a GPU to a long reply on a CPU.
_FIRST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_DURATION_BUCKETS = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# For a client that was gone before anything was sent; no such status travels.
_CLIENT_GONE = "499"


class InFlight(Protocol):
    """The work in flight, counted."""

    @property
    def num_requests(self) -> int: ...

    @property
    def num_choices(self) -> int: ...


class Metrics:
    """The metrics of one application, in a registry of its own."""

    def __init__(self, engine: Engine, in_flight: InFlight, connections: Connections, *, model_name: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._model_name = model_name
        self._registry.register(_Counts(engine, in_flight, connections))
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

        self._between_tokens = self._tally("inter_token_latency_seconds", "Between tokens of a choice.", _TOKEN_BUCKETS)
        self._queue = self._tally(
            "request_queue_time_seconds", "From a choice's arrival in the engine to its first step.", _DURATION_BUCKETS
        )
        self._prefill = self._tally(
            "request_prefill_time_seconds", "From a choice's first step to its first token.", _DURATION_BUCKETS
        )
        self._decode = self._tally(
            "request_decode_time_seconds", "From a choice's first token to its last.", _DURATION_BUCKETS
        )
        self._prompt_length = self._tally("request_prompt_tokens", "Prompt tokens of a choice.", _LENGTH_BUCKETS)
        self._reply_length = self._tally("request_generation_tokens", "Sampled tokens of a choice.", _LENGTH_BUCKETS)
        self._finished = Counter(
            "neper_request_success",
            "Choices that have ended, by their finish_reason; error and abort (the client left) too.",
            ["finished_reason"],
            registry=self._registry,
        )

    def _tally(self, name: str, help: str, bounds: tuple[float, ...]) -> Tally:
        tally = Tally(f"neper_{name}", help, bounds)
        self._registry.register(tally)
        return tally

    def observe_chunk(self, timing: ChoiceTiming, chunk: TokenChunk) -> None:
        """Note what a choice has got just now."""
        if chunk.tokens is None:
            return
        now = time.monotonic()
        if timing.first_token:
            self._between_tokens.add(now - timing.last_token)
        else:
            timing.first_token, timing.queue_seconds = now, chunk.queue_seconds
        timing.last_token = now

    def observe_choice(self, timing: ChoiceTiming, prompt_tokens: int, generated_tokens: int) -> None:
        """Count a choice that has ended."""
        self._finished.labels(timing.finish_reason or "abort").inc()
        self._prompt_length.add(prompt_tokens)
        self._reply_length.add(generated_tokens)
        if timing.first_token:
            self._queue.add(timing.queue_seconds)
            self._prefill.add(max(0.0, timing.first_token - timing.begun - timing.queue_seconds))
            self._decode.add(timing.last_token - timing.first_token)

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
        return encode(_Labelled(self._registry, {"model_name": self._model_name})), content_type


class _Labelled:
    """The metrics of a registry, with labels added to all of them."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._registry = registry
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in metric.samples]
            yield metric


class _Counts(Collector):
    """The counts of others, read when somebody asks."""

    def __init__(self, engine: Engine, in_flight: InFlight, connections: Connections) -> None:
        self._engine = engine
        self._in_flight = in_flight
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for field, (name, help) in _GAUGES.items():
            yield GaugeMetricFamily(f"neper_{name}", help, value=getattr(stats, field))
        for field, (name, help) in _COUNTERS.items():
            yield CounterMetricFamily(f"neper_{name}", help, value=getattr(stats, field))
        yield CounterMetricFamily(
            "neper_prefix_cache_queries", "Prompt tokens that were looked up in the cache.", value=stats.prompt_tokens
        )
        yield CounterMetricFamily(
            "neper_prefix_cache_hits", "Prompt tokens found in the cache.", value=stats.cached_tokens
        )
        if stats.total_blocks:
            yield GaugeMetricFamily(
                "neper_kv_cache_usage_ratio",
                "Share of the KV cache's blocks that is held, from 0 to 1.",
                value=1 - stats.free_blocks / stats.total_blocks,
            )
        yield GaugeMetricFamily("neper_engine_up", "1 while the engine can take requests.", value=self._engine.alive)
        yield GaugeMetricFamily(
            "neper_http_requests_in_progress", "HTTP requests being answered.", value=self._in_flight.num_requests
        )
        yield GaugeMetricFamily(
            "neper_choices_in_progress", "Choices in flight, running and waiting.", value=self._in_flight.num_choices
        )
        yield GaugeMetricFamily("neper_connections", "Open connections.", value=len(self._connections))
        ended = CounterMetricFamily(
            "neper_connections_ended", "Connections that the server has ended or refused, by reason.", labels=["reason"]
        )
        for reason, count in self._connections.ended.items():
            ended.add_metric([reason], count)
        yield ended
