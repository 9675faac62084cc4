"""Isolation: of items that are computed together, one that fails takes no other with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Failure = TypeVar("Failure", bound=Exception)


def isolated(
    compute: Callable[[list[Item]], Sequence[Result]], items: list[Item], failure: type[Failure]
) -> list[Result | Failure]:
    """compute(items), one result each. Where that raises a `failure`, halves are computed, down to the item at fault.

    That item's result is the failure. Failures should be few: each computes some items twice.
    """
    try:
        return [*compute(items)]
    except failure as error:
        if len(items) == 1:
            return [error]
    middle = len(items) // 2
    return isolated(compute, items[:middle], failure) + isolated(compute, items[middle:], failure)
