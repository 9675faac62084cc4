"""The vocabulary that grammars are compiled for, in the form that llguidance takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper

from neper.text.tokenizer import Tokenizer


class GrammarVocabulary(msgspec.Struct, frozen=True):
    """The vocabulary and limits that grammars are compiled for.

    Attributes:
        size: width of the logits. Ids beyond it are never allowed.
        tokens: each id's bytes; empty for an id without token.
        control: the ids that are control tokens.
        ends: the ids that may come where a grammar may end; at least one.
    """

    size: int
    tokens: list[bytes]
    control: list[int]
    ends: list[int]

    @classmethod
    def read(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarVocabulary:
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        control = sorted(token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size)
        ends = list(eos_token_ids)
        if not ends:  # then it is one beyond the logits
            ends = [len(tokens)]
            tokens.append(b"<end>")
        return cls(vocab_size, tokens, control, ends)

    def tokenizer(self, encode: Callable[[str], list[int]]) -> LLTokenizer:
        """llguidance's tokenizer over it; `encode` gives the ids of a text."""
        return LLTokenizer(TokenizerWrapper(_Wrapped(self, encode)), eos_token=self.ends)


@functools.cache
def bytes_tokenizer() -> LLTokenizer:
    """A vocabulary of single bytes."""
    tokens = [bytes([byte]) for byte in range(256)]
    return GrammarVocabulary(257, [*tokens, b"<end>"], [], [256]).tokenizer(lambda text: list(text.encode()))


class _Wrapped:
    """A vocabulary under the names by which llguidance reads it."""

    bos_token_id = None

    def __init__(self, vocabulary: GrammarVocabulary, encode: Callable[[str], list[int]]) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.control
        self.eos_token_id = vocabulary.ends[0]
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)
