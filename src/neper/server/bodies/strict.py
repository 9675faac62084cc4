"""Strict decoding of request bodies: unknown fields, wrong types and broken JSON are errors that name the field.

A decoder holds the GIL until it is done, and with it the event loop, in any thread. So the amount of work is counted in
the text first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, TypeVar

import msgspec
import orjson
from msgspec import Meta

from neper.errors import InvalidRequestError, RequestTooLargeError, UnsupportedError
from neper.server.bodies.other_names import advice

Kind = TypeVar("Kind", bound="Strict")
Body = TypeVar("Body", bound="RequestBody")

# The name of a function or a schema, with OpenAI's bounds. `$` alone would let a newline follow.
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]


@dataclass(frozen=True, eq=False)  # types that are equal are one, and False is equal to 0
class Only:
    """Annotates a field that is known but not implemented: it takes only null, and one value where there is one.

    The value asks for the behaviour that this server has anyway.
    """

    value: Any = None


Refused = Annotated[Any, Only()]


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object without unknown fields, except those that are null: null equals absent."""

    def check_unsupported(self, param: str | None = None) -> None:
        """Check the fields that an `Only` annotates. Raises UnsupportedError for another value than it takes."""
        for name, value in only_values(type(self)).items():
            given = getattr(self, name)
            # 0 is no false here, and 1 no true; but 1.0 is 1.
            if given is not None and (given != value or isinstance(given, bool) != isinstance(value, bool)):
                shown = "" if value is None else f", only {msgspec.json.encode(value).decode()}"
                raise UnsupportedError(f"{name} is not supported by this server{shown}", param=param or name)


@functools.cache
def only_values(kind: type[Strict]) -> dict[str, Any]:
    """The fields that an `Only` annotates, with its value. Fields without a value come first."""
    found = {}
    for field in msgspec.structs.fields(kind):
        for mark in getattr(field.type, "__metadata__", ()):
            if isinstance(mark, Only):
                found[field.name] = mark.value
    return dict(sorted(found.items(), key=lambda item: item[1] is not None))


class RequestBody(Strict):
    """The body of a request."""

    def check(self) -> None:
        """Refuse bodies that the types allow, but that are wrong all the same."""


MAX_DEPTH = 100
"""Most lists and objects inside each other."""

MAX_STRINGS = 2**18
MAX_COST = 30_000_000
"""Most nanoseconds of decoding, by the costs below."""

# Most nanoseconds that msgspec takes for each of these, with freeing and collecting memory (on a Xeon of 2023).
_COSTS = {b",": 25, b":": 60, b"[": 400, b"{": 400, b".": 100, b"e": 700, b"E": 700}
_STRING_COST = 40
_ESCAPE = b"\\"
_ESCAPE_COSTS = {_ESCAPE: 15, b"\\u": 45}
_PART_BYTES = 2**18  # a few milliseconds at most
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_NAMED = re.compile(r"(?:unknown|missing required) field `([^`]*)`")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`(?: - at `\$\.?([^`]*)`)?$")
_STEP = re.compile(r"[^.\[\]]+")
_MOST_NULLS = 64
_TRIED_BYTES = 16 * 2**20


def decode_body(data: bytes, kind: type[Body]) -> Body:
    """The body as a `kind`, decoded and checked.

    Raises InvalidRequestError that names the field, and RequestTooLargeError where decoding would take too long.
    """
    _check_size(data)
    body = decode(data, kind)
    body.check()
    return body


def decode(data: bytes, kind: type[Kind]) -> Kind:
    """A part of a body, as a `kind`. The body's size was checked before."""
    try:
        try:
            value: Kind = _decoder(kind).decode(data)
        except msgspec.ValidationError as error:
            if _UNKNOWN.search(str(error)) is None:
                raise
            tries = min(_MOST_NULLS, 1 + _TRIED_BYTES // len(data))
            value = _without_unknown_nulls(_ANYTHING.decode(data), kind, tries)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    for name in _free_fields(kind):
        _check_free(getattr(value, name), name)
    return value


def _check_size(data: bytes) -> None:
    """Check the time to decode. Each step is one pass in C over a part of the text. Other threads run in between."""
    counts = dict.fromkeys(_COSTS, 0)
    escapes = dict.fromkeys(_ESCAPE_COSTS, 0)
    quotes, brackets = 0, b""
    for part, here, outside in _outside_strings(data):
        for sign in escapes:
            escapes[sign] += part.count(sign)
        quotes += here
        for sign in _COSTS:
            counts[sign] += outside.count(sign)
        counts[b"e"] -= outside.count(b"true") + outside.count(b"false")
        brackets += outside.translate(None, _NOT_BRACKETS)
    cost = _STRING_COST * (quotes // 2)
    cost += sum(count * _COSTS[sign] for sign, count in counts.items())
    cost += sum(count * _ESCAPE_COSTS[sign] for sign, count in escapes.items())
    if cost > MAX_COST:
        raise RequestTooLargeError(
            f"the body has {counts[b','] + 1} values, {counts[b'['] + counts[b'{']} lists and objects among them, and "
            f"{escapes[_ESCAPE]} escapes: more than this server reads at once"
        )
    if max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise InvalidRequestError(f"the body is nested more than {MAX_DEPTH} deep")


def _outside_strings(data: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Each part of the text, its number of quotes, and its text outside of strings."""
    quotes = start = 0
    while start < len(data):
        part = data[start : start + _PART_BYTES]
        start += len(part)
        # A backslash belongs to the next character.
        if (len(part) - len(part.rstrip(b"\\"))) % 2 and start < len(data):
            part = part[:-1]
            start -= 1
        # Without escaped quotes, every other piece between quotes is outside of strings.
        plain = part.replace(b"\\\\", b"").replace(b'\\"', b"") if _ESCAPE in part else part
        here = plain.count(b'"')
        if (quotes + here) // 2 > MAX_STRINGS:
            raise RequestTooLargeError(f"the body has more than {MAX_STRINGS} strings")
        yield part, here, b"".join(plain.split(b'"')[quotes % 2 :: 2])
        quotes += here


@functools.cache
def _decoder(kind: type[Kind]) -> msgspec.json.Decoder[Kind]:
    return msgspec.json.Decoder(kind, float_hook=_finite)


def _finite(text: str) -> float:
    """A number of a free-form field. msgspec's own reader takes 14 us for one such as 1e300."""
    value = float(text)
    if value - value != 0.0:
        raise ValueError("Number out of range")
    return value


_ANYTHING = msgspec.json.Decoder(float_hook=_finite)


@functools.cache
def _free_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Fields in which any JSON may stand, at any depth."""
    fields = msgspec.structs.fields(kind)
    return tuple(field.name for field in fields if _is_free(msgspec.inspect.type_info(field.type)))


def _is_free(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_free, value))
    if isinstance(value, msgspec.inspect.Field):
        return _is_free(value.type)
    if not isinstance(value, msgspec.inspect.Type):
        return False
    return isinstance(value, msgspec.inspect.AnyType) or any(
        _is_free(getattr(value, name)) for name in value.__struct_fields__
    )


def _check_free(value: Any, param: str) -> None:
    """Check that a value can be written as JSON again, for templates, grammars and replies that repeat it."""
    if isinstance(value, list) and value and isinstance(value[0], msgspec.Struct):
        for item in value:
            _check_free(item, param)
    elif isinstance(value, msgspec.Struct):
        for name in _free_fields(type(value)):
            _check_free(getattr(value, name), param)
    elif value is not None:
        try:
            orjson.dumps(value)
        except TypeError as error:
            raise InvalidRequestError(f"{param}: {error}", param=param) from None


def _without_unknown_nulls(value: Any, kind: type[Kind], tries: int) -> Kind:
    """The body as a `kind`, without the unknown fields that are null. Each try finds one of them."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN.search(str(error))
        if not tries or unknown is None or not _drop_null(value, unknown.group(2) or "", unknown.group(1)):
            raise
    return _without_unknown_nulls(value, kind, tries - 1)


def _drop_null(value: Any, path: str, name: str) -> bool:
    """Remove a field that is null from the object at a path such as `messages[0]`. False where it is not null."""
    for step in _STEP.findall(path):
        if isinstance(value, list) and step.isdigit():
            value = value[int(step)]
        elif isinstance(value, dict) and step in value:
            value = value[step]
        else:  # a key of free choice, which the path does not name
            return False
    if not isinstance(value, dict) or value.get(name, 0) is not None:
        return False
    del value[name]
    return True


def _invalid(message: str) -> InvalidRequestError:
    """Our error for one of msgspec's, whose message ends in a path such as `$.messages[0].role`."""
    path = _PATH.search(message)
    named = _NAMED.search(message)
    where = path.group(1) if path else ""
    if where:
        param: str | None = re.split(r"[.\[]", where, maxsplit=1)[0]
    else:
        param = named.group(1) if named else None
    text = message[: path.start()] if path else message
    if named and "unknown field" in text:
        text += advice(named.group(1))
    return InvalidRequestError(f"{where}: {text}" if where else text, param=param)
