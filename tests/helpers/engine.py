"""Drives an EngineCore as tests want it: requests in, joined results out, books checked after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from neper.config import EngineConfig
from neper.engine.core import EngineCore
from neper.models.source import resolve
from neper.types import FinishReason, LogprobParams, PackedRows, Request, SamplingParams, TokenChunk

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@dataclass
class Result:
    """All chunks of one request, joined."""

    chunks: list[TokenChunk] = field(default_factory=list)

    @property
    def last(self) -> TokenChunk:
        return self.chunks[-1]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.last.finish_reason

    @property
    def token_ids(self) -> list[int]:
        return [int(i) for chunk in self.chunks if chunk.tokens for i in chunk.tokens.token_ids]

    @property
    def tokens(self) -> PackedRows:
        return join([chunk.tokens for chunk in self.chunks])

    @property
    def prompt(self) -> PackedRows:
        return join([chunk.prompt for chunk in self.chunks])


def join(parts: Iterable[PackedRows | None]) -> PackedRows:
    rows = [part for part in parts if part is not None]
    return PackedRows(rows[0].top_k, b"".join(part.data for part in rows))


def make_core(directory: Path, **config: Any) -> EngineCore:
    values: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_num_seqs": 8} | config
    return EngineCore(EngineConfig(model=str(directory), **values), resolve(str(directory)))


def request(
    name: str,
    prompt: list[int],
    sampling: SamplingParams = GREEDY,
    *,
    top_k: int | None = None,
    prompt_top_k: int | None = None,
    prompt_start: int = 1,
    eos: tuple[int, ...] = (),
    **scores: Any,
) -> Request:
    """`scores`: other fields of LogprobParams."""
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=sampling,
        logprobs=LogprobParams(top_k=top_k, prompt_top_k=prompt_top_k, prompt_start=prompt_start, **scores),
        eos_token_ids=eos,
    )


def run(
    core: EngineCore, requests: Iterable[Request], *, each_step: Callable[[int], object] | None = None
) -> dict[str, Result]:
    """Compute requests together to their ends; `each_step(n)` is called before step n."""
    results: dict[str, Result] = {}
    for item in requests:
        core.add(item)
        results[item.request_id] = Result()
    wait_for_grammars(core)
    step = 0
    while core.has_work:
        if each_step is not None:
            each_step(step)
        for chunk in core.step():
            result = results[chunk.request_id]
            assert not result.chunks or result.finish_reason is None, "a chunk after the last"
            result.chunks.append(chunk)
        core.check()
        step += 1
    assert core.stats().free_blocks == core.stats().total_blocks, "a block leaked"
    return results


def wait_for_grammars(core: EngineCore) -> None:
    """Have the grammars of all requests compiled, so that the same requests begin in the same step every time."""
    wait([core._grammars._waiting[seq] for seq in core._grammars.compiling])


def assert_same_scores(a: PackedRows, b: PackedRows, *, tolerance: float) -> None:
    """Same ids, and values within `tolerance`; listed ids may differ only where their values are as close."""
    assert a.token_ids.tolist() == b.token_ids.tolist()
    assert np.abs(a.logprob - b.logprob).max(initial=0.0) <= tolerance
    assert np.abs(a.top_logprobs - b.top_logprobs).max(initial=0.0) <= tolerance
    swapped = a.top_ids != b.top_ids
    for row, place in zip(*swapped.nonzero(), strict=True):
        near = np.abs(a.top_logprobs[row] - a.top_logprobs[row, place]) <= tolerance
        assert near.sum() > 1 or place == a.top_ids.shape[1] - 1


def prompts(count: int, length: int, *, seed: int = 0, vocab: int = 330) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, vocab, size=length).tolist() for _ in range(count)]
