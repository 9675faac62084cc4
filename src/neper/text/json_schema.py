"""JSON Schemas from users, made into schemas that a grammar holds exactly.

llguidance ignores unknown keywords, reads numbers as float64, and reports errors in its own terms. So a schema is read
here first. Parts that cannot be held are refused by their path. The rest is written anew, without annotations.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from neper.errors import InvalidRequestError
from neper.text import schema_numbers
from neper.text.schema_patterns import FORMATS, UNHELD_FORMATS, as_llguidance
from neper.text.schema_references import References, Unresolved
from neper.text.schema_unions import Unions

Path = tuple[Any, ...]
"""The path of a subschema: () for the schema itself, else the path of its parent, then a name or a place in a list.

Names can be long and their schemas many, so a path is written out only in an error.
"""

JsonSchema = Mapping[str, Any] | bool

MAX_DEPTH = 100
MAX_SCHEMAS = 10_000
"""The most subschemas of a schema."""

MAX_VALUES = 65_536
"""The most values and names in its `const`, `enum` and `required`."""

MAX_OPTIONS = 100
"""The most schemas of a oneOf: each is compared with each."""

_LONGEST_NAME = 80  # of a name in an error

# Grammars write out lists and objects up to their largest size.
_LARGEST = {"maxItems": 100_000, "minItems": 100_000, "maxProperties": 100_000, "minProperties": 100_000}
_LARGEST_LENGTH = 2**31 - 1

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

_CONSTRAINTS = """
    anyOf oneOf allOf $ref const enum type
    items additionalItems prefixItems minItems maxItems
    properties patternProperties additionalProperties required minProperties maxProperties
    minLength maxLength pattern format
    minimum maximum exclusiveMinimum exclusiveMaximum multipleOf
"""
# Keywords that describe values without constraining them. The last line is OpenAPI's.
_ANNOTATIONS = """
    $schema $id id $anchor $defs definitions $comment $vocabulary title description default deprecated readOnly
    writeOnly examples contentMediaType contentEncoding contentSchema
    example discriminator externalDocs xml
"""
_KEYWORDS = frozenset(_CONSTRAINTS.split() + _ANNOTATIONS.split())
_KEPT = frozenset([*_CONSTRAINTS.split(), "$schema", "$defs", "definitions"])

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("items", "additionalItems", "additionalProperties")

_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")


def held_schema(schema: JsonSchema, where: str, param: str, *, closed: bool = False) -> dict[str, Any]:
    """The schema in llguidance's form: every reply that fits it fits the user's schema.

    It may be narrower. Numbers after an exclusive bound begin at the next number of 15 digits, beside 0 at 1e-22, or
    have at most 9 decimals. Multiples have at most 15 digits.
    Strings have no control characters besides backspace, tab, line feed, form feed and carriage return.

    Args:
        where: the name of the schema in errors, such as `response_format.json_schema.schema`.
        param: the request field that errors name.
        closed: objects have no other properties than those named, unless `additionalProperties` allows them.

    Raises:
        InvalidRequestError: something that cannot be held, or that is no schema.
    """
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequestError(f"{where} must be a JSON Schema: an object or a boolean", param=param)
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    return _Reader(schema, where, param, closed).read()


class _Reader:
    """One schema being read."""

    def __init__(self, schema: Mapping[str, Any], where: str, param: str, closed: bool) -> None:
        self._schema = schema
        self._where = where
        self._param = param
        self._closed = closed
        self._references = References(schema)
        self._unions = Unions(self._references)
        self._seen: dict[int, tuple[Mapping[str, Any], Path]] = {}
        self._count = 0
        self._values = 0
        self._refs: list[tuple[dict[str, Any], str, Path]] = []  # where each is written, its pointer and path
        draft = schema.get("$schema")
        # In older drafts it has no meaning. All other keywords are held for every draft.
        self._unknown_to_draft = {"prefixItems"} if draft is not None and "2020-12" not in str(draft) else set()
        self._multiples = schema_numbers.Multiples()

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = self._node(self._schema, (), 0, named=False)
        for node, pointer, path in self._refs:
            target = self._references.target(pointer)
            if not isinstance(target, bool) and id(target) not in self._seen:
                raise self._error(path, f"{pointer!r} refers to something that is no schema")
            node["$ref"] = self._references.renamed(pointer)
        # Only now, since these follow references, whose targets have been read.
        if (loop := self._references.loop(schema for schema, _ in self._seen.values())) is not None:
            raise self._error(self._seen[id(loop)][1], "refers to itself without an end")
        for schema, path in self._seen.values():
            if "oneOf" in schema:
                self._check_union(schema, path)
            if self._closed and self._unions.joins_properties(schema):
                raise self._error(
                    path,
                    "a strict schema cannot join the properties of several schemas: write them into one, or give "
                    "additionalProperties in each",
                )
        self._multiples.finish()
        if (problem := self._multiples.problem()) is not None:
            raise self._error((), problem)
        if not self._references.has_value(schema for schema, _ in self._seen.values()):
            raise self._error((), "no value fits it: it refers to itself without an end")
        return found

    def _error(self, path: Path, problem: str) -> InvalidRequestError:
        parts: list[str] = []
        while path:
            path, part = path
            parts.append(f"[{part}]" if isinstance(part, int) else f".{part[:_LONGEST_NAME]}")
        where = "".join([self._where, *parts[::-1]])
        return InvalidRequestError(f"{where}: {problem}", param=self._param)

    def _node(self, node: Any, path: Path, depth: int, *, named: bool) -> Any:
        """A subschema, written anew. `named`: it has an $id of its own, or is inside a schema that has one."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise self._error(path, "must be a schema: an object or a boolean")
        if depth > MAX_DEPTH:
            raise self._error((), f"schemas are nested more than {MAX_DEPTH} deep")
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise self._error((), f"has more than {MAX_SCHEMAS} subschemas")
        self._seen[id(node)] = node, path
        self._check_keywords(node, path)
        named = named or (depth > 0 and ("$id" in node or isinstance(node.get("id"), str)))
        new: dict[str, Any] = {}
        for keyword, value in node.items():
            if keyword in _KEPT and (keyword != "$schema" or depth == 0):
                new[keyword] = self._value(keyword, value, (path, keyword), depth + 1, named)
        self._multiples.joined |= "$ref" in new or "allOf" in new
        if "prefixItems" in new and "additionalItems" in new:
            raise self._error(path, "additionalItems means nothing beside prefixItems; use items")
        try:
            schema_numbers.hold(new, self._multiples)
        except ValueError as error:
            raise self._error(path, str(error)) from None
        if new.get("minProperties", 0) > len(set(new.get("required", ()))) + 1:
            # A key may come twice, and counts once.
            raise self._error(path, "minProperties can be at most one more than there are required properties")
        if "format" in new:
            self._hold_format(new, path)
        if "$ref" in new:
            self._hold_reference(new, path, named)
        if self._closed and self._unions.closes(node):
            new.setdefault("additionalProperties", False)
        if "oneOf" in new:  # its schemas are looked at later
            held = {"anyOf": new.pop("oneOf")}
            if "anyOf" in new:
                new["allOf"] = [*new.get("allOf", ()), held]
                self._references.rename(node, "oneOf", ("allOf", str(len(new["allOf"]) - 1), "anyOf"))
            else:
                new.update(held)
                self._references.rename(node, "oneOf", ("anyOf",))
        return new

    def _check_keywords(self, node: Mapping[str, Any], path: Path) -> None:
        """Check that every keyword is a constraint, a known annotation, or a vendor's (`x-…`)."""
        for keyword, value in node.items():
            known = keyword in _KEYWORDS or (keyword.startswith("x-") and keyword != "x-guidance")
            if (not known and not _says_nothing(keyword, value)) or keyword in self._unknown_to_draft:
                raise self._error(path, f"the keyword {keyword!r} is not supported")

    def _value(self, keyword: str, value: Any, path: Path, depth: int, named: bool) -> Any:
        if keyword in _SCHEMAS_BY_NAME:
            if not isinstance(value, Mapping):
                raise self._error(path, "must be an object of schemas")
            inner: dict[str, Any] = {}
            for name, node in value.items():
                written = as_llguidance(name) if keyword == "patternProperties" else name
                if written in inner:
                    raise self._error((path, name), "another pattern says the same")
                self._references.rename(value, name, (written,))
                inner[written] = self._node(node, (path, name), depth, named=named)
            return inner
        if keyword in _LISTS_OF_SCHEMAS or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list) or (not value and keyword not in ("prefixItems", "items")):
                raise self._error(path, "must be a list of schemas")
            return [self._node(node, (path, place), depth, named=named) for place, node in enumerate(value)]
        if keyword in _SCHEMAS:
            return self._node(value, path, depth, named=named)
        if keyword in ("const", "enum"):
            if keyword == "enum" and not isinstance(value, list):
                raise self._error(path, "must be a list of values")
            self._check_constant(value, path, depth)
        elif keyword in _COUNTS:
            return self._size(keyword, value, path)
        elif keyword == "type":
            names = value if isinstance(value, list) else [value]
            if not names or not all(isinstance(name, str) and name in TYPES for name in names):
                raise self._error(path, f"must be one or more of {', '.join(TYPES)}")
        elif keyword == "required":
            self._count_values(len(value) if isinstance(value, list) else 0)
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise self._error(path, "must be a list of names")
        elif keyword in ("pattern", "format", "$ref"):
            if not isinstance(value, str):
                raise self._error(path, "must be a string")
            return as_llguidance(value) if keyword == "pattern" else value
        return value

    def _size(self, keyword: str, value: Any, path: Path) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or value < 0:
            raise self._error(path, "must be an integer from 0")
        largest = _LARGEST.get(keyword, _LARGEST_LENGTH)
        if value > largest:
            raise self._error(path, f"must be at most {largest}")
        return int(value)

    def _check_constant(self, value: Any, path: Path, depth: int) -> None:
        pending: list[tuple[Any, int]] = [(value, depth)]
        while pending:
            value, depth = pending.pop()
            if depth > MAX_DEPTH:
                raise self._error(path, f"is nested more than {MAX_DEPTH} deep")
            if isinstance(value, str):
                if any((ord(letter) < 32 and letter not in "\b\f\n\r\t") or letter == "\x7f" for letter in value):
                    raise self._error(path, "a string with control characters cannot be held")
            elif isinstance(value, int | float):
                if not schema_numbers.is_exact(value):
                    raise self._error(path, f"{value!r} {schema_numbers.INEXACT}; use a string")
            elif isinstance(value, Mapping | list):
                self._count_values(len(value))
                inner = value.values() if isinstance(value, Mapping) else value
                pending += [(item, depth + 1) for item in inner]

    def _count_values(self, number: int) -> None:
        self._values += number
        if self._values > MAX_VALUES:
            raise self._error((), f"has more than {MAX_VALUES} values in const, enum and required")

    def _hold_format(self, new: dict[str, Any], path: Path) -> None:
        name = new.pop("format")
        if name in UNHELD_FORMATS:
            return
        if name not in FORMATS:
            raise self._error(path, f"the format {name!r} is not known")
        held, pattern = FORMATS[name]
        if held is not None:
            new["format"] = held
        if pattern is not None and "pattern" in new:
            new["allOf"] = [*new.get("allOf", ()), {"pattern": pattern}]
        elif pattern is not None:
            new["pattern"] = pattern

    def _hold_reference(self, new: dict[str, Any], path: Path, named: bool) -> None:
        pointer = new["$ref"]
        if named:
            raise self._error(path, "a reference inside a schema with an $id of its own is not supported")
        try:
            self._references.target(pointer)
        except Unresolved as error:
            raise self._error(path, f"the reference {pointer!r} {error}") from None
        self._refs.append((new, pointer, path))

    def _check_union(self, schema: Mapping[str, Any], path: Path) -> None:
        options = schema["oneOf"]
        if len(options) > MAX_OPTIONS:
            raise self._error((path, "oneOf"), f"has more than {MAX_OPTIONS} schemas; use anyOf")
        for one, other in itertools.combinations(range(len(options)), 2):
            if not self._unions.disjoint(options[one], options[other]):
                raise self._error(
                    (path, "oneOf"),
                    f"schemas {one} and {other} may both fit one value: use anyOf, or require a property in both whose "
                    "const differs",
                )


def _says_nothing(keyword: str, value: Any) -> bool:
    """True for a keyword that is not held, if its value allows everything."""
    if keyword == "propertyNames":
        return value is True or (
            (isinstance(value, Mapping) and all(name in _ANNOTATIONS.split() for name in value if name != "type"))
            and value.get("type", "string") == "string"
        )
    if keyword in ("unevaluatedProperties", "unevaluatedItems"):
        return value is True
    return keyword in ("uniqueItems", "nullable") and value is False
