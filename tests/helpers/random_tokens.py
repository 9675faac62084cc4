"""Texts cut into tokens at any byte, as no tokenizer but every model might: each slice is an id of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from neper.text.detokenizer import Detokenizer, TextToken
from neper.text.message import MessageParser
from neper.text.tokenizer import TokenPiece, split_text


class SlicedTokenizer:
    """What a Detokenizer asks of a tokenizer, over the given tokens' bytes; those in `special` are special."""

    strips_leading_space = False

    def __init__(self, tokens: Sequence[bytes], special: Sequence[bytes] = ()) -> None:
        self.pieces = {place: TokenPiece(data, *split_text(data)) for place, data in enumerate(tokens)}
        self.special_token_ids = frozenset(place for place, data in enumerate(tokens) if data in special)


def text_tokens(tokens: Sequence[bytes], *, special: Sequence[bytes] = (), **options: Any) -> list[TextToken]:
    """The tokens as a Detokenizer gives them back."""
    detokenizer = Detokenizer(SlicedTokenizer(tokens, special), **options)  # type: ignore[arg-type]
    return detokenizer.step(range(len(tokens))) + detokenizer.flush()


def slices(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """Cuts at the same place have a token without bytes between them."""
    places = sorted([0, len(data), *(cut for cut in cuts if cut < len(data))])
    return [data[start:end] for start, end in pairwise(places)]


class Fields(NamedTuple):
    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()


class Spelled(NamedTuple):
    """What a parser made of tokens: the fields by their texts, by their bytes, and every piece that it gave."""

    fields: Fields
    by_bytes: Fields
    pieces: list[tuple[str, int, TextToken]]


def parse(parser: MessageParser, tokens: Sequence[TextToken], group: int = 1) -> Spelled:
    """Feeds tokens `group` at a time."""
    pieces = []
    for start in range(0, len(tokens), group):
        pieces += parser.step(tokens[start : start + group])
        assert parser.settled <= min(start + group, len(tokens))
    pieces += parser.flush()
    texts: dict[tuple[str, int], list[str]] = {}
    data: dict[tuple[str, int], list[bytes]] = {}
    for field, call, token in pieces:
        assert token.visible
        texts.setdefault((field, call), []).append(token.text)
        data.setdefault((field, call), []).append(token.data)
    joined = {key: "".join(parts) for key, parts in texts.items()}
    decoded = {key: b"".join(parts).decode("utf-8", "replace") for key, parts in data.items()}
    return Spelled(_fields(joined), _fields(decoded), [(piece.field, piece.call, piece.token) for piece in pieces])


def _fields(found: dict[tuple[str, int], str]) -> Fields:
    numbers = sorted({call for _, call in found if call >= 0})
    assert numbers == list(range(len(numbers)))
    calls = tuple((found["name", call], found.get(("arguments", call), "")) for call in numbers)
    return Fields(found.get(("reasoning", -1), ""), found.get(("content", -1), ""), calls)
