"""Schemas side by side: pairs that no value fits both of, and schemas that name an object's properties."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from neper.text.schema_references import References

_MOST_COMPARISONS = 20_000
_DEEPEST = 20

_ALL = frozenset(("null", "boolean", "number", "string", "array", "object"))

Node = Mapping[str, Any]


class Unions:
    """Comparisons between the subschemas of one schema, whose references all have targets."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._comparisons = 0
        self._known: dict[int, list[Any]] = {}  # conjuncts by id
        self._listed: dict[int, list[frozenset[str]]] = {}  # values by id

    def disjoint(self, one: Any, other: Any, depth: int = 0) -> bool:
        """True where no value fits both; False where that is not known."""
        self._comparisons += 1
        if self._comparisons > _MOST_COMPARISONS or depth > _DEEPEST:
            return False
        ones, others = self._conjuncts(one), self._conjuncts(other)
        if False in ones or False in others:
            return True
        ones, others = [node for node in ones if node is not True], [node for node in others if node is not True]
        kinds = frozenset.intersection(_ALL, *map(_kinds, ones), *map(_kinds, others))
        if not kinds:
            return True
        for values in self._values(ones):
            if any(not values & further for further in self._values(others)):
                return True
        for mine, theirs in ((ones, other), (others, one)):
            unions = [node[keyword] for node in mine for keyword in ("anyOf", "oneOf") if keyword in node]
            if any(all(self.disjoint(option, theirs, depth + 1) for option in options) for options in unions):
                return True
        if kinds == {"number"}:
            return _lowest(ones) > _highest(others) or _lowest(others) > _highest(ones)
        return kinds == {"object"} and self._objects_disjoint(ones, others, depth)

    def closes(self, node: Node) -> bool:
        """True for a schema of an object that a strict schema closes."""
        if "additionalProperties" in node or "unevaluatedProperties" in node:
            return False
        if "properties" in node or "patternProperties" in node:
            return True
        kind = node.get("type")
        return (kind == "object" or (isinstance(kind, list) and "object" in kind)) and not self._parts(node)

    def joins_properties(self, node: Node) -> bool:
        """True where an object's properties come from several schemas, so that none of them can be closed."""
        parts = self._parts(node)
        if "properties" in node or "patternProperties" in node:
            parts.append(node)
        return len(parts) > 1

    def _parts(self, node: Node) -> list[Any]:
        """The schemas that apply to the same object, and name properties without excluding others."""
        inside = [*node.get("allOf", ())]
        inside += [{keyword: node[keyword]} for keyword in ("anyOf", "oneOf", "$ref") if keyword in node]
        return [inner for inner in inside if self._names_properties(inner, set(), 0)]

    def _names_properties(self, node: Any, seen: set[str], depth: int) -> bool:
        if not isinstance(node, Mapping) or depth > _DEEPEST:
            return False
        if ("properties" in node or "patternProperties" in node) and "additionalProperties" not in node:
            return True
        inside = [inner for keyword in ("allOf", "anyOf", "oneOf") for inner in node.get(keyword, ())]
        if "$ref" in node and node["$ref"] not in seen:
            seen.add(node["$ref"])
            inside.append(self._references.target(node["$ref"]))
        return any(self._names_properties(inner, seen, depth + 1) for inner in inside)

    def _conjuncts(self, schema: Any) -> list[Any]:
        """The schemas that all apply to a value of a schema: itself, its reference's target, those of allOf."""
        if isinstance(schema, bool):
            return [schema]
        if id(schema) not in self._known:
            pending, found = [schema], dict[int, Any]()
            while pending:
                node = pending.pop()
                if id(node) not in found:
                    found[id(node)] = node
                    if not isinstance(node, bool):
                        pending += node.get("allOf", ())
                        pending += [self._references.target(node["$ref"])] if "$ref" in node else []
            self._known[id(schema)] = list(found.values())
        return self._known[id(schema)]

    def _values(self, conjuncts: list[Any]) -> Iterator[frozenset[str]]:
        """Sets of values from schemas that list them. Each set holds all values that fit."""
        for node in conjuncts:
            if id(node) not in self._listed:
                self._listed[id(node)] = list(_listed(node))
            yield from self._listed[id(node)]

    def _objects_disjoint(self, ones: list[Any], others: list[Any], depth: int) -> bool:
        required = {name for node in (*ones, *others) for name in node.get("required", ())}
        for name in required:
            mine, theirs = list(_properties(ones, name)), list(_properties(others, name))
            for first in mine:
                if any(self.disjoint(first, second, depth + 1) for second in theirs):
                    return True
        return False


def _listed(node: Node) -> Iterator[frozenset[str]]:
    if "const" in node:
        yield frozenset([_written(node["const"])])
    if "enum" in node:
        yield frozenset(map(_written, node["enum"]))
    kinds = _kinds(node)
    if kinds <= {"null", "boolean"} and "type" in node:
        yield frozenset(["null"] * ("null" in kinds) + ["true", "false"] * ("boolean" in kinds))


def _kinds(node: Any) -> frozenset[str]:
    """The types of the values that may fit a schema. Integers are numbers."""
    if "const" in node:
        return frozenset([_kind(node["const"])])
    if "enum" in node:
        return frozenset(map(_kind, node["enum"]))
    if "type" not in node:
        return _ALL
    names = node["type"] if isinstance(node["type"], list) else [node["type"]]
    return frozenset("number" if name == "integer" else name for name in names)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (int | float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def _lowest(conjuncts: list[Any]) -> float:
    return max((_number(node, "minimum", -float("inf")) for node in conjuncts), default=-float("inf"))


def _highest(conjuncts: list[Any]) -> float:
    return min((_number(node, "maximum", float("inf")) for node in conjuncts), default=float("inf"))


def _number(node: Any, keyword: str, otherwise: float) -> float:
    value = node.get(keyword, otherwise)
    return value if isinstance(value, int | float) else otherwise


def _properties(conjuncts: list[Any], name: str) -> Iterator[Any]:
    for node in conjuncts:
        properties = node.get("properties", {})
        if name in properties:
            yield properties[name]
        elif node.get("additionalProperties") is False and "patternProperties" not in node:
            yield False


def _written(value: Any) -> str:
    """JSON that is the same for equal values."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normal(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _normal(item) for name, item in value.items()}
    return value
