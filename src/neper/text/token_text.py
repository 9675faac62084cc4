"""Token text: tokens laid over the text that they spell, and given back cut to the stretches that belong to fields.

The reader of the text assigns each stretch of it, from the beginning to the end, to a field or to none. A token is
given back once all of its text is assigned, as one piece for each field that it has a part in. The piece has the
token's text and bytes, cut to that part.

    tokens      "Hi"     " <tool"   "_call>{"   ...   "f"       '",'  ...
    stretches   content  none .....................   name, 0   none
    pieces      "Hi"                                  "f"
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Literal, NamedTuple

from neper.text.detokenizer import TextToken
from neper.text.tokenizer import split_text

Field = Literal["content", "reasoning", "name", "arguments"]


class FieldPiece(NamedTuple):
    """The part of a token in one field.

    Attributes:
        call: number of the tool call, from 0; -1 where the field is not a call's.
        token: the token, its text and data cut to the field.
    """

    field: Field
    call: int
    token: TextToken


class _Stretch(NamedTuple):
    start: int
    end: int
    field: Field
    call: int


class _Laid(NamedTuple):
    """A token in its place: `start` to `end` of the text, and `until`, the end of the text that it has a part in.

    That is one character more if its last bytes begin one. A token that spells nothing (a first space that was
    dropped) goes with the text after it.
    """

    token: TextToken
    start: int
    end: int
    until: int


class TokenText:
    """The text of tokens that are not given back yet. Places are characters from the beginning of all text.

    Attributes:
        length: the length of all text so far.
        decided: the place up to which the fields of the text are known.
        settled: the number of tokens that were given back, in pieces or without one.
    """

    def __init__(self) -> None:
        self.length = 0
        self.decided = 0
        self.settled = 0
        self._text = ""
        self._base = 0
        self._tokens: deque[_Laid] = deque()
        self._stretches: deque[_Stretch] = deque()
        self._together: list[tuple[int, int]] = []

    @property
    def num_waiting(self) -> int:
        """Tokens that were added and not given back."""
        return len(self._tokens)

    def add(self, token: TextToken) -> None:
        start = self.length
        text = token.text
        self.length = end = start + len(text)
        self._text += text
        until = end
        if token.visible and not token.data and not text:
            until += 1
        elif token.visible and (token.held or not text.isascii() or len(text) != len(token.data)):
            spelled, rest = split_text(token.held + token.data)
            # If they differ, this is the end of all text, where an unfinished character became U+FFFD.
            until = end + (spelled == text and rest != b"")
        self._tokens.append(_Laid(token, start, end, until))

    def text(self, start: int, end: int | None = None) -> str:
        """The text from `start` on. It must not begin before `decided`."""
        return self._text[start - self._base : None if end is None else end - self._base]

    def decide(self, field: Field, call: int, end: int) -> None:
        """Assign the text up to `end` to a field."""
        start, stretches = self.decided, self._stretches
        if end <= start:
            return
        if stretches and stretches[-1][1:] == (start, field, call):
            start = stretches.pop().start
        stretches.append(_Stretch(start, end, field, call))
        self.decided = end

    def drop(self, end: int) -> None:
        """Assign the text up to `end` to no field."""
        self.decided = max(self.decided, end)

    def keep_together(self, start: int, end: int) -> None:
        """Give back the text between all at once, a call's name before its arguments."""
        self._together.append((start, end))

    def release(self, *, final: bool = False) -> list[FieldPiece]:
        """Give back the tokens whose text is decided; with `final`, where no text follows, all of them."""
        tokens, stretches = self._tokens, self._stretches
        pieces: list[FieldPiece] = []
        count = len(tokens) if final else self._num_whole()
        for _ in range(count):
            laid = tokens.popleft()
            while stretches and stretches[0].end <= laid.start:
                stretches.popleft()
            if laid.until == laid.start:
                continue
            for stretch in stretches:
                if stretch.start >= laid.until:
                    break
                piece = FieldPiece(stretch.field, stretch.call, _cut(laid, stretch))
                if pieces and _same_place(pieces[-1], piece):
                    piece = _joined(pieces.pop(), piece)
                pieces.append(piece)
        self.settled += count
        if self._together and count:
            reached = tokens[0].start if tokens else self.length
            self._together = [group for group in self._together if group[1] > reached]
            # Stable, and a call's pieces stand next to each other: this moves names alone.
            pieces = _names_first(pieces)
        if self.decided > self._base:
            self._text = self._text[self.decided - self._base :]
            self._base = self.decided
        return pieces

    def _num_whole(self) -> int:
        """The number of tokens whose text is decided, without separating text that is kept together."""
        tokens = self._tokens
        count = 0
        for laid in tokens:
            if laid.until > self.decided:
                break
            count += 1
        for start, end in reversed(self._together):
            reached = tokens[count].start if count < len(tokens) else self.length
            if start < reached < end:
                count = next(place for place, laid in enumerate(islice(tokens, count + 1)) if laid.until > start)
        return count


def _same_place(piece: FieldPiece, other: FieldPiece) -> bool:
    return (piece.token.index, piece.field, piece.call) == (other.token.index, other.field, other.call)


def _joined(piece: FieldPiece, other: FieldPiece) -> FieldPiece:
    """The join of two parts of a token in one field, with text between them that is in none."""
    first, second = piece.token, other.token
    return piece._replace(token=first._replace(text=first.text + second.text, data=first.data + second.data))


def _names_first(pieces: list[FieldPiece]) -> list[FieldPiece]:
    ordered: list[FieldPiece] = []
    for piece in pieces:
        place = len(ordered)
        if piece.field == "name":
            while place and ordered[place - 1].field == "arguments" and ordered[place - 1].call == piece.call:
                place -= 1
        ordered.insert(place, piece)
    return ordered


def _cut(laid: _Laid, stretch: _Stretch) -> TextToken:
    token = laid.token
    if stretch.start <= laid.start and stretch.end >= laid.until:
        return token
    first, last = max(stretch.start - laid.start, 0), stretch.end - laid.start
    begin = _num_bytes(token, first)
    end = len(token.data) if stretch.end >= laid.until else _num_bytes(token, last)
    return token._replace(text=token.text[first:last], data=token.data[begin:end])


def _num_bytes(token: TextToken, count: int) -> int:
    """The number of a token's bytes that spell its first `count` characters.

    On one side of a cut is an ASCII character, so no character has bytes on both sides.
    """
    if count <= 0:
        return 0
    return next(
        length
        for length in range(len(token.data), -1, -1)
        if (token.held + token.data[:length]).decode("utf-8", "replace") == token.text[:count]
    )
