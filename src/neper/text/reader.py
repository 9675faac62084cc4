"""A reader of text that arrives token by token. Its methods read on, and wait for more text.

They are generators that yield while there is not enough text. So a grammar is written as if the whole text were there:
`name = yield from reader.string()`. Each character is read once, so reading is linear in the text.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, TypeVar

from neper.text.token_text import Field, TokenText

SPACES = " \t\r\n"

Result = TypeVar("Result")
Reading = Generator[None, None, Result]


class Range(NamedTuple):
    start: int
    end: int


class Reader(TokenText):
    """Attributes:
    at: the next place to read.
    final: no more text comes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at = 0
        self.final = False

    def peek(self) -> Reading[str]:
        """The next character, without taking it; "" at the end of the text."""
        while self.at == self.length and not self.final:
            yield
        return self.text(self.at, self.at + 1)

    def literal(self, expected: str) -> Reading[bool]:
        """Take `expected` if it stands here."""
        while True:
            there = self.text(self.at, self.at + len(expected))
            if there == expected:
                self.at += len(expected)
                return True
            if self.final or not expected.startswith(there):
                return False
            yield

    def skip(self, characters: str = SPACES) -> Reading[None]:
        """Take characters while they are among these."""
        while (next_one := (yield from self.peek())) and next_one in characters:
            self.at += 1

    def string(self) -> Reading[Range | None]:
        """Take a JSON string. Returns the place of the text between its quotes, or None where there is no string."""
        if not (yield from self.literal('"')):
            return None
        start, escaped = self.at, False
        while character := (yield from self.peek()):
            self.at += 1
            if character == '"' and not escaped:
                return Range(start, self.at - 1)
            escaped = character == "\\" and not escaped
        return None

    def brackets(self, depth: int = 0, *, call: int | None = None) -> Reading[bool]:
        """Read on to the end of the JSON object that begins here, or in which this place is at `depth`.

        False where the text ends before. The text belongs to the arguments of `call`.
        """
        string = escaped = False
        while True:
            for character in self.text(self.at):
                self.at += 1
                if string:
                    string = character != '"' or escaped
                    escaped = character == "\\" and not escaped
                elif character == '"':
                    string = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                    if depth == 0:
                        if call is not None:
                            self.decide("arguments", call, self.at)
                        return True
            if call is not None:
                self.decide("arguments", call, self.at)
            if self.final:
                return False
            yield

    def until(self, tag: str, field: Field, spaces: str) -> Reading[bool]:
        """Read on to `tag`. False where it does not come.

        The text before it belongs to `field`, except `spaces` directly before the tag, which stay undecided.
        """
        while True:
            # Undecided text before this is space, and not part of a tag.
            start = max(self.decided, self.at - len(tag) + 1)
            text = self.text(start)
            place = text.find(tag)
            if self.final and place < 0:
                self.at = self.length
                self.decide(field, -1, self.at)
                return False
            known = text[: place if place >= 0 else len(text) - _num_begun(text, tag)].rstrip(spaces)
            if known:
                self.decide(field, -1, start + len(known))
            if place >= 0:
                self.at = start + place
                return True
            self.at = self.length
            yield


def _num_begun(text: str, tag: str) -> int:
    """The length of the end of `text` that could begin `tag`."""
    if tag[0] not in text[1 - len(tag) :]:
        return 0
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
