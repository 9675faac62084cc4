"""Numbers of schemas, in a form in which llguidance, which reads float64, holds them exactly."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

EXACT = 2**53
INEXACT = "has more digits than can be held exactly (integers: up to 2^53)"

# llguidance's JSON reader rounds a decimal correctly if it is an exact float64 integer divided by another.
_DECIMALS = 22
# Decimals of up to 15 digits are in the order of their float64 values, which all differ.
_DIGITS = 15
# Numbers below the second with the decimals of the first have at most 15 digits.
_SHORT, _MOST_SHORT = 1e-9, 1e6
_LARGEST_MULTIPLE = 2**32 - 1
_LARGEST_COMMON_MULTIPLE = 2**16 - 1  # the product of two such fits into llguidance's 32 bits


def is_exact(value: float) -> bool:
    """True where llguidance reads the number exactly, and compares a reply's number with it exactly."""
    if not math.isfinite(value) or abs(value) > EXACT:
        return False
    return isinstance(value, int) or _is_exact(Decimal(repr(value)))


def _is_exact(value: Decimal) -> bool:
    decimals = max(0, -int(value.normalize().as_tuple().exponent))
    return decimals <= _DECIMALS and abs(value.scaleb(decimals)) <= EXACT


class Multiples:
    """The `multipleOf` of a schema, which llguidance may join to a common multiple."""

    def __init__(self) -> None:
        self.joined = False
        """True where a keyword joins a schema with itself or another."""
        self._found: list[tuple[int, int]] = []  # coefficient and decimals
        self._short: list[tuple[dict[str, Any], str, str, float]] = []

    def add(self, coefficient: int, decimals: int) -> None:
        self._found.append((coefficient, decimals))

    def allow_short(self, node: dict[str, Any], keyword: str, exclusive: str, value: float) -> None:
        self._short.append((node, keyword, exclusive, value))

    def finish(self) -> None:
        """Make bounds exclusive again, with a limit of decimals, if that is possible.

        With an inclusive bound of many digits, its own beginnings could not come: 0.9 below 1 would have to be 0.90.
        """
        for node, keyword, exclusive, value in () if self._found else self._short:
            del node[keyword]
            node[exclusive] = value
            node["multipleOf"] = _SHORT

    def problem(self) -> str | None:
        if len(self._found) < 2 and not self.joined:
            return None
        most = max((decimals for _, decimals in self._found), default=0)
        common = math.lcm(*(coefficient * 10 ** (most - decimals) for coefficient, decimals in self._found))
        if common > _LARGEST_COMMON_MULTIPLE:
            return f"the least common multiple of its multipleOf has more than {_LARGEST_COMMON_MULTIPLE} steps"
        return None


def hold(node: dict[str, Any], multiples: Multiples) -> None:
    """Rewrite a schema's bounds, in place.

    A decimal below an exclusive bound may be read as the bound itself. So exclusive bounds become inclusive ones at the
    next number of 15 digits. Rounding keeps the order, so numbers within those stay within them.

    Raises:
        ValueError: a keyword that is no number, or cannot be held exactly.
    """
    short = [
        (keyword, exclusive, node[exclusive])
        for keyword, exclusive, direction in (("minimum", "exclusiveMinimum", -1), ("maximum", "exclusiveMaximum", 1))
        if keyword not in node and _is_short(node.get(exclusive), direction) and node.get("type") != "integer"
    ]
    low = _bound(node, "minimum", "exclusiveMinimum", 1)
    high = _bound(node, "maximum", "exclusiveMaximum", -1)
    if "multipleOf" in node:
        coefficient, decimals = _multiple(node["multipleOf"])
        multiples.add(coefficient, decimals)
        if node.get("type") != "integer":
            limit = 10.0 ** (_DIGITS - decimals)
            low = -limit if low is None else max(low, -limit)
            high = limit if high is None else min(high, limit)
    for keyword, value in (("minimum", low), ("maximum", high)):
        if value is not None:
            node[keyword] = int(value) if value == int(value) else value
    for keyword, exclusive, bound in short:
        multiples.allow_short(node, keyword, exclusive, bound)


def _is_short(value: Any, direction: int) -> bool:
    """True for an exclusive bound away from zero, below which numbers with the decimals of _SHORT have few digits."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value * direction < _MOST_SHORT:
        return False
    return len(Decimal(repr(value)).normalize().as_tuple().digits) <= _DIGITS


def _bound(node: dict[str, Any], keyword: str, exclusive: str, direction: int) -> float | None:
    limit, beyond = node.pop(keyword, None), node.pop(exclusive, None)
    for name, value in ((keyword, limit), (exclusive, beyond)):
        if value is None or (name == exclusive and isinstance(value, bool)):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number")
        if not is_exact(value):
            raise ValueError(f"{name}: {value!r} {INEXACT}")
    if isinstance(beyond, bool):  # as in draft 4
        limit, beyond = (None, limit) if beyond else (limit, None)
    bounds = [] if limit is None else [limit]
    if beyond is not None:
        bounds.append(_next(beyond, direction))
    return None if not bounds else max(bounds) if direction > 0 else min(bounds)


def _next(value: float, direction: int) -> float:
    exact = Decimal(repr(value))
    last = max(exact.adjusted() - _DIGITS + 1, -_DECIMALS) if value else -_DECIMALS
    following = exact + direction * min(Decimal(1).scaleb(last), Decimal(1))
    if not _is_exact(following):
        raise ValueError(f"{value!r} as an exclusive bound {INEXACT}")
    return float(following)


def _multiple(value: Any) -> tuple[int, int]:
    """The coefficient and the number of decimals that llguidance finds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError("multipleOf must be a number above 0")
    exact = Decimal(repr(value)).normalize()
    decimals = max(0, -int(exact.as_tuple().exponent))
    coefficient = int(exact.scaleb(decimals))
    read, steps = float(value), 0
    while read != int(read) and steps <= _DIGITS:
        read, steps = read * 10, steps + 1
    if (read, steps) != (coefficient, decimals) or coefficient > _LARGEST_MULTIPLE or decimals >= _DIGITS:
        raise ValueError(f"multipleOf: {value!r} cannot be held exactly")
    return coefficient, decimals
