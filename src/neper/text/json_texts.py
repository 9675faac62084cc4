"""The texts in a JSON value, at every depth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def texts_of(value: Any) -> Iterator[str]:
    """All strings in a value, names of members too. Deep values take no stack."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            waiting += one.keys()
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one


def num_characters(value: Any) -> int:
    """Characters of all strings in a value."""
    return sum(map(len, texts_of(value)))


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every string in it changed, names of members too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_texts(name, change): map_texts(member, change) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_texts(one, change) for one in value]
    return value
