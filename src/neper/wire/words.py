"""Words of lines: whole numbers, numbers, ids and texts, read strictly and written.

A malformed word raises ValueError, whose message names it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import orjson

LAST_ID = 2**31 - 1
DIGITS = b"0123456789"
NUMBER = DIGITS + b".eE+-"
"""The bytes of numbers."""

LONGEST_NUMBER = 64
"""Most characters of a number. No engine writes as many, and reading them would take long."""


def integer(word: bytes, name: str, *, low: int = 0, high: int = 2**63 - 1) -> int:
    """A whole number in ASCII digits, with a minus sign where `low` allows one."""
    digits = word[1:] if low < 0 and word.startswith(b"-") else word
    if not digits.isdigit() or len(digits) > LONGEST_NUMBER:
        raise ValueError(f"{name} is not a whole number")
    value = int(word)
    if not low <= value <= high:
        raise ValueError(f"{name} is not from {low} to {high}")
    return value


def real(word: bytes, name: str, *, low: float = -math.inf, high: float = math.inf) -> float:
    """A finite number."""
    try:
        value = math.nan if word.translate(None, NUMBER) or len(word) > LONGEST_NUMBER else float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name} is not a number")
    if not low <= value <= high:
        raise ValueError(f"{name} is not from {low} to {high}")
    return value


def id_list(word: bytes, name: str) -> list[int]:
    """Ids with commas between and no leading zeros; at least one."""
    try:
        ids: list[int] = [] if word.translate(None, DIGITS + b",") else orjson.loads(b"[%b]" % word)
    except orjson.JSONDecodeError:
        ids = []
    if not ids or max(ids) > LAST_ID:
        raise ValueError(f"{name} is not ids from 0 to {LAST_ID}, with commas between")
    return ids


def utf8(word: bytes, name: str) -> str:
    try:
        return word.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not UTF-8") from None


def pop_tag(words: list[bytes]) -> str:
    """Take the request's name, ` #name`, off the end of an answer."""
    if len(words) < 2 or len(words[-1]) < 2 or not words[-1].startswith(b"#"):
        raise ValueError("it names no request")
    return utf8(words.pop()[1:], "the request's name")


def joined(words: list[bytes]) -> str:
    """The text after a line's first word, each run of white space a space."""
    return b" ".join(words[1:]).decode("utf-8", "replace")


def ending(tag: str | None) -> bytes:
    """The end of an answer, with its line feed."""
    return b"\n" if tag is None else b" #%b\n" % tag.encode()


def spaced(text: str) -> bytes:
    """The text on one line."""
    return " ".join(text.split()).encode("utf-8", "replace")


def comma_list(ids: Sequence[int]) -> str:
    """The ids in the form that `id_list` reads."""
    return ",".join(map(str, ids))
