"""The search for stop strings in a text that arrives in pieces (Aho-Corasick automaton, linear in the text)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple


class Match(NamedTuple):
    """A stop string, and the number of characters after it in the text so far."""

    stop: str
    after: int


class StopMatcher:
    """Finds the first of some stop strings. Each piece of text is read once.

    States are the prefixes of the stop strings. The current one is the longest that the text so far ends with.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._states = _states(tuple(stops))
        self._state = 0

    @property
    def partial(self) -> int:
        """The length of the text's end that could begin a stop string."""
        return self._states.depth[self._state]

    def feed(self, text: str) -> Match | None:
        """Take more text. Returns the stop string completed in it that begins first, and of those the shortest."""
        edges, failure, longest, state = self._states.edges, self._states.failure, self._states.longest, self._state
        found: str | None = None
        found_start = 0
        for end, character in enumerate(text, 1):
            while state and character not in edges[state]:
                state = failure[state]
            state = edges[state].get(character, 0)
            stop = longest[state]
            if stop is not None and (found is None or end - len(stop) < found_start):
                found, found_start = stop, end - len(stop)
        self._state = state
        return None if found is None else Match(found, len(text) - found_start - len(found))


# The choices of a request are made one after the other, with the same stop strings. 128 automata of 16,000 states would
# take seconds and a gigabyte.
@lru_cache(maxsize=1)
def _states(stops: tuple[str, ...]) -> _States:
    return _States(stops)


class _States:
    """The automaton, which no search changes.

    Per state: edges, the state to fall back to, its prefix's length, and the longest stop string that ends there.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.edges: list[dict[str, int]] = [{}]
        self.failure = [0]
        self.depth = [0]
        self.longest: list[str | None] = [None]
        for stop in stops:
            if not stop:
                raise ValueError("a stop string must not be empty")
            state = 0
            for depth, character in enumerate(stop, 1):
                state = self.edges[state].setdefault(character, len(self.edges))
                if state == len(self.edges):
                    self.edges.append({})
                    self.failure.append(0)
                    self.depth.append(depth)
                    self.longest.append(None)
            self.longest[state] = stop
        self._link()

    def _link(self) -> None:
        queue = deque(self.edges[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self.edges[state].items():
                fallback = self.failure[state]
                while fallback and character not in self.edges[fallback]:
                    fallback = self.failure[fallback]
                self.failure[following] = self.edges[fallback].get(character, 0)
                queue.append(following)
            # Breadth first: the shorter state that this one falls back to is complete.
            if self.longest[state] is None:
                self.longest[state] = self.longest[self.failure[state]]
