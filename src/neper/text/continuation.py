"""Continuations: texts as the ids that spell them after other text."""

from __future__ import annotations

from itertools import accumulate

from neper.text.tokenizer import Tokenizer

_PREFIXES = ("", "\n")
"""Texts to encode before a continuation: after a line end, no tokenizer puts a space before a word."""


def encode_continuation(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """The tokenizer's own ids of a text, whose bytes are exactly the text's; None where it has none.

    Tokenizers of the SentencePiece kind put a space before a text of its own, which no continuation has.
    """
    data = text.encode()
    for prefix in _PREFIXES:
        ids = tokenizer.encode(prefix + text, add_special_tokens=False)
        lengths = accumulate((len(tokenizer.token_bytes(token_id)) for token_id in reversed(ids)), initial=0)
        count = next((count for count, length in enumerate(lengths) if length >= len(data)), 0)
        own = ids[len(ids) - count :]
        if b"".join(map(tokenizer.token_bytes, own)) == data and not tokenizer.special_token_ids.intersection(own):
            return own
    return None
