"""The choices of a schema: the values that it allows at a place, where those are few plain ones (enum, boolean, …).

They are those of any branch of the schema. So values stay in the list that only another branch allows than the one
that the text before them has taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from neper.text.json_schema import JsonSchema
from neper.text.schema_references import References

MAX_CHOICES = 256
"""The most choices of one place. Beyond them a place counts as open."""

MAX_OPTIONS = 256
"""The most branches that are followed at once."""

Plain = str | int | float | bool | None
"""A value without others inside it."""

_Key = tuple[bool, Any]
_Choices = dict[_Key, Plain]
"""Values by what tells them apart in JSON: 1 is 1.0, and not true."""


class SchemaChoices:
    """The choices of one schema, which a grammar holds: so its references lead into it, and not in circles."""

    def __init__(self, schema: JsonSchema) -> None:
        self.root: JsonSchema = schema
        self._references = References(schema if isinstance(schema, Mapping) else {})
        self._inside: dict[tuple[int, str | int], JsonSchema] = {}
        self._found: dict[int, list[Plain] | None] = {}
        self._kept: list[JsonSchema] = []  # those that were made here, so that no other gets their id

    def inside(self, schema: JsonSchema, key: str | int) -> JsonSchema:
        """The schema of the values under a name in objects, or at a place in lists, that fit `schema`."""
        if isinstance(schema, bool):
            return schema
        known = self._inside.get((id(schema), key))
        if known is None:
            known = self._inside[id(schema), key] = self._joined("allOf", self._parts(schema, key))
        return known

    def of(self, schema: JsonSchema) -> list[Plain] | None:
        """The values that fit `schema`, in the order in which it has them; None where they are many, or not plain."""
        if id(schema) not in self._found:
            found = self._choices(schema)
            few = found is not None and len(found) <= MAX_CHOICES
            self._found[id(schema)] = list(found.values()) if found is not None and few else None
        return self._found[id(schema)]

    def _parts(self, schema: Mapping[str, Any], key: str | int) -> Iterator[JsonSchema]:
        """Schemas that all of the values under a key fit."""
        kinds = _kinds(schema)
        if kinds is not None and ("object" if isinstance(key, str) else "array") not in kinds:
            yield False
        elif "const" in schema or "enum" in schema:
            yield True  # a list or an object that is given as a whole
        else:
            yield _member(schema, key) if isinstance(key, str) else _item(schema, key)
        if "$ref" in schema:
            yield self.inside(self._references.target(schema["$ref"]), key)
        for part in schema.get("allOf", ()):
            yield self.inside(part, key)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                yield self._joined("anyOf", (self.inside(option, key) for option in schema[keyword]))

    def _joined(self, keyword: str, schemas: Iterator[JsonSchema]) -> JsonSchema:
        """Schemas joined by `allOf` or `anyOf`, each of them once."""
        neutral = keyword == "allOf"
        different = {id(schema): schema for schema in schemas if schema is not neutral}
        if not different:
            return neutral
        if (not neutral) in different.values():
            return not neutral
        if len(different) == 1:
            return next(iter(different.values()))
        if len(different) > MAX_OPTIONS:
            return True
        joined = {keyword: list(different.values())}
        self._kept.append(joined)
        return joined

    def _choices(self, schema: JsonSchema) -> _Choices | None:
        """The values that fit a schema; None where they are not known to be few."""
        if isinstance(schema, bool):
            return None if schema else {}
        found = _own_choices(schema)
        parts = [self._known(part) for part in schema.get("allOf", ())]
        if "$ref" in schema:
            parts.append(self._known(self._references.target(schema["$ref"])))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = [self._known(option) for option in schema[keyword]]
                known = [option for option in options if option is not None]
                parts.append(_union(known) if len(known) == len(options) else None)
        for part in parts:
            if part is not None:
                found = part if found is None else {key: found[key] for key in found if key in part}
        kinds = _kinds(schema)
        if found is not None and kinds is not None:
            found = {key: value for key, value in found.items() if _kind(value) in kinds or _is_integer(value, kinds)}
        return found

    def _known(self, schema: JsonSchema) -> _Choices | None:
        found = self.of(schema)
        return None if found is None else _by_key(found)


def _own_choices(schema: Mapping[str, Any]) -> _Choices | None:
    """The values that a schema's own keywords leave."""
    values: Sequence[Any] | None = None
    if "const" in schema:
        values = [schema["const"]]
    elif "enum" in schema:
        values = schema["enum"]
    elif (kinds := _kinds(schema)) is not None and set(kinds) <= {"boolean", "null"}:
        values = [value for value in (True, False, None) if _kind(value) in kinds]
    if values is None or any(isinstance(value, list | dict) for value in values):
        return None
    return _by_key(values)


def _by_key(values: Sequence[Plain]) -> _Choices:
    choices: _Choices = {}
    for value in values:
        choices.setdefault((isinstance(value, bool), value), value)
    return choices


def _union(options: Sequence[_Choices]) -> _Choices:
    return _by_key([value for option in options for value in option.values()])


def _member(schema: Mapping[str, Any], name: str) -> JsonSchema:
    """The schema that an object's keywords give for a name."""
    found: JsonSchema = True
    if name in (properties := schema.get("properties", {})):
        found = properties[name]
    elif not schema.get("patternProperties"):
        found = schema.get("additionalProperties", True)
    return found


def _item(schema: Mapping[str, Any], place: int) -> JsonSchema:
    """The schema that a list's keywords give for a place."""
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(rest, list):
        first, rest = rest, schema.get("additionalItems", True)
    found: JsonSchema = first[place] if place < len(first) else rest
    return found


def _kinds(schema: Mapping[str, Any]) -> Sequence[str] | None:
    kinds: Any = schema.get("type")
    return [kinds] if isinstance(kinds, str) else kinds


def _kind(value: Plain) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "string" if isinstance(value, str) else "number"


def _is_integer(value: Plain, kinds: Sequence[str]) -> bool:
    return "integer" in kinds and not isinstance(value, bool | str | None) and value == int(value)
