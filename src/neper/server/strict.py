"""Strict decoding of request bodies: unknown fields, wrong types and broken JSON are errors that name the field."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from neper.errors import InvalidRequestError, UnsupportedError
from neper.server.other_names import advice

Body = TypeVar("Body", bound="Strict")

# Of a function or a schema, as OpenAI bounds it. `$` alone would let a newline follow.
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object without unknown fields: but for null, which equals absent whatever its name.

    `later` names known fields that are refused unless null, `neutral` those of which one other value is taken as well.
    """

    later: ClassVar[tuple[str, ...]] = ()
    neutral: ClassVar[dict[str, Any]] = {}

    def refuse_later_fields(self, param: str | None = None) -> None:
        for name in self.later:
            if getattr(self, name) is not None:
                raise UnsupportedError(f"{name} is not supported by this server", param=param or name)
        for name, value in self.neutral.items():
            given = getattr(self, name)
            # 0 is no false here, and 1 no true; but 1.0 is 1.
            if given is not None and (given != value or isinstance(given, bool) != isinstance(value, bool)):
                shown = msgspec.json.encode(value).decode()
                raise UnsupportedError(f"{name} is not supported by this server, only {shown}", param=param or name)


_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_NAMED = re.compile(r"(?:unknown|missing required) field `([^`]*)`")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`(?: - at `\$\.?([^`]*)`)?$")
_STEP = re.compile(r"[^.\[\]]+")
_MOST_NULLS = 64


def decode_body(data: bytes, kind: type[Body]) -> Body:
    """The body as a `kind`; anything wrong is an InvalidRequestError that names the field."""
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            if _UNKNOWN.search(str(error)) is None:
                raise
        return _without_unknown_nulls(msgspec.json.decode(data), kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


def _without_unknown_nulls(value: Any, kind: type[Body], tries: int = _MOST_NULLS) -> Body:
    """The body as a `kind`, without the unknown fields that are null. A try finds one of them."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN.search(str(error))
        if not tries or unknown is None or not _drop_null(value, unknown.group(2) or "", unknown.group(1)):
            raise
    return _without_unknown_nulls(value, kind, tries - 1)


def _drop_null(value: Any, path: str, name: str) -> bool:
    """Take a field that is null out of the object at a path such as `messages[0]`; False where it is not null."""
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
    """An error of ours from one of msgspec's, whose message ends in a path such as `$.messages[0].role`."""
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
