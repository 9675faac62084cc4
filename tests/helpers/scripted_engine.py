"""An engine that follows a script: the token ids to emit are given, the scores are made up but repeat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from neper.engine.interface import Capabilities, EngineStats, TokenStream
from neper.errors import EngineDeadError, OverloadedError
from neper.types import FinishReason, Float32Array, PackedRows, Request, SamplingParams, TokenChunk

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


def rows(positions: Sequence[int], token_ids: Sequence[int], top_k: int | None, vocab_size: int) -> PackedRows:
    if top_k is None:
        return PackedRows.pack(token_ids)
    values, ranks, listed, listed_values = [], [], [], []
    for position, token_id in zip(positions, token_ids, strict=True):
        row = scores(position, token_id, vocab_size)
        ids = top(row, top_k)
        values.append(row[token_id])
        ranks.append(1 + int((row > row[token_id]).sum()))
        listed.append(ids + [-1] * (top_k - len(ids)))
        listed_values.append([*row[ids], *[-np.inf] * (top_k - len(ids))])
    shape = (len(values), top_k)
    return PackedRows.pack(
        token_ids, values, ranks, np.array(listed, np.int32).reshape(shape), np.array(listed_values).reshape(shape)
    )


class ScriptedEngine:
    """Emits `reply(request)` and then, where that is shorter than max_tokens, the end token.

    Attributes to set before a request:
        tokens_per_chunk, prompt_rows_per_chunk: how results are grouped.
        delay: seconds before each chunk; None means that chunks are ready at once.
        fail_after, die_after, hang_after: number of chunks after which a request fails, the engine dies, or nothing
            comes any more. They apply to requests for which `affects` is true.
        alive, overloaded: what `submit` meets.
        garble: replaces the rows of sampled tokens.

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
        self.delay: float | None = None
        self.fail_after: int | None = None
        self.die_after: int | None = None
        self.hang_after: int | None = None
        self.affects: Callable[[Request], bool] = lambda request: True
        self.alive = True
        self.overloaded = False
        self.garble: Callable[[PackedRows], PackedRows] = lambda packed: packed
        self.num_cached_tokens = 0
        self.submitted: list[Request] = []
        self.streams: list[ScriptedStream] = []

    def submit(self, request: Request) -> TokenStream:
        if not self.alive:
            raise EngineDeadError("the engine is down")
        if self.overloaded:
            raise OverloadedError("the queue is full", retry_after=1)
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
        if logprobs.prompt_top_k is not None:
            step = self.prompt_rows_per_chunk
            for start in range(logprobs.prompt_start, len(prompt), step):
                positions = range(start, min(start + step, len(prompt)))
                ids = [prompt[position] for position in positions]
                found.append(
                    TokenChunk(request_id=name, prompt=rows(positions, ids, logprobs.prompt_top_k, vocab_size))
                )
        ids, finish, stop_token_id = self._sampled(request)
        for start in range(0, len(ids), self.tokens_per_chunk):
            part = ids[start : start + self.tokens_per_chunk]
            positions = range(len(prompt) + start, len(prompt) + start + len(part))
            packed = self.garble(rows(positions, part, logprobs.top_k, vocab_size))
            last = start + len(part) == len(ids)
            found.append(
                TokenChunk(
                    request_id=name,
                    tokens=packed,
                    finish_reason=finish if last else None,
                    stop_token_id=stop_token_id if last else None,
                    num_cached_tokens=self.num_cached_tokens,
                )
            )
        if not ids:
            found.append(TokenChunk(request_id=name, finish_reason=finish))
        return found

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
                    request_id=self.request.request_id, finish_reason=FinishReason.ERROR, error="a row was NaN"
                )
            if self.emitted == engine.hang_after:
                await asyncio.Event().wait()
        chunk = self._chunks[self.emitted]
        self.emitted += 1
        self.ended = chunk.finish_reason is not None
        return chunk

    def close(self) -> None:
        self.closed = True
