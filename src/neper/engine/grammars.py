"""Compiles the grammars of requests beside the step loop: a sequence is queued once its own is ready."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as _any_done
from pathlib import Path
from typing import TYPE_CHECKING

from neper.engine.sequence import Sequence
from neper.errors import NeperError

if TYPE_CHECKING:
    from neper.text.matcher import Grammars, Matcher

logger = logging.getLogger("neper.engine")

# How long a loop with nothing else to do waits for a grammar before it looks for messages again.
_WAIT_SECONDS = 0.01
# One that takes long does not hold up the others. The server lets few of those come at a time.
_THREADS = 2


class GrammarCompiler:
    """The grammars of one engine's requests, and the sequences that wait for theirs.

    llguidance drops Python's lock while it compiles, so that steps go on meanwhile.

    Args:
        path: the model's directory, whose tokenizer is read with the first grammar.
        vocab_size: width of the logits.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._grammars: dict[tuple[int, ...], Grammars] = {}
        self._waiting: dict[Sequence, Future[Matcher]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    @property
    def compiling(self) -> list[Sequence]:
        """The sequences that wait for their grammar."""
        return list(self._waiting)

    def compile(self, seq: Sequence) -> None:
        """Start to compile a sequence's grammar; `take` gives the sequence back."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="grammars")
        matcher = self._ready(seq)
        if matcher is None:
            self._waiting[seq] = self._pool.submit(self._matcher, seq)
        else:
            ready: Future[Matcher] = Future()
            ready.set_result(matcher)
            self._waiting[seq] = ready

    def take(self, *, wait: bool) -> Iterator[tuple[Sequence, str | None]]:
        """The sequences that need not wait any more, each with its matcher or with what is wrong with its grammar.

        `wait`: there is nothing else to do, so stay a moment if none is ready.
        """
        if wait and self._waiting:
            _any_done(self._waiting.values(), timeout=_WAIT_SECONDS, return_when=FIRST_COMPLETED)
        for seq in [seq for seq, future in self._waiting.items() if future.done()]:
            future = self._waiting.pop(seq)
            error = future.exception()
            if error is None:
                seq.matcher = future.result()
                yield seq, None
            elif isinstance(error, NeperError):
                yield seq, error.message
            else:
                logger.error("a grammar could not be compiled", exc_info=error)
                yield seq, f"the grammar could not be compiled: {error}"

    def forget(self, seq: Sequence) -> bool:
        """Drop a sequence that waits; False where it does not."""
        future = self._waiting.pop(seq, None)
        if future is not None:
            future.cancel()
        return future is not None

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
