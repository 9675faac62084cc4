"""The values in a JSON text: the bytes of each, and its JSON Pointer (RFC 6901)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

LONGEST_POINTER = 1000
"""Characters of a pointer. Longer ones, of values deep inside others or under long names, could fill a reply."""

_SPACES = re.compile(rb"[ \t\r\n]*")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PLAIN = re.compile(rb"[-+.0-9A-Za-z]+")
_WORDS = (b"true", b"false", b"null")


@dataclass(slots=True)
class JsonValue:
    """A value in a text.

    Attributes:
        pointer: "" for the whole text's, "/name/0" for one inside it.
        key: its name in an object, or its place in a list; "" for the whole text's.
        parent: place of the value around it among all values; -1 for the whole text's.
        start, end: its bytes in the text, from the first to the one after the last.
        complete: the text has all of it. Otherwise `end` is where the text ends, or stops being JSON.
    """

    pointer: str
    key: str | int
    parent: int
    start: int
    end: int = 0
    complete: bool = False


@dataclass(slots=True)
class _Open:
    """A list or an object whose end has not come.

    Attributes:
        place: its own among the values; -1 where it is not listed.
        size: members that have begun.
        name, first: of the member that is being read in an object, and the place of its first value.
        names: the places of the values under each complete member's name.
    """

    place: int
    is_object: bool
    size: int = 0
    name: str = ""
    first: int = 0
    names: dict[str, tuple[int, int]] = field(default_factory=dict)


def json_values(text: bytes, *, whole: bool) -> list[JsonValue]:
    """The values of a JSON text in the order in which they begin, as far as it is JSON.

    A name that an object has twice counts once, with its last value. Values are left out where their pointer has more
    than LONGEST_POINTER characters. The work is linear in the text.

    Args:
        text: JSON, which may be cut off. Bytes that are not UTF-8 are taken in strings.
        whole: the text was not cut off, so a number at its end is complete.
    """
    return _Scanner(text, whole).read()


class _End(Exception):
    """The text ends here, or goes on with something that is not JSON."""


class _Scanner:
    """One text being read."""

    def __init__(self, text: bytes, whole: bool) -> None:
        self._text = text
        self._whole = whole
        self._at = 0
        self._values: list[JsonValue | None] = []  # None where a name came again
        self._open: list[_Open] = []

    def read(self) -> list[JsonValue]:
        try:
            self._begin("", "", -1)
            while self._open:
                self._next(self._open[-1])
        except _End:
            for around in self._open:
                self._finish(around.place, complete=False)
        kept = [value for value in self._values if value is not None]
        if len(kept) < len(self._values):
            self._renumber(kept)
        return kept

    def _next(self, around: _Open) -> None:
        """Read the next member of a list or an object, or its end."""
        if self._peek() == (b"}" if around.is_object else b"]"):
            self._at += 1
            self._finish(around.place, complete=True)
            self._open.pop()
            self._leave_member()
            return
        if around.size:
            self._take(b",")
        key: str | int = around.size
        around.size += 1
        if around.is_object:
            key = self._name()
            self._take(b":")
            first, last = around.names.pop(key, (0, 0))
            self._values[first:last] = [None] * (last - first)
            around.name, around.first = key, len(self._values)
        above = self._values[around.place] if around.place >= 0 else None
        self._begin(None if above is None else f"{above.pointer}/{_escaped(key)}", key, around.place)

    def _begin(self, pointer: str | None, key: str | int, parent: int) -> None:
        """Read a value, or the opening of a list or an object. Without a pointer it is not listed."""
        first = self._peek()
        opens = first in (b"{", b"[")
        found = None if opens else (_STRING if first == b'"' else _PLAIN).match(self._text, self._at)
        if not opens and first != b'"' and found is None:
            raise _End
        place = -1
        if pointer is not None and len(pointer) <= LONGEST_POINTER:
            place = len(self._values)
            self._values.append(JsonValue(pointer, key, parent, self._at))
        if opens:
            self._at += 1
            self._open.append(_Open(place, first == b"{"))
            return
        self._at = len(self._text) if found is None else found.end()
        complete = found is not None and (first == b'"' or self._is_plain(found))
        self._finish(place, complete=complete)
        if not complete:
            raise _End
        self._leave_member()

    def _is_plain(self, found: re.Match[bytes]) -> bool:
        """True for a whole number, or one of the words."""
        ended = self._whole or found.end() < len(self._text)
        return found[0] in _WORDS or (ended and _NUMBER.fullmatch(found[0]) is not None)

    def _leave_member(self) -> None:
        """Note the values of a member that is complete."""
        if self._open and (around := self._open[-1]).is_object:
            around.names[around.name] = (around.first, len(self._values))

    def _name(self) -> str:
        self._peek()
        found = _STRING.match(self._text, self._at)
        if found is None:
            self._at = len(self._text) if self._text.startswith(b'"', self._at) else self._at
            raise _End
        try:
            name = json.loads(found[0].decode("utf-8", "replace"), strict=False)
        except ValueError:
            raise _End from None
        self._at = found.end()
        return str(name).encode("utf-8", "replace").decode()  # half a surrogate has no bytes

    def _finish(self, place: int, *, complete: bool) -> None:
        if place >= 0 and (value := self._values[place]) is not None:
            value.end, value.complete = self._at, complete

    def _peek(self) -> bytes:
        """The next byte that is no space. Reading goes on there."""
        found = _SPACES.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        if self._at == len(self._text):
            raise _End
        return self._text[self._at : self._at + 1]

    def _take(self, expected: bytes) -> None:
        if self._peek() != expected:
            raise _End
        self._at += 1

    def _renumber(self, kept: list[JsonValue]) -> None:
        """Make parents places among the values that were kept."""
        numbers = iter(range(len(kept)))
        places = [-1 if value is None else next(numbers) for value in self._values]
        for value in kept:
            value.parent = -1 if value.parent < 0 else places[value.parent]


def _escaped(key: str | int) -> str:
    return str(key) if isinstance(key, int) else key.replace("~", "~0").replace("/", "~1")
