"""Another program as an Engine: a process that speaks lines."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shlex
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from neper.config import LineEngineConfig
from neper.engine.interface import Capabilities, EngineStats
from neper.engine.plan.fair_queue import FairQueue
from neper.engine.remote.chunk_stream import ChunkStream
from neper.engine.remote.supervisor import Supervisor
from neper.errors import EngineDeadError, OverloadedError, StartupError
from neper.types import FinishReason, Request, TokenChunk
from neper.wire.child import Child
from neper.wire.conversation import Conversation
from neper.wire.handshake import Handshake
from neper.wire.lines import (
    SAMPLING_KEYS,
    AnswerLine,
    Done,
    Failed,
    Info,
    LineError,
    Logprobs,
    Notice,
    Quit,
    ReadyLine,
    Stop,
    Token,
    format_request,
    parse_answer,
)
from neper.wire.requests import gen_of

logger = logging.getLogger("neper.engine")

DEFAULT_MAX_LOGPROBS = 20

# The fields that a GEN line has, and those that are handled here.
_SAMPLING_FIELDS = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_k",
        "seed",
        *SAMPLING_KEYS.values(),
        "allowed_token_ids",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "skip_special_tokens",
    }
)

MAX_WARNINGS = 20
"""Warnings about the lines of one process that are logged."""

MAX_VOCAB_SIZE = 2**22
"""Most ids, several times those of the largest vocabularies. Tables of that many are made."""


@dataclasses.dataclass(eq=False)
class _Job:
    """A request on its way: in the queue, then in a slot until the engine is done with it.

    Attributes:
        heard: the time of the engine's last line about it.
        stopped: the engine was told to end it.
    """

    request: Request
    conversation: Conversation
    stream: ChunkStream
    tag: str | None = None
    heard: float = 0.0
    stopped: bool = False


class LineEngine:
    """An Engine (see neper.engine.interface) that is a command speaking the T/LP line protocol.

    An engine that names no slots computes one request at a time. Its capabilities are those that lines can ask for.
    When its process dies, the requests that it had end with EngineDeadError. Those that wait stay for the next process.
    Until that is ready, `submit` raises OverloadedError.

    Args:
        vocab_size: that of the tokenizer, for engines that do not tell theirs.
    """

    def __init__(self, config: LineEngineConfig, *, vocab_size: int) -> None:
        assert config.engine_command is not None
        self._command = shlex.split(config.engine_command)
        self._config = config
        self._tokenizer_size = vocab_size
        self._log = _log_file(config.engine_log)
        self._ready: ReadyLine  # of the process that runs, or ran last
        self._capabilities: Capabilities | None = None
        self._supervisor = Supervisor(self._launch, self._serve, self._lost)
        self._queue: FairQueue[_Job] = FairQueue()
        self._running: dict[str | None, _Job] = {}
        self._jobs: dict[str, _Job] = {}
        self._num_sent = 0
        self._warnings = 0
        self._end = ""
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._draft_tokens = self._accepted_tokens = 0

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise RuntimeError("the engine has not been started")
        return self._capabilities

    @property
    def alive(self) -> bool:
        return self._supervisor.alive

    async def start(self) -> None:
        """Run the command and wait until it is ready.

        Raises:
            StartupError: it cannot be run, ended before it was ready, or said nothing for too long.
        """
        logger.info("starting the engine; its stderr goes to %s", self._log)
        await self._supervisor.start()

    async def close(self) -> None:
        """End the process. Requests still running end with EngineDeadError. To end a `start` under way, cancel it."""
        await self._supervisor.close()
        self._fail([*self._running.values(), *self._queue.clear()], "the server is shutting down")
        self._running.clear()
        if self._config.engine_log is None and self._log.is_file() and not self._log.stat().st_size:
            self._log.unlink()

    def submit(self, request: Request) -> ChunkStream:
        if not self.alive:
            raise OverloadedError("the engine is being started again; try again shortly", retry_after=5)
        if request.request_id in self._jobs:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if request.sampling.max_tokens is None:
            rest = max(0, self.capabilities.max_model_len - len(request.prompt_token_ids))
            sampling = msgspec.structs.replace(request.sampling, max_tokens=rest)
            request = msgspec.structs.replace(request, sampling=sampling)
        stream = ChunkStream(request.request_id, self._forget)
        if request.sampling.max_tokens == 0:
            stream.put(TokenChunk(request_id=request.request_id, finish_reason=FinishReason.LENGTH))
            return stream
        job = _Job(request, Conversation(request, self.capabilities.vocab_size), stream)
        self._jobs[request.request_id] = job
        self._queue.add(request.group, job)
        self._fill()
        return stream

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._queue),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
            restarts=self._supervisor.restarts,
        )

    async def _launch(self) -> Child:
        self._warnings = 0
        handshake = Handshake(self._config.engine_start_timeout)
        child = Child(handshake.take, self._log, farewell=format_request(Quit()))
        try:
            await child.start(self._command)
            self._ready = await handshake.ready(child)
            self._capabilities = self._read_capabilities(handshake.fields, self._ready)
        except StartupError as error:
            await child.close(kill=True)
            words = child.last_words()
            raise StartupError(f"{error}; its last words:\n{words}" if words else error.message) from None
        except BaseException:
            await child.close(kill=True)
            raise
        child.on_lines = self._take
        facts = " ".join(f"{name}={value}" for name, value in handshake.fields.items())
        logger.info("the engine is ready: context %d, %s", self._ready.context, facts)
        return child

    def _read_capabilities(self, fields: dict[str, str], ready: ReadyLine) -> Capabilities:
        return Capabilities(
            vocab_size=_number(fields, "vocab_size", self._tokenizer_size, least=1, most=MAX_VOCAB_SIZE),
            max_model_len=ready.context,
            max_logprobs=_number(fields, "max_logprobs", DEFAULT_MAX_LOGPROBS, least=-1),
            max_num_seqs=max(1, ready.slots),
            logprobs=self._sends_logprobs(fields.get("logprobs")),
            logprob_token_ids=False,
            prompt_logprobs=False,
            candidates=False,
            sampling_fields=_SAMPLING_FIELDS,
            device=fields.get("device", ""),
            dtype=fields.get("dtype", ""),
        )

    async def _serve(self, child: Child) -> None:
        """Work with a process until it is gone. Its lines come to `_take`."""
        self._fill()
        timeout = self._config.engine_silence_timeout
        while not child.gone.done():
            await asyncio.wait((child.gone,), timeout=timeout / 4)
            if self._is_hung(timeout):
                self._end = "says nothing any more, and is started again"
                logger.error("the engine %s", self._end)
                return
        self._end = "process died while it served this request"
        if words := child.last_words():
            logger.error("the engine's last words: %s", words)

    def _lost(self) -> None:
        child = self._supervisor.connection
        if child is not None:
            child.on_lines = lambda lines: None  # its last lines are about requests that have ended
        self._fail(self._running.values(), f"the engine {self._end}")
        self._running.clear()

    def _fail(self, jobs: Iterable[_Job], message: str) -> None:
        for job in jobs:
            if not job.conversation.ended:
                job.stream.put(EngineDeadError(message))
            self._jobs.pop(job.request.request_id, None)

    def _fill(self) -> None:
        """Send waiting requests while there are free slots."""
        if not self.alive:
            return  # waiting requests are for the next process
        child = self._supervisor.connection
        assert child is not None
        while len(self._running) < self.capabilities.max_num_seqs and len(self._queue):
            job = self._queue.take()
            self._num_sent += 1
            job.tag = str(self._num_sent) if self._ready.tagged else None
            job.heard = time.monotonic()
            self._running[job.tag] = job
            self._prompt_tokens += len(job.request.prompt_token_ids)
            child.write(format_request(gen_of(job.request, job.tag, self.capabilities.vocab_size)))

    def _take(self, lines: list[bytes]) -> None:
        """Take the engine's lines. Each request gets one chunk for all of its lines among them."""
        tagged = self._ready.tagged
        jobs: dict[str | None, _Job] = {}
        for line in lines:
            if not line.strip():
                continue
            try:
                answer = parse_answer(line, tagged=tagged)
            except LineError as error:
                job = self._running.get(error.tag)
                self._take_malformed(job, error)
            else:
                job = self._running.get(getattr(answer, "tag", None))
                if job is not None:
                    self._take_answer(job, answer)
                elif isinstance(answer, Info | Notice):
                    logger.debug("the engine: %s", line.decode("utf-8", "replace"))
            if job is not None:
                jobs[job.tag] = job
        now = time.monotonic()
        for job in jobs.values():
            job.heard = now
            self._tell(job)
        self._fill()

    def _take_answer(self, job: _Job, answer: AnswerLine) -> None:
        conversation = job.conversation
        before = conversation.num_tokens
        match answer:
            case Token():
                conversation.take_token(answer)
            case Logprobs():
                conversation.take_logprobs(answer)
            case Done():
                ended = conversation.ended
                conversation.take_done(answer)
                self._cached_tokens += answer.reused
                self._draft_tokens += answer.offered
                self._accepted_tokens += answer.accepted
                sent = conversation.num_tokens + conversation.num_unscored_ends
                if answer.generated != sent and not ended:
                    self._warn(f"the engine counted {answer.generated} tokens and sent {sent}")
                self._learn(conversation)
            case Failed():
                conversation.take_failed(answer)
            case _:
                pass
        self._generated_tokens += conversation.num_tokens - before

    def _sends_logprobs(self, word: str | None) -> bool | None:
        """True where the engine sends scores: it says so, or did so before it was started again; None = not known."""
        if word is not None:
            return word != "none"
        return None if self._capabilities is None else self._capabilities.logprobs

    def _learn(self, conversation: Conversation) -> None:
        """Learn from the first request that asks for scores if the engine sends them."""
        if self.capabilities.logprobs is None and (scored := conversation.scored) is not None:
            if not scored:
                logger.warning("this engine sends no logprobs: requests for them are refused from here on")
            self._capabilities = msgspec.structs.replace(self.capabilities, logprobs=scored)

    def _take_malformed(self, job: _Job | None, error: LineError) -> None:
        self._warn(f"the engine sent a malformed line: {error}")
        if job is None:
            return
        job.conversation.fail(f"the engine sent a malformed line: {error}")
        # A malformed line that ends a request ends it too.
        if error.line.startswith(("DONE", "ERR")):
            job.conversation.done = True

    def _warn(self, message: str) -> None:
        """Log a defect of an engine's lines, a bounded number of times per process, since each line can have one."""
        self._warnings += 1
        if self._warnings <= MAX_WARNINGS:
            logger.warning("%s", message)
        if self._warnings == MAX_WARNINGS:
            logger.warning("more warnings about the lines of this engine process are not logged")

    def _tell(self, job: _Job) -> None:
        """Give out the new results of a request, and free its slot when the engine is done with it."""
        conversation = job.conversation
        chunk = conversation.chunk()
        if chunk is not None:
            job.stream.put(chunk)
        if conversation.done:
            del self._running[job.tag]
            self._jobs.pop(job.request.request_id, None)
        elif conversation.ended:
            self._stop(job)

    def _stop(self, job: _Job) -> None:
        """Tell the engine once to end a request. If it cannot be told, its lines are ignored until the request ends."""
        if job.stopped:
            return
        job.stopped = True
        job.heard = time.monotonic()
        if self._ready.stop and self._supervisor.connection is not None:
            self._supervisor.connection.write(format_request(Stop(job.tag)))

    def _forget(self, request_id: str) -> None:
        """Drop a request that nobody reads any more."""
        job = self._jobs.get(request_id)
        if job is None:
            return
        if self._running.get(job.tag) is job:
            job.conversation.abandon()
            self._stop(job)
        else:
            self._queue.drop(job.request.group, job)
            del self._jobs[request_id]

    def _is_hung(self, timeout: float) -> bool:
        """End requests about which no line came for so long. True when one was ended as long ago already."""
        now = time.monotonic()
        for job in list(self._running.values()):
            if now - job.heard < timeout:
                continue
            if job.conversation.ended:
                return True
            job.conversation.fail(f"the engine said nothing of this request for {timeout:g} seconds")
            job.heard = now
            self._tell(job)
        return False


def _number(fields: dict[str, str], name: str, default: int, *, least: int, most: int = 2**31 - 1) -> int:
    try:
        value = int(fields.get(name, default))
    except ValueError:
        raise StartupError(f"the engine said {name}={fields[name]}, which is no number") from None
    if value < least:
        raise StartupError(f"the engine said {name}={value}, which is less than {least}")
    if value > most:
        raise StartupError(f"the engine said {name}={value}, which is more than {most}")
    return value


def _log_file(path: str | None) -> Path:
    if path is not None:
        return Path(path).expanduser()
    handle, name = tempfile.mkstemp(prefix="neper-engine-", suffix=".log")
    os.close(handle)
    return Path(name)
