"""Candidates in the engine: the prompt as one sequence, then each longer candidate as one that shares its K/V."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from neper.types import (
    CandidateScores,
    FinishReason,
    LogprobParams,
    PackedRows,
    Request,
    SamplingParams,
    TokenChunk,
)

Candidate = tuple[int, ...]


@dataclass
class _Part:
    """A sequence of prompt and candidate in the engine; `logprobs` are float32 of the candidate's tokens so far."""

    candidate: Candidate
    logprobs: bytes


@dataclass(eq=False)
class _Run:
    """A request with candidates.

    The prompt's next token is scored for all ids that candidates begin with, so a candidate of one token needs no
    sequence of its own. One of more tokens is the prompt and the candidate. It shares the full blocks of the prompt and
    computes what is left of the prompt, less than a block, once more.

    Attributes:
        places: of each candidate, taken once, in the request.
        waiting: candidates that are to be sequences.
        parts: sequences in the engine, by their ids; the prompt's is None.
        salt: of the hashes of its blocks, where requests share none.
    """

    request: Request
    places: dict[Candidate, list[int]]
    waiting: deque[Candidate] = field(default_factory=deque)
    parts: dict[str, _Part | None] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    num_cached_tokens: int = 0
    queue_seconds: float = 0.0
    num_started: int = 0
    salt: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def name(self) -> str:
        return self.request.request_id

    def prompt(self) -> Request:
        """The request of the prompt's sequence. It keeps the candidates, by which the engine knows it."""
        name = self._new_name()
        self.parts[name] = None
        return msgspec.structs.replace(
            self.request,
            request_id=name,
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
            logprobs=LogprobParams(top_k=0, token_ids=tuple({candidate[0]: None for candidate in self.places})),
        )

    def next_parts(self, most: int) -> Iterator[Request]:
        """Requests of further sequences, as long as fewer than `most` are in the engine."""
        length = len(self.request.prompt_token_ids)
        while self.waiting and len(self.parts) < most:
            candidate = self.waiting.popleft()
            name = self._new_name()
            self.parts[name] = _Part(candidate, np.float32(self.first[candidate[0]]).tobytes())
            yield Request(
                request_id=name,
                prompt_token_ids=[*self.request.prompt_token_ids, *candidate],
                sampling=SamplingParams(max_tokens=0),
                logprobs=LogprobParams(prompt_top_k=0, prompt_start=length + 1),
            )

    def _new_name(self) -> str:
        self.num_started += 1
        return f"{self.name}\0-{self.num_started}"  # no request has such a name

    def take(self, chunk: TokenChunk) -> list[CandidateScores]:
        """The scores that a chunk of one of its sequences completes."""
        part = self.parts[chunk.request_id]
        if chunk.finish_reason is not None:
            del self.parts[chunk.request_id]
        if part is None:
            assert chunk.tokens is not None
            return self._begin(chunk, chunk.tokens)
        if chunk.prompt is not None:
            part.logprobs += chunk.prompt.logprob.tobytes()
        return self._scores(part.candidate, part.logprobs) if chunk.finish_reason is not None else []

    def _begin(self, chunk: TokenChunk, rows: PackedRows) -> list[CandidateScores]:
        self.num_cached_tokens, self.queue_seconds = chunk.num_cached_tokens, chunk.queue_seconds
        self.first = dict(zip(rows.top_ids[0].tolist(), rows.top_logprobs[0].tolist(), strict=True))
        self.waiting.extend(candidate for candidate in self.places if len(candidate) > 1)
        alone = [candidate for candidate in self.places if len(candidate) == 1]
        return [
            scores
            for candidate in alone
            for scores in self._scores(candidate, np.float32(self.first[candidate[0]]).tobytes())
        ]

    def _scores(self, candidate: Candidate, logprobs: bytes) -> list[CandidateScores]:
        return [CandidateScores(place, logprobs) for place in self.places[candidate]]


class CandidateRuns:
    """The requests with candidates that an engine computes, and their sequences in it.

    Memory does not grow with the number of candidates: at most `most_parts` of a request are sequences at a time.

    Args:
        start: takes a request that becomes a sequence, and a salt that it has in common with those of the same
            candidates alone.
        end: ends a sequence by its id.
    """

    def __init__(self, start: Callable[[Request, bytes], None], end: Callable[[str], None], *, most_parts: int) -> None:
        self._start = start
        self._end = end
        self._most_parts = most_parts
        self._runs: dict[str, _Run] = {}
        self._run_of: dict[str, _Run] = {}

    def __contains__(self, request_id: str) -> bool:
        """True for a request with candidates that is computed, and for each of its sequences."""
        return request_id in self._runs or request_id in self._run_of

    def add(self, request: Request) -> None:
        places: dict[Candidate, list[int]] = {}
        for place, candidate in enumerate(request.candidates):
            places.setdefault(candidate, []).append(place)
        run = self._runs[request.request_id] = _Run(request, places)
        self._begin(run, run.prompt())

    def drop(self, request_id: str) -> list[str]:
        """End a request's sequences and forget it; returns their ids. Nothing happens for other requests."""
        run = self._runs.pop(request_id, None)
        if run is None:
            return []
        names = list(run.parts)
        for name in names:
            self._end(name)
            del self._run_of[name]
        return names

    def drop_all(self) -> list[str]:
        """End all of them; returns the ids of the requests."""
        names = list(self._runs)
        for name in names:
            self.drop(name)
        return names

    def fold(self, chunks: list[TokenChunk]) -> list[TokenChunk]:
        """The chunks of a step, in which those of a request's sequences have become one of the request."""
        if not self._runs:
            return chunks
        told: list[TokenChunk] = []
        parts: dict[_Run, list[TokenChunk]] = {}
        for chunk in chunks:
            run = self._run_of.get(chunk.request_id)
            if run is None:
                told.append(chunk)
            else:
                parts.setdefault(run, []).append(chunk)
        for run, found in parts.items():
            if (whole := self._take(run, found)) is not None:
                told.append(whole)
        return told

    def _take(self, run: _Run, chunks: list[TokenChunk]) -> TokenChunk | None:
        scores: list[CandidateScores] = []
        failed = next((chunk for chunk in chunks if chunk.finish_reason is FinishReason.ERROR), None)
        if failed is not None:
            self.drop(run.name)
            return msgspec.structs.replace(failed, request_id=run.name)
        for chunk in chunks:
            scores += run.take(chunk)
            if chunk.finish_reason is not None:
                del self._run_of[chunk.request_id]
        for request in run.next_parts(self._most_parts):
            self._begin(run, request)
        ended = not run.parts
        if ended:
            del self._runs[run.name]
        if not (scores or ended):
            return None
        return TokenChunk(
            request_id=run.name,
            candidates=tuple(scores),
            finish_reason=FinishReason.LENGTH if ended else None,
            num_cached_tokens=run.num_cached_tokens,
            queue_seconds=run.queue_seconds,
        )

    def _begin(self, run: _Run, request: Request) -> None:
        self._run_of[request.request_id] = run
        self._start(request, run.salt)
