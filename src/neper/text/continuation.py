"""Continuations at a border of tokens: texts as the ids that spell them after other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from neper.text.tokenizer import Tokenizer

_BEFORE = ("", "\n")
"""Texts that a continuation is encoded after: after a line end, no tokenizer puts a space before a word."""


def encode_continuations(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]] | None:
    """The tokenizer's own ids of texts, whose bytes are exactly the texts'; None where one has none.

    Tokenizers of the SentencePiece kind put a space before a text of its own, which no continuation has. Control
    tokens that a text spells are text.
    """
    for before in _BEFORE:
        found = []
        for text, ids in zip(texts, tokenizer.encode_after(before, texts, special_tokens=False), strict=True):
            own = _last(tokenizer, ids, text.encode())
            if own is None:
                break
            found.append(own)
        else:
            return found
    return None


def _last(tokenizer: Tokenizer, ids: list[int], data: bytes) -> list[int] | None:
    """The last of the ids, which spell `data`; None where no last ones do."""
    lengths = accumulate((len(tokenizer.token_bytes(token_id)) for token_id in reversed(ids)), initial=0)
    count = next((count for count, length in enumerate(lengths) if length >= len(data)), 0)
    last = ids[len(ids) - count :]
    return last if b"".join(map(tokenizer.token_bytes, last)) == data else None
