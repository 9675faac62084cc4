"""References inside a schema: their targets, and their loops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

# References that depend on one another take a round each. Nobody writes so many.
_ROUNDS = 16


class Unresolved(Exception):
    """A reference that leads nowhere. The message has the reason."""


class References:
    """The references of one schema."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._targets: dict[str, Any] = {}
        self._renamed: dict[tuple[int, str], tuple[str, ...]] = {}

    def target(self, pointer: str) -> Any:
        """The target of a reference. Raises Unresolved."""
        if pointer not in self._targets:
            node: Any = self._schema
            for segment in _segments(pointer):
                node = _step(node, segment)
            self._targets[pointer] = node
        return self._targets[pointer]

    def rename(self, container: Any, segment: str, written: tuple[str, ...]) -> None:
        """Note that the part of a schema under `segment` is written elsewhere in it."""
        self._renamed[id(container), segment] = written

    def renamed(self, pointer: str) -> str:
        """The reference to the place where its target is written."""
        node: Any = self._schema
        found = ["#"]
        for segment in _segments(pointer):
            found += map(_escaped, self._renamed.get((id(node), segment), (segment,)))
            node = _step(node, segment)
        return "/".join(found)

    def loop(self, nodes: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """A subschema that applies itself again to the same value, or None.

        `nodes`: all of its subschemas.
        """
        left: set[int] = set()
        for first in nodes:
            path: list[tuple[int, Iterator[Any]]] = []
            inside: set[int] = set()
            node: Any = first
            while True:
                if isinstance(node, Mapping) and id(node) not in left:
                    if id(node) in inside:
                        return node
                    inside.add(id(node))
                    path.append((id(node), self._in_place(node)))
                while path and (node := next(path[-1][1], None)) is None:
                    done, _ = path.pop()
                    inside.remove(done)
                    left.add(done)
                if not path:
                    break
        return None

    def _in_place(self, node: Mapping[str, Any]) -> Iterator[Any]:
        """The schemas that a schema applies to its own value."""
        if "$ref" in node:
            yield self.target(node["$ref"])
        for keyword in ("allOf", "anyOf", "oneOf"):
            yield from node.get(keyword, ())

    def has_value(self, nodes: Iterable[Mapping[str, Any]]) -> bool:
        """True where a value of finite size can fit the schema, as far as its references show.

        `nodes`: all of its subschemas.
        """
        known: set[int] = set()
        pending = list(nodes)[::-1]  # inner ones first
        for _ in range(_ROUNDS):
            left = [node for node in pending if not self._add_possible(node, known)]
            if id(self._schema) in known:
                return True
            if len(left) == len(pending):
                return False
            pending = left
        return True

    def _add_possible(self, node: Mapping[str, Any], known: set[int]) -> bool:
        """Add a subschema to those that are known to have a value, if it follows from those."""
        if self._is_possible(node, known):
            known.add(id(node))
            return True
        return False

    def _is_possible(self, node: Mapping[str, Any], known: set[int]) -> bool:
        def possible(inner: Any) -> bool:
            return bool(inner) if isinstance(inner, bool) else not isinstance(inner, Mapping) or id(inner) in known

        if "$ref" in node and not possible(self.target(node["$ref"])):
            return False
        if not all(map(possible, node.get("allOf", ()))):
            return False
        if not all(any(map(possible, node[keyword])) for keyword in ("anyOf", "oneOf") if keyword in node):
            return False
        if node.get("type") == "object":
            properties = node.get("properties", {})
            return all(possible(properties.get(name, True)) for name in node.get("required", ()))
        if node.get("type") == "array":
            least = node.get("minItems", 0)
            first, rest = node.get("prefixItems", []), node.get("items", True)
            if isinstance(rest, list):
                first, rest = rest, node.get("additionalItems", True)
            return all(map(possible, first[: int(least)])) and (len(first) >= least or possible(rest))
        return True


def _segments(pointer: str) -> list[str]:
    if pointer == "#":
        return []
    if not pointer.startswith("#/"):
        raise Unresolved("is not one into this schema, as #/$defs/name")
    return [unquote(segment).replace("~1", "/").replace("~0", "~") for segment in pointer[2:].split("/")]


def _escaped(segment: str) -> str:
    return segment.replace("~", "~0").replace("/", "~1").replace("%", "%25")


def _step(node: Any, segment: str) -> Any:
    if isinstance(node, Mapping) and segment in node:
        return node[segment]
    if isinstance(node, list) and segment.isdecimal() and int(segment) < len(node):
        return node[int(segment)]
    raise Unresolved("leads nowhere")
