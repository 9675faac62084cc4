"""Grammars at work: compiled for a tokenizer, and which ids they let come next."""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from neper.errors import InvalidRequestError
from neper.text.grammar import MAX_CHARACTERS
from neper.text.tokenizer import Tokenizer
from neper.text.trial import Trial
from neper.types import Int32Array

# The default for a step refuses lists of words over a vocabulary of 150,000; this is up to 150 ms of one thread's work.
LIMITS = LLParserLimits(step_max_items=150_000, verbose_errors=False)


class Matcher:
    """How far a text has followed its grammar.

    Args:
        matcher: llguidance's, at the beginning.
        exists: [ceil(V/32)] int32, the ids that have a token.
    """

    def __init__(self, matcher: LLMatcher, exists: Int32Array) -> None:
        self._matcher = matcher
        self._exists = exists

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False where it does not fit."""
        return self._matcher.consume_token(token_id)

    @property
    def finished(self) -> bool:
        """Nothing but an end token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """What went wrong: a token that did not fit, or a grammar that outgrew the limits of one step."""
        return _reason(self._matcher.get_error()) if self._matcher.is_error() else None

    def fill(self, words: Int32Array) -> None:
        """Write which ids may come next.

        Args:
            words: [ceil(V/32)] int32; bit i of word w is set where id 32 * w + i may come. None is after an error.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._restrict(words)

    def _restrict(self, words: Int32Array) -> None:
        words &= self._exists
        if self._matcher.is_error():
            words[:] = 0  # llguidance would let the text end there


def fill_masks(matchers: Sequence[Matcher], words: Int32Array) -> None:
    """`Matcher.fill` for several at once, in parallel. `words`: [n, ceil(V/32)] int32, C-contiguous."""
    if len(matchers) == 1:
        matchers[0].fill(words[0])
        return
    rows = [(matcher._matcher, row) for row, matcher in enumerate(matchers)]
    _executor().unsafe_compute_mask_ptr(rows, words.ctypes.data, words.strides[0], len(rows))
    for matcher, row in zip(matchers, words, strict=True):
        matcher._restrict(row)


@functools.cache
def _executor() -> LLExecutor:
    return LLExecutor()


class Grammars:
    """Compiles grammars for one tokenizer; cheap to make, and safe to share between threads.

    Args:
        vocab_size: width of the logits; ids without token are never allowed.
        eos_token_ids: the tokens that may come where a grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._control = sorted(token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size)
        self._lock = threading.Lock()
        self._compiled: tuple[LLTokenizer, Int32Array] | None = None
        self._trial = Trial(vocab_size, {token_id: tokenizer.token_text(token_id) for token_id in self._control})

    def check(self, text: str, param: str) -> None:
        """Try a grammar that a stranger wrote: compile it, in a process of its own first, and take its first step.

        Raises:
            InvalidRequestError: it is not valid, too large, or takes too long; the error names `param`.
        """
        if len(text) > MAX_CHARACTERS:
            problem: str | None = f"it has {len(text)} characters, more than {MAX_CHARACTERS}"
        else:
            problem = self._trial.run(text)
            if problem is None and (problem := self._problem(text)) is not None:
                problem = self._culprit(text) or problem
        if problem is not None:
            raise InvalidRequestError(f"{param} cannot be compiled to a grammar: {problem}", param=param)

    def matcher(self, text: str) -> Matcher:
        """A matcher at the beginning of a grammar, which should have been checked.

        Raises:
            InvalidRequestError: the grammar is not valid.
        """
        tokenizer, exists = self._vocabulary()
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequestError(_reason(matcher.get_error()))
        return Matcher(matcher, exists)

    def _problem(self, text: str) -> str | None:
        """Why a grammar cannot be compiled, or not take its first step."""
        try:
            matcher = self.matcher(text)
        except InvalidRequestError as error:
            return error.message
        matcher.fill(np.empty(-(-self._vocab_size // 32), dtype=np.int32))
        return matcher.error

    def _culprit(self, text: str) -> str | None:
        """Which of several schemas is not valid, and why."""
        schemas = [grammar for grammar in json.loads(text)["grammars"] if "json_schema" in grammar]
        if len(schemas) > 1:
            for schema in schemas:
                problem = self._problem(json.dumps({"grammars": [schema]}))
                if problem is not None:
                    return f"{schema['name']}: {problem}"
        return None

    def _vocabulary(self) -> tuple[LLTokenizer, Int32Array]:
        """The vocabulary as llguidance wants it, made at the first use, and the mask of its ids."""
        with self._lock:
            if self._compiled is None:
                tokens = [self._source.token_bytes(token_id) for token_id in range(self._vocab_size)]
                bits = np.zeros(-(-len(tokens) // 32) * 32, dtype=np.uint8)
                bits[: len(tokens)] = [bool(token) for token in tokens]
                exists: Int32Array = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
                ends = self._eos_token_ids
                if not ends:  # then it is one beyond the logits
                    ends = [len(tokens)]
                    tokens.append(b"<end>")
                encode = functools.partial(self._source.encode, add_special_tokens=False)
                self._compiled = _compile(tokens, self._control, ends, encode), exists
            return self._compiled


def bytes_tokenizer(vocab_size: int, control_tokens: Mapping[int, str]) -> LLTokenizer:
    """A vocabulary of single bytes behind control tokens: whether a grammar can be compiled depends on no more."""
    tokens = [control_tokens.get(token_id, "").encode() for token_id in range(vocab_size)]
    tokens += [bytes([byte]) for byte in range(256)]
    return _compile([*tokens, b"<end>"], sorted(control_tokens), [len(tokens)], lambda text: list(text.encode()))


def _compile(
    tokens: list[bytes], control: list[int], ends: list[int], encode: Callable[[str], list[int]]
) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, control, ends[0], encode)), eos_token=ends)


class _Vocabulary:
    """A vocabulary as llguidance reads it."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], control: list[int], end: int, encode: Callable[[str], list[int]]) -> None:
        self.tokens = tokens
        self.special_token_ids = control
        self.eos_token_id = end
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _reason(message: str) -> str:
    """llguidance's message on one line, without the picture of where it was."""
    return re.sub(r"\s+", " ", message.split("<state>")[0])[:400].strip()
