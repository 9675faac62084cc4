"""`neper engine`: our own engine on stdin and stdout, for programs that speak the T/LP line protocol.

Lines are read in a thread and answered in the loop that steps the engine. The results of a step are written at once.
The tag of a request is its id in the engine. Without tags one request runs at a time, and later ones wait here. Every
line is then about the first request that has not ended.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import neper
from neper.config import LOG_FORMAT, LOG_TIME_FORMAT, EngineConfig
from neper.errors import NeperError
from neper.types import FinishReason, Progress, TokenChunk
from neper.wire import lines
from neper.wire.lines import Done, Failed, Gen, Info, LineError, Logprobs, Quit, ReadyLine, Stop, Token, format_answer
from neper.wire.logprobs import format_logprobs
from neper.wire.requests import request_of

if TYPE_CHECKING:
    from neper.engine.core import EngineCore

HEARTBEAT = 1.0
"""Seconds without a line about a request, or about loading, after which there is one."""

Lines = SimpleQueue[bytes | None]
"""Lines as they come; None is their end."""


@dataclass
class _Reply:
    """A request that the engine has.

    Attributes:
        prompt, generated, accepted, offered, reused: tokens, for DONE.
        read: tokens of the prompt that PP has told.
        began, first_token, told: the times of its arrival, its first token, and the last line about it.
    """

    tag: str | None
    prompt: int
    scored: bool
    began: float
    told: float
    first_token: float | None = None
    generated: int = 0
    accepted: int = 0
    offered: int = 0
    reused: int = 0
    read: int = 0

    def done(self, finish: str, now: float) -> Done:
        first_token = now if self.first_token is None else self.first_token
        return Done(
            self.generated,
            self.prompt,
            round(1000 * (first_token - self.began), 3),
            round(1000 * (now - first_token), 3),
            finish,
            accepted=self.accepted,
            offered=self.offered,
            reused=self.reused,
            tag=self.tag,
        )


class Speaker:
    """An engine that takes and writes lines. `engine.remote.loop` calls `take` and `tell`.

    Args:
        core: it must list any number of alternatives.
        asked: lines of requests.
        write: takes the answers, whole lines at a time.
        eos_token_ids: end-of-sequence ids of the model.
        max_logprobs: most alternatives that a request may ask for; -1 = any.
    """

    def __init__(
        self,
        core: EngineCore,
        asked: Lines,
        write: Callable[[bytes], object],
        *,
        eos_token_ids: tuple[int, ...],
        max_logprobs: int,
    ) -> None:
        self._core = core
        self._asked = asked
        self._write = write
        context, slots = core.capabilities.max_model_len, core.capabilities.max_num_seqs
        self.ready = ReadyLine(context, stop=True, slots=slots if slots > 1 else 0)
        self._request_of = partial(
            request_of, eos_token_ids=eos_token_ids, max_model_len=context, max_logprobs=max_logprobs
        )
        self._waiting: deque[Gen | Failed] = deque()
        self._replies: dict[str, _Reply] = {}
        self._answers: list[bytes] = []

    def say_ready(self) -> None:
        """Say that lines are answered from here on."""
        self._say(self.ready)
        self._flush()

    def take(self) -> bool:
        """Act on all lines that are there. Waits for one when there is nothing to compute. False = stop."""
        try:
            line = self._asked.get(block=not self._core.has_work)
            while line is not None and self._take(line):
                line = self._asked.get(block=False)
        except Empty:
            return True
        self._flush()
        return False

    def tell(self, chunks: list[TokenChunk]) -> None:
        """Write the results of a step, and begin requests for which it made room."""
        now = time.monotonic()
        for chunk in chunks:
            self._answer(chunk, now)
        self._tell_progress(now)
        self._begin_waiting()
        self._flush()

    def _take(self, line: bytes) -> bool:
        tagged = self.ready.tagged
        try:
            request = lines.parse_request(line, tagged=tagged)
        except LineError as error:
            self._waiting.append(Failed(str(error), self._name_of_nobody(error.tag) if tagged else None))
        else:
            if isinstance(request, Quit):
                return False
            if isinstance(request, Stop):
                self._stop(request)
            else:
                self._waiting.append(request)
        self._begin_waiting()
        return True

    def _name_of_nobody(self, tag: str | None) -> str:
        """The name in an error that must not read as the end of a running request."""
        return "?" if tag is None or tag in self._replies else tag

    def _begin_waiting(self) -> None:
        """Hand waiting requests over to the engine. With tags none waits."""
        while self._waiting and (self.ready.tagged or not self._replies):
            item = self._waiting.popleft()
            if isinstance(item, Gen):
                self._begin(item)
            else:
                self._say(item)

    def _begin(self, gen: Gen) -> None:
        request_id = gen.tag or ""
        if request_id in self._replies:
            self._say(Failed(f"a request of the name {gen.tag} is running", "?"))
            return
        try:
            request = self._request_of(gen, request_id)
        except ValueError as error:
            self._say(Failed(str(error), gen.tag))
            return
        now = time.monotonic()
        self._replies[request_id] = _Reply(gen.tag, len(gen.prompt_token_ids), gen.logprobs is not None, now, now)
        self._core.add(request)

    def _stop(self, stop: Stop) -> None:
        """End a request. One that is not known may just have ended."""
        request_id = stop.tag or ""
        reply = self._replies.pop(request_id, None)
        if reply is not None:
            self._core.abort(request_id)
            self._say(reply.done("cancel", time.monotonic()))

    def _answer(self, chunk: TokenChunk, now: float) -> None:
        reply = self._replies[chunk.request_id]
        reply.told = now
        reply.offered += chunk.num_drafts
        reply.accepted += chunk.num_accepted
        rows = chunk.tokens
        if rows is not None:
            if reply.first_token is None:
                reply.first_token, reply.reused = now, chunk.num_cached_tokens
            for place, token_id in enumerate(rows.token_ids.tolist()):
                reply.generated += 1
                self._say(Token(token_id, reply.tag))
                if reply.scored:
                    row = rows.data[4 * rows.width * place : 4 * rows.width * (place + 1)]
                    self._answers.append(format_logprobs(Logprobs.of_row(row, reply.tag)))
        if chunk.finish_reason is None:
            return
        del self._replies[chunk.request_id]
        if chunk.finish_reason is FinishReason.ERROR:
            self._say(Failed(chunk.error or "the engine failed this request", reply.tag))
        else:
            self._say(reply.done(chunk.finish_reason.value, now))

    def _tell_progress(self, now: float) -> None:
        """Say PP for prompts of which more was computed, and for requests without a line for a while."""
        scheduler = self._core.scheduler
        for seq in itertools.chain(scheduler.running, scheduler.waiting):
            reply = self._replies[seq.request.request_id]
            if reply.told == now:
                continue
            read = min(seq.num_computed_tokens, reply.prompt)
            if now - reply.told >= HEARTBEAT or reply.read < read < reply.prompt:
                reply.read, reply.told = read, now
                self._say(lines.Progress(read, reply.prompt, reply.tag))

    def _say(self, line: lines.AnswerLine) -> None:
        self._answers.append(format_answer(line))

    def _flush(self) -> None:
        if self._answers:
            self._write(b"".join(self._answers))
            self._answers.clear()


def run(config: EngineConfig) -> int:
    """Serve stdin and stdout until QUIT or the end of stdin; returns the exit code.

    Raises StartupError if the engine cannot start, and BrokenPipeError when nobody reads stdout any more.
    """
    write = _take_stdout()
    logging.basicConfig(format=LOG_FORMAT, datefmt=LOG_TIME_FORMAT, stream=sys.stderr)
    logging.getLogger("neper").setLevel(logging.INFO)
    asked: Lines = SimpleQueue()
    threading.Thread(target=_read, args=(asked,), name="stdin", daemon=True).start()

    def say(*texts: str) -> None:
        write(b"".join(format_answer(Info(text)) for text in texts))

    # Only now: lines that these print during the import are not part of the protocol.
    from neper.engine.core import EngineCore
    from neper.engine.remote import loop
    from neper.models.source import named_ends, resolve
    from neper.text.ends import reply_ends
    from neper.text.tokenizer import Tokenizer

    progress = _progress(say)
    with loop.starting():
        source = resolve(config.model, progress=progress)
        say(f"engine=neper version={neper.__version__} model={source.name}")
        # An allowed set of any size is listed whole. `request_of` bounds other lists.
        core = EngineCore(dataclasses.replace(config, max_logprobs=-1), source, progress)
    can = core.capabilities
    try:
        ends = tuple(reply_ends(Tokenizer.from_directory(source.path), named_ends(source.path)))
    except NeperError:  # a program that speaks in ids needs no tokenizer, and no chat template
        ends = source.eos_token_ids
    say(f"device={can.device} dtype={can.dtype}", f"vocab_size={can.vocab_size} max_logprobs={config.max_logprobs}")
    speaker = Speaker(core, asked, write, eos_token_ids=ends, max_logprobs=config.max_logprobs)
    speaker.say_ready()
    return loop.serve(core, speaker.take, speaker.tell)


def _take_stdout() -> Callable[[bytes], None]:
    """Take stdout for the protocol: returns its writer. Everything that others print then goes to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def write(data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(stdout, rest) :]

    return write


def _read(asked: Lines) -> None:
    """Pass on the lines of stdin, and then None. A last line without a line feed was cut off, and is dropped."""
    try:
        # A file of our own: at its end the interpreter would wait for the lock of sys.stdin.
        with open(0, "rb", closefd=False) as stdin:
            for line in stdin:
                if line.endswith(b"\n"):
                    asked.put(line)
    finally:
        asked.put(None)


def _progress(say: Callable[[str], None]) -> Progress:
    """A function that tells the progress of loading, once in a while and at the end of each part."""
    told = 0.0

    def progress(done: int, total: int, what: str) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= HEARTBEAT or done == total:
            told = now
            say(f"loading done={done} total={total} what={what.replace(' ', '-')}")

    return progress
