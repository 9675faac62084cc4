"""Entries of a message's deltas: those of all of a delta's tokens, or of one part of it."""

from __future__ import annotations

from neper.server.choice import Delta, Part
from neper.server.entries.entries import Entries


class MessageEntries:
    """Writes the entries of one reply, joined by commas; b"" where nothing was scored.

    Args:
        ids_as_text: every token's text is `token_id:N`.
    """

    def __init__(self, entries: Entries, *, ids_as_text: bool) -> None:
        self._entries = entries
        self._ids_as_text = ids_as_text

    def of_delta(self, delta: Delta) -> bytes:
        if delta.scores is None:
            return b""
        return self._entries.chat(
            delta.tokens,
            delta.scores.read(),
            delta.scores.rows.top_k or 0,
            begin=delta.begin,
            ids_as_text=self._ids_as_text,
        )

    def of_part(self, delta: Delta, part: Part) -> bytes:
        if delta.scores is None:
            return b""
        scored = delta.scores.read()
        return self._entries.chat(
            part.tokens,
            [scored[place] for place in part.places],
            delta.scores.rows.top_k or 0,
            begin=part.places.index(delta.begin) if delta.begin in part.places else -1,
            ids_as_text=self._ids_as_text,
        )
