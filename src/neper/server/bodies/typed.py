"""Objects that are decoded by their type, one by one, so that errors about unknown types name them."""

from __future__ import annotations

import msgspec

from neper.errors import InvalidRequestError
from neper.server.bodies.strict import Kind, Strict, decode
from neper.types import JsonObject


class _Typed(msgspec.Struct):
    """The field that tells an object's kind. All others are decoded later."""

    type: str | None = None


def decode_object(raw: msgspec.Raw, kind: type[Kind], where: str, param: str) -> Kind:
    try:
        return decode(bytes(raw), kind)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}: {error.message}", param=param) from None


def type_of(raw: msgspec.Raw, where: str, param: str) -> str | None:
    try:
        return msgspec.json.decode(raw, type=_Typed).type
    except (msgspec.ValidationError, RecursionError):
        raise InvalidRequestError(f"{where}: expected an object with a type", param=param) from None


def one_of(*kinds: type[Strict], words: tuple[str | None, ...] = ()) -> JsonObject:
    """The schema of a value that is decoded later: an object of a kind, or a word."""
    objects: list[JsonObject] = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]
    return {"anyOf": [*objects, {"enum": list(words)}] if words else objects}
