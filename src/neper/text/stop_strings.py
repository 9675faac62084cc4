"""The search for stop strings in a text that arrives in pieces (Aho and Corasick's automaton, linear in the text)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class Match(NamedTuple):
    """A stop string, and how many characters of the text fed so far stand after it."""

    stop: str
    after: int


class StopMatcher:
    """Finds the first stop string of those given, each piece of text looked at once.

    States are the prefixes of the stop strings; the current one is the longest that the text so far ends in.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self._failure = [0]
        self._depth = [0]
        self._longest: list[str | None] = [None]
        self._state = 0
        for stop in stops:
            self._add(stop)
        self._link()

    @property
    def partial(self) -> int:
        """Length of the text's end that could be the beginning of a stop string."""
        return self._depth[self._state]

    def feed(self, text: str) -> Match | None:
        """Takes more text. Of the stop strings completed in it: the one that begins first, of those the shortest."""
        edges, failure, longest, state = self._edges, self._failure, self._longest, self._state
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

    def _add(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        state = 0
        for character in stop:
            following = self._edges[state].get(character)
            if following is None:
                following = len(self._edges)
                self._edges[state][character] = following
                self._edges.append({})
                self._failure.append(0)
                self._depth.append(self._depth[state] + 1)
                self._longest.append(None)
            state = following
        self._longest[state] = stop

    def _link(self) -> None:
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._edges[state].items():
                fallback = self._failure[state]
                while fallback and character not in self._edges[fallback]:
                    fallback = self._failure[fallback]
                self._failure[following] = self._edges[fallback].get(character, 0)
                queue.append(following)
            # Breadth first: the shorter state that this one falls back to is complete already.
            if self._longest[state] is None:
                self._longest[state] = self._longest[self._failure[state]]
