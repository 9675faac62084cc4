"""A generation: the choices of one HTTP request while they are computed, as one sequence of deltas.

One path serves both kinds of reply: a stream shows the deltas as they come, a full reply folds them.

    TokenStream ─┐ pump (a task a choice): chunk → Choice.step → delta ─┐
    TokenStream ─┤                                                      ├→ inbox → next_deltas(): all that is pending
    TokenStream ─┘                                                      ┘

`close()` must be called once a generation was started, whatever happened: it closes every TokenStream, so that the
engine stops work nobody waits for. It is a plain method, since the `finally` of a generator that never ran never runs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import NamedTuple, Protocol

import msgspec

from neper.engine.interface import Engine, TokenStream, failure
from neper.errors import EngineError, NeperError, RequestTimeoutError
from neper.server.choice import Choice, Delta
from neper.server.fields import ReplyFields
from neper.server.metrics import Metrics
from neper.server.timing import ChoiceTiming
from neper.types import FinishReason, Float32Array, Request

log = logging.getLogger(__name__)


class Usage(NamedTuple):
    """Tokens of a request so far: of its prompts, those of them found in the cache, and of its replies.

    Attributes:
        accepted_tokens, rejected_tokens: drafted tokens that are in the replies, and that are not.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    accepted_tokens: int
    rejected_tokens: int


class Admission(Protocol):
    """Counts the generations in flight."""

    def enter(self, generation: Generation) -> None:
        """Count a generation until it leaves. Raises OverloadedError or QueueFullError where there are too many."""

    def leave(self, generation: Generation) -> None:
        """Count it no longer. Does nothing for one that is not counted."""


class Generation:
    """The choices of one HTTP request in flight.

    Args:
        timeout: seconds that they may take.
    """

    def __init__(
        self,
        engine: Engine,
        admission: Admission,
        metrics: Metrics,
        choices: list[Choice],
        *,
        num_prompts: int,
        timeout: float,
    ) -> None:
        self.choices = choices
        self._num_prompts = num_prompts
        self._timeout = timeout
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._inbox: list[Delta] = []
        self._error: Exception | None = None
        self._wake: asyncio.Future[None] | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._unfinished = len(choices)
        self.timings = [ChoiceTiming() for _ in choices]

    def start(self) -> None:
        """Submit every choice, or none. Raises OverloadedError, EngineDeadError."""
        self._admission.enter(self)
        try:
            capabilities = self._engine.capabilities
            for choice in self.choices:
                choice.num_listed = choice.request.num_listed(capabilities.vocab_size)
                choice.may_be_unscored = capabilities.logprobs is not True  # it may have turned out just now
                choice.stream = self._engine.submit(choice.request)
        except BaseException:
            self.close()
            raise
        self._pumps = [asyncio.create_task(self._pump(choice)) for choice in self.choices]
        error = RequestTimeoutError(f"the request took longer than {self._timeout:g} seconds")
        self._timer = asyncio.get_running_loop().call_later(self._timeout, self.fail, error)

    async def next_deltas(self) -> list[Delta]:
        """All deltas that are pending, at least one; empty when every choice has finished. Raises what went wrong."""
        while not self._inbox:
            if self._error is not None:
                raise self._error
            if self._unfinished == 0:
                return []
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        deltas, self._inbox = self._inbox, []
        return deltas

    def fail(self, error: Exception) -> None:
        """End all choices: what is pending is still delivered, then `error` is raised."""
        if self._error is None:
            self._error = error
        self.close()
        self._wake_up()

    def close(self) -> None:
        """Stop all work. Safe at any time and more than once."""
        if self._timer is not None:
            self._timer.cancel()
        for pump in self._pumps:
            pump.cancel()
        for choice in self.choices:
            if choice.stream is not None:
                choice.stream.close()
        self._admission.leave(self)

    @property
    def scores_prompts(self) -> bool:
        return any(choice.request.logprobs.prompt_top_k is not None for choice in self.choices)

    def usage(self) -> Usage:
        """The tokens so far. A prompt counts once however many choices it has."""
        each = len(self.choices) // self._num_prompts
        prompts = self.choices[::each]
        return Usage(
            prompt_tokens=sum(len(choice.prompt.token_ids) for choice in prompts),
            cached_tokens=sum(choice.num_cached_tokens for choice in prompts),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            accepted_tokens=sum(choice.num_accepted for choice in self.choices),
            rejected_tokens=sum(choice.num_rejected for choice in self.choices),
        )

    async def _pump(self, choice: Choice) -> None:
        assert choice.stream is not None
        timing = self.timings[choice.index]
        try:
            async for chunk in choice.stream:
                self._metrics.observe_chunk(timing, chunk)
                if choice.validated:
                    delta = await asyncio.to_thread(choice.step, chunk)
                else:
                    delta = choice.step(chunk)
                if delta is not None:
                    if choice.finished and choice.fields is not None and choice.scored:
                        delta.fields = await self._fields(choice, choice.fields, delta)
                    self._inbox.append(delta)
                    if choice.finished:
                        timing.finish_reason = delta.finish_reason
                        break
                    self._wake_up()
            if not choice.finished:
                raise EngineError("the engine ended this request without a reason")
        except NeperError as error:
            timing.finish_reason = "error"
            self.fail(error)
        except Exception:
            log.exception("request %s failed", choice.request.request_id)
            timing.finish_reason = "error"
            self.fail(EngineError("internal error while generating"))
        else:
            # After a stop string the engine is still at work.
            choice.stream.close()
            self._unfinished -= 1
            self._wake_up()

    async def _fields(self, choice: Choice, fields: ReplyFields, delta: Delta) -> bytes:
        """The JSON of a choice's fields, once all of its text is there and the engine has scored other values."""
        whole = delta.finish_reason != "length" and delta.stop_reason is None
        await asyncio.to_thread(fields.read, whole=whole)
        asked = fields.requests(choice.request, self._engine.capabilities.max_model_len)
        numbers = itertools.count()
        while (batch := await asyncio.to_thread(next, asked, None)) is not None:
            requests = [
                msgspec.structs.replace(one.request, request_id=f"{one.request.request_id}.{next(numbers)}")
                for one in batch
            ]
            for one, logprobs in zip(batch, await self._score(requests), strict=True):
                fields.score(one, logprobs)
        return await asyncio.to_thread(fields.json)

    async def _score(self, requests: list[Request]) -> list[list[Float32Array]]:
        """The logprobs of each candidate of each request."""
        streams: list[TokenStream] = []
        scored = []
        try:
            streams += map(self._engine.submit, requests)
            for stream in streams:
                found: dict[int, Float32Array] = {}
                async for chunk in stream:
                    if chunk.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                        raise failure(chunk)
                    found |= {scores.place: scores.logprobs for scores in chunk.candidates}
                scored.append([found[place] for place in sorted(found)])
        finally:
            for stream in streams:
                stream.close()
        return scored

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
