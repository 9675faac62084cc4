"""The trials of strangers' grammars: their order, their time, and their verdicts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from neper.errors import InvalidRequestError, OverloadedError
from neper.text.grammar import MAX_CHARACTERS, json_object
from neper.text.grammar_vocabulary import GrammarVocabulary
from neper.text.recent import Recent
from neper.text.tokenizer import Tokenizer
from neper.text.trial import Outcome, Trial

SHORT_SECONDS = 0.1
"""CPU time of a first trial. Nearly all grammars need a tenth of it."""
SECONDS = 2.0
"""CPU time of a second trial, for grammars that took longer."""

MAX_SHORT = 64
MAX_LONG = 8
"""The most trials of each kind that may wait or run; one more is a 503."""

REMEMBERED = 4096
REMEMBERED_LONG = 16
"""Slow grammars that were good. Each takes as long again where it is used."""


class Trials:
    """Trials of grammars, beside everything else: only other trials wait for one.

    A first trial is short, so that honest grammars wait only for short ones. A grammar that takes longer has a second
    trial, which waits for others of that kind. Verdicts are remembered, and a grammar has one trial at a time.

    Args:
        vocab_size: width of the logits.
        eos_token_ids: the tokens that may come where a grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._source = (tokenizer, vocab_size, eos_token_ids)
        self._verdicts: Recent[bytes, str | None] = Recent(REMEMBERED)
        self._long_verdicts: Recent[bytes, str | None] = Recent(REMEMBERED_LONG)
        self._running: dict[bytes, asyncio.Future[str | None]] = {}
        self._short = _Lane("short", SHORT_SECONDS, MAX_SHORT, self._vocabulary)
        self._long = _Lane("long", SECONDS, MAX_LONG, self._vocabulary)
        self._verdicts.put(_key(json_object().text()), None)  # our own

    async def check(self, text: str, param: str) -> None:
        """Find out if a serialised grammar can be used.

        Raises:
            InvalidRequestError: it is not valid, too large, or takes too long; the error names `param`.
            OverloadedError: too many are being tried.
        """
        if len(text) > MAX_CHARACTERS:
            problem: str | None = f"it has {len(text)} characters, more than {MAX_CHARACTERS}"
        else:
            problem = await self._verdict(text)
        if problem is not None:
            raise InvalidRequestError(f"{param} cannot be compiled to a grammar: {problem}", param=param)

    async def _verdict(self, text: str) -> str | None:
        key = _key(text)
        for known in (self._verdicts, self._long_verdicts):
            if key in known:
                return known[key]
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = asyncio.ensure_future(self._try(key, text))
            running.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(running)  # a caller that leaves does not end it for the others

    def _forget(self, key: bytes, done: asyncio.Future[str | None]) -> None:
        del self._running[key]
        if not done.cancelled():
            done.exception()  # seen, also where everybody has left

    async def _try(self, key: bytes, text: str) -> str | None:
        outcome = await self._short.run(text)
        known = self._verdicts
        if outcome.late:
            outcome = await self._long.run(text)
            if outcome.problem is None:
                known = self._long_verdicts
        if outcome.stopped:
            raise OverloadedError(
                "the process that tries grammars was stopped; it is being started again", retry_after=1
            )
        known.put(key, outcome.problem)
        return outcome.problem

    def _vocabulary(self) -> GrammarVocabulary:
        return GrammarVocabulary.read(*self._source)


class _Lane:
    """Trials of one length: a process, a thread that waits for it, and the trials that wait for that thread."""

    def __init__(self, name: str, seconds: float, most: int, vocabulary: Callable[[], GrammarVocabulary]) -> None:
        self._seconds = seconds
        self._most = most
        self._trial = Trial(vocabulary)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name}-trials")
        self._size = 0

    async def run(self, text: str) -> Outcome:
        if self._size >= self._most:
            raise OverloadedError(f"{self._size} grammars are being tried, as many as may wait", retry_after=2)
        self._size += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._trial.run, text, self._seconds)
        finally:
            self._size -= 1


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
