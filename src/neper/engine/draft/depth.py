"""The depth of a sequence's drafts: how many are worth verifying, by how many were accepted lately."""

from __future__ import annotations

_MOST_PAUSE = 32


class Depth:
    """Doubles where all drafts were accepted, shrinks to what was, and pauses for longer each time none was.

    Args:
        most: drafts at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._depth = most
        self._misses = 0
        self._pause = 0

    @property
    def wanted(self) -> int:
        """Drafts to verify in the next step."""
        return 0 if self._pause else self._depth

    def follow(self, num_drafts: int, num_accepted: int) -> None:
        """Hear of a step that sampled a token after so many drafts, none among others."""
        if self._pause:
            self._pause -= 1
        if num_accepted:
            self._misses = 0
            self._depth = min(self._most, 2 * num_drafts if num_accepted == num_drafts else num_accepted + 1)
        elif num_drafts:
            # One miss may be an accident. From the second on, each costs time that the others' drafts could use.
            self._misses += 1
            self._depth = max(1, num_drafts // 2)
            self._pause = min(_MOST_PAUSE, 2**self._misses) if self._misses > 1 else 0
