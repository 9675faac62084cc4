"""The JSON of replies, encoded from the structs that describe them, around JSON that is ready."""

from __future__ import annotations

from typing import Any

import msgspec

encode = msgspec.json.Encoder().encode

_MARK = b"\0"  # JSON has no such byte
HOLE: Any = msgspec.Raw(_MARK)
"""Stands in a struct for JSON that comes later."""


def ready(json: bytes) -> Any:
    """JSON that is ready, for a field of any type."""
    return msgspec.Raw(json)


def around(value: msgspec.Struct) -> tuple[bytes, bytes]:
    """The JSON before and after the one hole in a struct."""
    before, after = encode(value).split(_MARK)
    return before, after


def template(value: msgspec.Struct) -> bytes:
    """The JSON of a struct as a format: `%b` stands for each hole."""
    return encode(value).replace(b"%", b"%%").replace(_MARK, b"%b")
