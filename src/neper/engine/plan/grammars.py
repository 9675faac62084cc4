"""Grammars beside the step loop: compiled before a sequence is queued, and advanced where they are slow."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as _any_done
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neper.engine.plan.sequence import Sequence
from neper.errors import NeperError

if TYPE_CHECKING:
    from neper.text.matcher import Grammars, Matcher

logger = logging.getLogger("neper.engine")

# How long a loop with nothing else to do waits for a grammar before it looks for messages again.
_WAIT_SECONDS = 0.002
# One that takes long does not hold up the others. The server lets few of those come at a time.
_THREADS = 2
# Threads of grammars leave a busy core to the step loop.
_NICENESS = 10

NOT_ALLOWED = "a token was sampled that the grammar does not allow"


class EngineGrammars:
    """The grammars of one engine's requests, and the sequences that wait for theirs.

    llguidance drops Python's lock while it works, so that steps go on meanwhile. Running sequences do not wait for
    grammars that are compiled, nor slow ones for those that have taken more than STEP_SECONDS: each has its threads.

    Args:
        path: the model's directory, whose tokenizer is read with the first grammar.
        vocab_size: width of the logits.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._compiling, self._advancing, self._advancing_long = (
            ThreadPoolExecutor(threads, thread_name_prefix="grammars", initializer=_be_nice)
            for threads in (_THREADS, 1, 1)
        )
        self._lock = threading.Lock()
        self._grammars: dict[tuple[int, ...], Grammars] = {}
        self._waiting: dict[Sequence, Future[Any]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    @property
    def compiling(self) -> list[Sequence]:
        """The sequences whose grammar is being compiled."""
        return [seq for seq in self._waiting if not seq.parked]

    def compile(self, seq: Sequence) -> None:
        """Start to compile a sequence's grammar; `take` gives the sequence back."""
        matcher = self._ready(seq)
        if matcher is None:
            self._waiting[seq] = self._compiling.submit(self._matcher, seq)
        else:
            ready: Future[Matcher] = Future()
            ready.set_result(matcher)
            self._waiting[seq] = ready

    def advance(self, seq: Sequence, token_id: int) -> None:
        """Start to follow a slow grammar by a token; the sequence is parked until `take` gives it back."""
        from neper.text.matcher import STEP_SECONDS

        assert seq.matcher is not None
        seq.parked = True
        pool = self._advancing_long if seq.matcher.seconds > STEP_SECONDS else self._advancing
        self._waiting[seq] = pool.submit(seq.matcher.advance, token_id)

    def take(self, *, wait: bool) -> Iterator[tuple[Sequence, str | None]]:
        """The sequences that need not wait any more, each with what is wrong with its grammar.

        `wait`: there is nothing else to do, so stay a moment if none is ready.
        """
        if wait and self._waiting:
            _any_done(self._waiting.values(), timeout=_WAIT_SECONDS, return_when=FIRST_COMPLETED)
        for seq in [seq for seq, future in self._waiting.items() if future.done()]:
            future = self._waiting.pop(seq)
            error = future.exception()
            if isinstance(error, NeperError):
                yield seq, error.message
            elif error is not None:
                what = "followed" if seq.parked else "compiled"
                logger.error("a grammar could not be %s", what, exc_info=error)
                yield seq, f"the grammar could not be {what}: {error}"
            elif seq.parked:
                yield seq, None if future.result() else NOT_ALLOWED
            else:
                seq.matcher = future.result()
                yield seq, None

    def forget(self, seq: Sequence) -> bool:
        """Drop a sequence that waits; True where its grammar was being compiled, so that it was not queued yet."""
        future = self._waiting.pop(seq, None)
        if future is not None:
            future.cancel()
        return future is not None and not seq.parked

    def _ready(self, seq: Sequence) -> Matcher | None:
        grammars, text = self._grammars.get(seq.request.eos_token_ids), seq.request.sampling.grammar
        return None if grammars is None or text is None else grammars.ready(text)

    def _matcher(self, seq: Sequence) -> Matcher:
        from neper.text.matcher import Grammars
        from neper.text.tokenizer import Tokenizer

        ends = seq.request.eos_token_ids
        with self._lock:
            if ends not in self._grammars:
                self._grammars[ends] = Grammars(Tokenizer.from_directory(self._path), self._vocab_size, ends)
        assert seq.request.sampling.grammar is not None
        return self._grammars[ends].matcher(seq.request.sampling.grammar)


def _be_nice() -> None:
    """Let the step loop have the core first; on Linux a thread can be nice alone."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
