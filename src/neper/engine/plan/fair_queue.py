"""Requests that wait for an engine: those of different HTTP requests take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """A queue of items in groups: each group's come in their order, and the groups take turns.

    A group that has just had its turn waits for another one, however long ago its next item came.
    """

    def __init__(self) -> None:
        self._groups: dict[str, deque[Item]] = {}
        self._last: str | None = None
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Item]:
        return (item for group in self._groups.values() for item in group)

    def add(self, group: str, item: Item) -> None:
        self._groups.setdefault(group, deque()).append(item)
        self._size += 1

    def peek(self) -> Item:
        """The next item. Raises StopIteration when there is none."""
        return self._groups[self._next_group()][0]

    def take(self) -> Item:
        """Take out the next item. Raises StopIteration when there is none."""
        group = self._last = self._next_group()
        items = self._groups.pop(group)
        item = items.popleft()
        self._size -= 1
        if items:
            self._groups[group] = items  # behind the others
        return item

    def drop(self, group: str, item: Item) -> None:
        """Take out an item that is there."""
        items = self._groups[group]
        items.remove(item)
        self._size -= 1
        if not items:
            del self._groups[group]

    def _next_group(self) -> str:
        group = next((group for group in self._groups if group != self._last), None)
        return next(iter(self._groups)) if group is None else group

    def clear(self) -> list[Item]:
        """Take out all of them."""
        items = list(self)
        self._groups.clear()
        self._size = 0
        return items
