"""A reader of text that arrives token by token: methods that read on, and wait where the text does.

They are generators that yield while there is not enough text, so a grammar is written as if all of it were there:
`name = yield from reader.string()`. Each takes a character up once, so reading is linear in the text.
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
    at: the place that is read next.
    final: no more text comes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at = 0
        self.final = False

    def peek(self) -> Reading[str]:
        """The next character, which is not taken; "" at the end of the text."""
        while self.at == self.length and not self.final:
            yield
        return self.text(self.at, self.at + 1)

    def literal(self, expected: str) -> Reading[bool]:
        """Takes `expected` where it stands here; else nothing."""
        while True:
            there = self.text(self.at, self.at + len(expected))
            if there == expected:
                self.at += len(expected)
                return True
            if self.final or not expected.startswith(there):
                return False
            yield

    def skip(self, characters: str = SPACES) -> Reading[None]:
        """Takes the characters that are among those."""
        while (next_one := (yield from self.peek())) and next_one in characters:
            self.at += 1

    def string(self) -> Reading[Range | None]:
        """Takes a JSON string; where what is between its quotes stands, or None where there is none."""
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
        """Reads on to the end of the JSON object that begins here, or inside which this is, at `depth`; False where
        the text ends before. It belongs to the arguments of `call` as it comes.
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
        """Reads on to `tag`; False where it does not come. What is before it belongs to `field`, but for `spaces`
        right before the tag, which stay undecided.
        """
        while True:
            # What is undecided before this is space, and has no part in a tag.
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
    """Length of the end of `text` that `tag` could begin with."""
    if tag[0] not in text[1 - len(tag) :]:
        return 0
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
