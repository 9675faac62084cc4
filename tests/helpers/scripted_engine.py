"""An engine that follows a script: the token ids to emit are given, the scores are made up but repeat.

Views and named sets are what the documents define, worked out one token at a time in float64.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
import numpy.typing as npt

from neper.engine.checks import request_problem
from neper.engine.interface import Capabilities, EngineStats, TokenStream
from neper.errors import EngineDeadError, OverloadedError
from neper.types import (
    CandidateScores,
    Fault,
    FinishReason,
    Float32Array,
    LogprobsMode,
    PackedRows,
    Request,
    SamplingParams,
    TokenChunk,
)

ALL_SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__)


def scores(position: int, token_id: int, vocab_size: int) -> Float32Array:
    """[V] log-probabilities at a position. The token is likely, not always the likeliest; some pairs are equal."""
    logits = np.random.default_rng(position).normal(0.0, 3.0, vocab_size)
    logits[token_id] = 5.0 + position % 7
    logits = np.round(logits * 8) / 8
    shifted = logits - logits.max()
    return (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)


def top(row: Float32Array, k: int) -> list[int]:
    """Ids of the k best, (value descending, id ascending), without those at -inf."""
    order = np.lexsort((np.arange(len(row)), -row))[:k]
    return [int(i) for i in order if row[i] > -np.inf]


def normalised(row: Float32Array) -> Float32Array:
    wide = row.astype(np.float64)
    shifted = wide - wide.max()
    return (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)


def view(mode: LogprobsMode, row: Float32Array, sampling: SamplingParams) -> Float32Array:
    """[V] log-probabilities in a view, -inf outside the allowed set. Without penalties, bad words and grammars."""
    if mode == "raw_logprobs" and not sampling.allowed_token_ids:
        return row
    row = row.copy()
    if mode == "processed_logprobs":
        for token_id, value in sampling.logit_bias.items():
            row[token_id] += value
    if sampling.allowed_token_ids:
        allowed = list(set(sampling.allowed_token_ids))
        row[np.setdiff1d(np.arange(len(row)), allowed)] = -np.inf
    if mode != "raw_logprobs" and not sampling.greedy:
        row = normalised(row / np.float32(sampling.temperature))
        if mode == "processed_logprobs":
            row[~kept(row, sampling)] = -np.inf
    return normalised(row)


def kept(row: Float32Array, sampling: SamplingParams) -> npt.NDArray[np.bool_]:
    """[V] bool: what top-k, top-p and min-p leave of a distribution."""
    probabilities = np.exp(row.astype(np.float64))
    order = top(row, len(row))
    mass, left = 0.0, np.zeros(len(row), bool)
    for place, token_id in enumerate(order):
        if (
            (sampling.top_k > 0 and place >= sampling.top_k)
            or mass >= sampling.top_p
            or probabilities[token_id] < sampling.min_p * probabilities[order[0]]
        ):
            break
        left[token_id] = True
        mass += probabilities[token_id]
    return left


def listed(row: Float32Array, request: Request) -> list[int]:
    """The ids that a generated token's list holds: all of a named set, -inf or not, else the top k."""
    places = request.num_listed(len(row)) or 0
    named = request.logprobs.token_ids or request.sampling.allowed_token_ids
    if len(set(named)) == places:
        return in_order(row, named)
    return top(row, places)


def in_order(row: Float32Array, named: Sequence[int]) -> list[int]:
    return sorted(set(named), key=lambda token_id: (-row[token_id], token_id))


def pack(
    token_ids: Sequence[int], scored: Sequence[Float32Array], lists: Sequence[Sequence[int]], places: int
) -> PackedRows:
    """Rows of tokens from what each is scored with [V], and the ids to list of it."""
    pairs = list(zip(token_ids, scored, strict=True))
    ids = [[*found, *[-1] * (places - len(found))] for found in lists]
    values = [[*row[list(found)], *[-np.inf] * (places - len(found))] for row, found in zip(scored, lists, strict=True)]
    shape = (len(pairs), places)
    return PackedRows.pack(
        token_ids,
        [row[token_id] for token_id, row in pairs],
        [1 + int((row > row[token_id]).sum()) for token_id, row in pairs],
        np.array(ids, np.int32).reshape(shape),
        np.array(values).reshape(shape),
    )


def candidate_logprobs(position: int, token_ids: Sequence[int], vocab_size: int) -> Float32Array:
    """[n] made-up logprobs of a candidate whose first token is at a position."""
    rows = [scores(place, token_id, vocab_size)[token_id] for place, token_id in enumerate(token_ids, position)]
    return np.array(rows, np.float32)


class ScriptedEngine:
    """Emits `reply(request)` and then, where that is shorter than max_tokens, the end token.

    Attributes to set before a request:
        tokens_per_chunk, prompt_rows_per_chunk, candidates_per_chunk: how results are grouped.
        delay: seconds before each chunk; None means that chunks are ready at once.
        fail_after, die_after, hang_after: number of chunks after which a request fails, the engine dies, or nothing
            comes any more. They apply to requests for which `affects` is true.
        fault: of a request that fails.
        alive, overloaded: what `submit` meets.
        garble: replaces the rows of sampled tokens.
        num_cached_tokens, queue_seconds: of all chunks with tokens.

    `submitted` are the requests so far, `streams` theirs; a stream knows whether it was `closed`, and `emitted` chunks.
    """

    def __init__(
        self,
        reply: Callable[[Request], Sequence[int]],
        *,
        capabilities: Capabilities,
        end_token_id: int,
    ) -> None:
        self.reply = reply
        self.capabilities = capabilities
        self.end_token_id = end_token_id
        self.tokens_per_chunk = 1
        self.prompt_rows_per_chunk = 3
        self.candidates_per_chunk = 3
        self.delay: float | None = None
        self.fail_after: int | None = None
        self.fault = Fault.ENGINE
        self.die_after: int | None = None
        self.hang_after: int | None = None
        self.affects: Callable[[Request], bool] = lambda request: True
        self.alive = True
        self.overloaded = False
        self.garble: Callable[[PackedRows], PackedRows] = lambda packed: packed
        self.num_cached_tokens = 0
        self.queue_seconds = 0.0
        self.submitted: list[Request] = []
        self.streams: list[ScriptedStream] = []

    def submit(self, request: Request) -> TokenStream:
        if not self.alive:
            raise EngineDeadError("the engine is down")
        if self.overloaded:
            raise OverloadedError("the queue is full", retry_after=1)
        assert request_problem(request, self.capabilities) is None  # the server checks the same before
        self.submitted.append(request)
        self.streams.append(ScriptedStream(self, request))
        return self.streams[-1]

    def stats(self) -> EngineStats:
        return EngineStats(running=sum(not stream.closed for stream in self.streams))

    def chunks(self, request: Request) -> list[TokenChunk]:
        """All that a request brings when nothing goes wrong."""
        vocab_size = self.capabilities.vocab_size
        name, prompt, logprobs = request.request_id, request.prompt_token_ids, request.logprobs
        found: list[TokenChunk] = []
        if request.candidates:
            found_scores = [
                CandidateScores(place, candidate_logprobs(len(prompt), ids, vocab_size).tobytes())
                for place, ids in enumerate(request.candidates)
            ]
            step = self.candidates_per_chunk
            parts = [tuple(found_scores[start : start + step]) for start in range(0, len(found_scores), step)]
            return [
                TokenChunk(
                    request_id=name,
                    candidates=part,
                    finish_reason=FinishReason.LENGTH if part is parts[-1] else None,
                    num_cached_tokens=self.num_cached_tokens,
                )
                for part in parts
            ]
        if logprobs.prompt_top_k is not None:
            step, places = self.prompt_rows_per_chunk, request.num_prompt_listed(vocab_size) or 0
            named = logprobs.prompt_logprob_token_ids
            for start in range(logprobs.prompt_start, len(prompt), step):
                ids = prompt[start : start + step]
                scored = [scores(position, token_id, vocab_size) for position, token_id in enumerate(ids, start)]
                lists = [in_order(row, named) if named else top(row, places) for row in scored]
                packed = pack(ids, scored, lists, places)
                found.append(TokenChunk(request_id=name, prompt=packed))
        ids, finish, stop_token_id = self._sampled(request)
        for start in range(0, len(ids), self.tokens_per_chunk):
            part = ids[start : start + self.tokens_per_chunk]
            packed = self.garble(self._rows(request, part, len(prompt) + start))
            last = start + len(part) == len(ids)
            found.append(
                TokenChunk(
                    request_id=name,
                    tokens=packed,
                    finish_reason=finish if last else None,
                    stop_token_id=stop_token_id if last else None,
                    num_cached_tokens=self.num_cached_tokens,
                    queue_seconds=self.queue_seconds,
                )
            )
        if not ids:
            found.append(TokenChunk(request_id=name, finish_reason=finish))
        return found

    def _rows(self, request: Request, token_ids: Sequence[int], start: int) -> PackedRows:
        """Rows of generated tokens, the first of which is at position `start`."""
        vocab_size = self.capabilities.vocab_size
        places = request.num_listed(vocab_size)
        if places is None:
            return PackedRows.pack(token_ids)
        scored = [
            view(request.logprobs.mode, scores(position, token_id, vocab_size), request.sampling)
            for position, token_id in enumerate(token_ids, start)
        ]
        return pack(token_ids, scored, [listed(row, request) for row in scored], places)

    def _sampled(self, request: Request) -> tuple[list[int], FinishReason, int | None]:
        sampling = request.sampling
        limit = sampling.max_tokens if sampling.max_tokens is not None else self.capabilities.max_model_len
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else request.eos_token_ids)}
        ids: list[int] = []
        for token_id in [*self.reply(request), self.end_token_id]:
            if len(ids) == limit:
                break
            ids.append(token_id)
            if token_id in ends:
                return ids, FinishReason.STOP, token_id
        return ids, FinishReason.LENGTH, None


class ScriptedStream:
    def __init__(self, engine: ScriptedEngine, request: Request) -> None:
        self.request = request
        self.closed = False
        self.ended = False
        self.emitted = 0
        self._engine = engine
        self._chunks = engine.chunks(request)

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        return self

    async def __anext__(self) -> TokenChunk:
        engine = self._engine
        if self.closed or self.ended:
            raise StopAsyncIteration
        if engine.delay is not None:
            await asyncio.sleep(engine.delay)
        if engine.affects(self.request):
            if self.emitted == engine.die_after:
                engine.alive = False
                raise EngineDeadError("the engine died")
            if self.emitted == engine.fail_after:
                self.ended = True
                return TokenChunk(
                    request_id=self.request.request_id,
                    finish_reason=FinishReason.ERROR,
                    error="a row was NaN",
                    fault=engine.fault,
                )
            while self.emitted == engine.hang_after:
                await asyncio.sleep(0.002)
        chunk = self._chunks[self.emitted]
        self.emitted += 1
        self.ended = chunk.finish_reason is not None
        return chunk

    def close(self) -> None:
        self.closed = True
