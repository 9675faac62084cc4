"""Looks inside a decode step: its kernels and launches, its graphs alone, and the bytes that it cannot do without."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

import torch

from neper.bench.engine_drive import Clock, decode_steps, steps
from neper.bench.report import Series
from neper.engine.core import EngineCore
from neper.models.model_config import ModelConfig
from neper.models.shapes import num_parameters
from neper.types import Request

_COPIES = 10

SCORING_KERNELS = re.compile(
    r"_?(read|select|restrict|list)_kernel|.*(softmax|logsumexp|topk|sort|radix|bitonic).*", re.IGNORECASE
)
"""Whole names: of the reduction's own kernels, and of those that torch would score with."""


@dataclass(frozen=True)
class StepProfile:
    """What a decode step does, by a profile of several.

    Attributes:
        kernels: name → how often a step: all that the device did, copies included.
        calls: the same of the CUDA API calls that the host made.
    """

    kernels: dict[str, float] = field(default_factory=dict)
    calls: dict[str, float] = field(default_factory=dict)

    @property
    def scoring(self) -> dict[str, float]:
        return {name: count for name, count in self.kernels.items() if SCORING_KERNELS.fullmatch(name)}

    @property
    def launches(self) -> float:
        """Calls that start kernels, one by one or as a graph."""
        return sum(count for name, count in self.calls.items() if "Launch" in name)


def profile_steps(core: EngineCore, requests: list[Request], count: int) -> StepProfile:
    """Profile `count` decode steps of these requests, on a GPU; the rest of their replies is not computed."""
    log = steps(core, requests)
    next(decode_steps(log, len(requests)))
    # So that an engine that launches ahead has nothing running when the profile begins or ends: n steps are n launches.
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in islice(log, count):
            pass
        torch.cuda.synchronize()
    log.close()  # type: ignore[attr-defined]
    kernels: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profile.events() or []:
        if event.device_type.name == "CUDA":
            if not getattr(event, "is_user_annotation", False):
                kernels[event.name] += 1
        elif re.match(r"cu(da)?[A-Z]", event.name):
            calls[event.name] += 1
    return StepProfile(*({name: n / count for name, n in found.most_common()} for found in (kernels, calls)))


def replay_seconds(
    core: EngineCore,
    requests: list[Request],
    top_k: int | None,
    *,
    after: int,
    replays: int,
    clock: Clock = time.perf_counter,
) -> float | None:
    """Seconds of one replay of the decode graphs alone, without the engine; None where there are none.

    The graphs see what they saw in the decode step number `after` of these requests: contexts of that length.
    """
    if core.runner.graphs is None:
        return None
    log = steps(core, requests)
    next(decode_steps(log, len(requests)))
    for _ in islice(log, after - 1):
        pass
    replay = core.runner.decode_replay(len(requests), top_k)
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    start = clock()
    for _ in range(replays):
        replay()
    torch.cuda.synchronize()
    seconds = (clock() - start) / replays
    log.close()  # type: ignore[attr-defined]
    return seconds


def time_copy(nbytes: int, device: torch.device, rounds: int, series: Series) -> None:
    """Microseconds of a copy of `nbytes` on the device, `rounds` samples into the series.

    Launched, not captured: a graph's large copies may be a copy engine's affair, at two thirds of the speed.
    """
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for number in range(-1, rounds):  # round -1 warms up
        start.record()
        for _ in range(_COPIES):
            target.copy_(source)
        end.record()
        end.synchronize()
        if number >= 0:
            series.samples.append(start.elapsed_time(end) * 1e3 / _COPIES)


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def decode_bytes(config: ModelConfig, itemsize: int, *, rows: int, context: float) -> float:
    """Bytes that a decode step must read: every weight once, and the keys and values of its rows' contexts.

    Of embeddings that are no head as well, only the rows' own are read: nothing to speak of.
    """
    weights = num_parameters(config)
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size
    return weights * itemsize + rows * context * kv_bytes_per_token(config, itemsize)
