"""Grammars at work: compiled for a tokenizer, with the ids that may come next."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from copy import copy

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits

from neper.errors import InvalidRequestError
from neper.text.grammar_problems import problem_of
from neper.text.grammar_vocabulary import GrammarVocabulary, bytes_tokenizer
from neper.text.recent import Recent
from neper.text.tokenizer import Tokenizer
from neper.types import Int32Array

# The defaults refuse lists of words over a vocabulary of 150,000 (items of a step), and rules with more than 1,000
# optional parts or 2,000 alternatives (items of a row). The constants below bound the time.
LIMITS = LLParserLimits(step_max_items=150_000, max_items_in_row=20_000, verbose_errors=False)

QUICK_SECONDS = 0.001
"""Most CPU time of a quick grammar for a token and the mask after it. A step can wait for a quick grammar.

Schemas of 3 to 300 properties, over Qwen's 151,936 ids: 0.02 ms at the median, 0.1 at the 90th percentile, 1 at most.
"""
STEP_SECONDS = 0.01
"""CPU time that a grammar may take for each token."""
SPARE_SECONDS = 0.25
"""The most that it may take beyond that in all. Then its request ends. Those schemas took 0.005 in 8,400 tokens."""

# A grammar that took long may do so again soon: per token, this share of its time still counts.
_FADING = 0.9
# Compiled grammars that are kept, so that each is compiled once. Slow ones have places of their own.
_KEPT = 64
_KEPT_LONG = 32
_LONG_SECONDS = 0.05


class Matcher:
    """The state of a text within its grammar.

    Args:
        matcher: llguidance's, at the beginning.
        exists: [ceil(V/32)] int32, the ids that have a token.

    Attributes:
        seconds: CPU time that a token and the mask after it took lately.
        slow: True where that is more than QUICK_SECONDS.
        mask: [ceil(V/32)] int32, the ids that may come next, if they are kept until the next token.
    """

    def __init__(self, matcher: LLMatcher, exists: Int32Array) -> None:
        self._matcher = matcher
        self._exists = exists
        self._spare = SPARE_SECONDS
        self._took = self._faded = 0.0
        self.seconds = 0.0
        self.slow = False
        self.mask: Int32Array | None = None

    def copy(self) -> Matcher:
        """Another matcher at the same place."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def accept(self, token_id: int) -> bool:
        """Go on by a token. False where it does not fit."""
        self._leave()
        start = time.thread_time()
        fits = self._matcher.consume_token(token_id)
        self._charge(time.thread_time() - start)
        return fits

    def advance(self, token_id: int) -> bool:
        """Go on by a token and keep the mask after it. Python's lock is free meanwhile, for other threads.

        The token's own time is not known here. It is less than that of the mask before it, which tries that token too.
        """
        self._leave()
        own = _thread()
        fits, _ = own.executor.consume_token_par([(self._matcher, token_id), (own.idle, token_id)])
        self.keep_mask()
        return fits

    def keep_mask(self) -> None:
        """Find the ids that may come next, and keep them until a token comes."""
        words = np.empty_like(self._exists)
        self.fill(words)
        self.mask = words

    @property
    def finished(self) -> bool:
        """True where only an end token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """The error: a token that did not fit, or a grammar beyond the limits of one step. None without one."""
        if self._spare < 0:
            return f"it takes more than {1000 * STEP_SECONDS:g} ms a token, and {SPARE_SECONDS:g} s beyond that"
        return problem_of(self._matcher.get_error(), is_schema=False) if self._matcher.is_error() else None

    def fill(self, words: Int32Array) -> None:
        """Write the ids that may come next.

        Args:
            words: [ceil(V/32)] int32; bit i of word w is set where id 32 * w + i may come. None is after an error.
        """
        if self.mask is not None:
            words[:] = self.mask
            return
        if self._spare >= 0:
            start = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self._charge(time.thread_time() - start)
            self._judge()
        self._restrict(words)

    def masks_after(self, token_ids: Sequence[int]) -> Int32Array:
        """The masks after each of these tokens, of which each must fit, [n, ceil(V/32)]; it stays where it stands."""
        ahead = self._matcher.deep_copy()
        words = np.empty((len(token_ids), len(self._exists)), dtype=np.int32)
        for row, token_id in zip(words, token_ids, strict=True):
            start = time.thread_time()
            ahead.consume_token(token_id)
            ahead.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            seconds = time.thread_time() - start
            self._spare -= max(0.0, seconds - STEP_SECONDS)
            self.seconds = max(self.seconds, seconds)
            row &= self._exists
            if ahead.is_error():
                row[:] = 0  # llguidance would let the text end there
        self.slow |= self.seconds > QUICK_SECONDS
        return words

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, may come next one after the other."""
        return self._matcher.validate_tokens(list(token_ids))

    def allowed(self) -> list[int]:
        """The ids that may come next."""
        words = np.empty_like(self._exists)
        self.fill(words)
        ids: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        return ids

    def _leave(self) -> None:
        """Forget the results of the last token."""
        self.mask = None
        self._took = 0.0
        self._faded = _FADING * self.seconds

    def _judge(self) -> None:
        self.seconds = max(self._took, self._faded)
        self.slow = self.seconds > QUICK_SECONDS

    def _charge(self, seconds: float) -> None:
        self._took += seconds
        self._spare -= max(0.0, seconds - STEP_SECONDS)

    def _restrict(self, words: Int32Array) -> None:
        words &= self._exists
        if self._spare < 0 or self._matcher.is_error():
            words[:] = 0  # llguidance would let the text end there


def fill_masks(matchers: Sequence[Matcher], words: Int32Array) -> None:
    """`Matcher.fill` for several at once, in parallel. `words`: [n, ceil(V/32)] int32, C-contiguous.

    Their times cannot be measured together. If they take longer than quick ones would one after the other, all count as
    slow until each was measured alone.
    """
    together = [row for row, matcher in enumerate(matchers) if matcher.mask is None and matcher._spare >= 0]
    if len(together) == 1:
        together = []
    for row in set(range(len(matchers))).difference(together):
        matchers[row].fill(words[row])
    if together:
        start = time.perf_counter()
        rows = [(matchers[row]._matcher, row) for row in together]
        _executor().unsafe_compute_mask_ptr(rows, words.ctypes.data, words.strides[0], len(matchers))
        long = time.perf_counter() - start > QUICK_SECONDS * len(together)
        for row in together:
            matchers[row]._judge()
            matchers[row].slow |= long
            matchers[row]._restrict(words[row])


@functools.cache
def _executor() -> LLExecutor:
    return LLExecutor()


class _ThreadOwn(threading.local):
    """The means of a thread to go on by a token without holding Python's lock.

    llguidance releases that lock only where several matchers go on at once. So an idle one, in error, comes along.
    """

    def __init__(self) -> None:
        self.executor = LLExecutor(num_threads=1)  # its thread is as nice as the one that makes it
        self.idle = LLMatcher(bytes_tokenizer(), "", log_level=0)


@functools.cache
def _thread() -> _ThreadOwn:
    return _ThreadOwn()


class Compiler:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: GrammarVocabulary, encode: Callable[[str], list[int]] | None = None) -> None:
        bits = np.zeros(-(-vocabulary.size // 32) * 32, dtype=np.uint8)
        bits[: vocabulary.size] = [bool(token) for token in vocabulary.tokens[: vocabulary.size]]
        self._exists: Int32Array = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        self._tokenizer = vocabulary.tokenizer(encode or self._encode)

    def start(self, text: str) -> LLMatcher:
        """llguidance's matcher at the beginning of a serialised grammar; it may be in error."""
        return LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)

    def matcher(self, start: LLMatcher) -> Matcher:
        return Matcher(start.deep_copy(), self._exists)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.greedy_tokenize(text)


class Grammars:
    """Compiled grammars for one tokenizer; cheap to make, and safe to share between threads.

    Args:
        vocab_size: width of the logits; ids without token are never allowed.
        eos_token_ids: the tokens that may come where a grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._source = (tokenizer, vocab_size, eos_token_ids)
        self._lock = threading.Lock()
        self._compiler_lock = threading.Lock()  # held for long: a vocabulary is read
        self._compiled: Compiler | None = None
        self._kept: Recent[str, Matcher] = Recent(_KEPT)
        self._kept_long: Recent[str, Matcher] = Recent(_KEPT_LONG)

    def ready(self, text: str) -> Matcher | None:
        """A matcher at the beginning of a grammar that was compiled before and is kept."""
        with self._lock:
            for kept in (self._kept, self._kept_long):
                if text in kept:
                    return kept[text].copy()
        return None

    def matcher(self, text: str) -> Matcher:
        """A matcher at the beginning of a grammar, with its first mask. The grammar should have had its trial before.

        Raises:
            InvalidRequestError: the grammar is not valid.
        """
        matcher = self.ready(text)
        if matcher is not None:
            return matcher
        compiler = self._compiler()
        begun = time.thread_time()
        start = compiler.start(text)
        kept = self._kept if time.thread_time() - begun < _LONG_SECONDS else self._kept_long
        if start.is_error():
            raise InvalidRequestError(problem_of(start.get_error(), is_schema=False))
        matcher = compiler.matcher(start)
        matcher.keep_mask()
        with self._lock:
            kept.put(text, matcher)
        return matcher.copy()

    def _compiler(self) -> Compiler:
        with self._compiler_lock:
            if self._compiled is None:
                encode = functools.partial(self._source[0].encode, add_special_tokens=False)
                self._compiled = Compiler(GrammarVocabulary.read(*self._source), encode)
            return self._compiled
