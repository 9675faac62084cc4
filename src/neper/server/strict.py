"""Strict decoding of request bodies: unknown fields, wrong types and broken JSON are errors that name the field."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from neper.errors import InvalidRequestError, UnsupportedError

Body = TypeVar("Body", bound="Strict")

# Of a function or a schema, as OpenAI bounds it. `$` alone would let a newline follow.
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object without unknown fields; `later` names the known ones that are refused unless null."""

    later: ClassVar[tuple[str, ...]] = ()

    def refuse_later_fields(self, param: str | None = None) -> None:
        for name in self.later:
            if getattr(self, name) is not None:
                raise UnsupportedError(f"{name} is not supported by this server", param=param or name)


_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_NAMED = re.compile(r"(?:unknown|missing required) field `([^`]*)`")


def decode_body(data: bytes, kind: type[Body]) -> Body:
    """The body as a `kind`; anything wrong is an InvalidRequestError that names the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


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
    return InvalidRequestError(f"{where}: {text}" if where else text, param=param)
