"""A stand-in for EngineCore that the benchmark drives: a scripted step loop on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch

from neper.bench.engine_cases import Case, requests
from neper.bench.engine_drive import Batch, run_batch
from neper.engine.interface import EngineStats
from neper.types import FinishReason, PackedRows, Request, TokenChunk


class ScriptedCore:
    """EngineCore's step loop without a model, on a clock of its own.

    A step takes `seconds(number)`. With `starts`, a request gets its first token in the step of that number; else all
    in the first one. `ahead`: results come a call later than their step is launched and counted, as with overlap.
    """

    def __init__(
        self,
        seconds: Callable[[int], float] = lambda _: 1.0,
        *,
        starts: Iterable[int] = (),
        ahead: bool = False,
        fails: bool = False,
    ) -> None:
        self.settings = SimpleNamespace(device=torch.device("cpu"))
        self.now = 100.0
        self.seconds, self.starts, self.ahead, self.fails = seconds, list(starts), ahead, fails
        self.waiting: dict[str, list[int]] = {}  # id → [first step, tokens left]
        self.top_k: dict[str, int | None] = {}
        self.launched: list[TokenChunk] | None = None
        self.number = self.copies = self.bytes = 0
        self.runner = SimpleNamespace(graphs=None, logprob_bytes=0)

    def clock(self) -> float:
        return self.now

    def add(self, request: Request) -> None:
        first = self.starts[len(self.waiting)] if self.starts else 0
        self.waiting[request.request_id] = [first, request.sampling.max_tokens or 0]
        self.top_k[request.request_id] = request.logprobs.top_k

    def abort(self, request_id: str) -> None:
        self.waiting.pop(request_id, None)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or self.launched is not None

    def step(self) -> list[TokenChunk]:
        made = self._launch() if self.waiting else None
        self.now += self.seconds(self.number)
        self.number += 1
        if self.ahead:
            made, self.launched = self.launched, made
        return made or []

    def _launch(self) -> list[TokenChunk]:
        made = []
        for name, state in list(self.waiting.items()):
            if self.number < state[0]:
                continue
            state[1] -= 1
            if state[1] == 0:
                del self.waiting[name]
            rows = packed(self.number, self.top_k[name])
            reason = FinishReason.LENGTH if state[1] == 0 else None
            if self.fails:
                made.append(TokenChunk(request_id=name, finish_reason=FinishReason.ERROR, error="no numbers"))
                del self.waiting[name]
                continue
            self.bytes += len(rows.data)
            made.append(TokenChunk(request_id=name, tokens=rows, finish_reason=reason))
        self.copies += 1
        return made

    def stats(self) -> EngineStats:
        return EngineStats(d2h_copies=self.copies, d2h_bytes=self.bytes, d2h_waits=self.copies)


def packed(token_id: int, top_k: int | None) -> PackedRows:
    """One row as the device packs it."""
    if top_k is None:
        return PackedRows.pack([token_id])
    return PackedRows.pack([token_id], [-1.0], [1], [list(range(top_k))], [[-2.0] * top_k])


def batch_of(core: ScriptedCore, case: Case, count: int, reply: int) -> Batch:
    made = requests(case, count, prompt=3, reply=reply, vocab_size=50, seed=0)
    return run_batch(core, made, core.clock)  # type: ignore[arg-type]
