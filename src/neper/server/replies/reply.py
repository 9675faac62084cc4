"""A reply in the making: a generation's deltas become stream events, or one body."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

from neper.errors import NeperError
from neper.server.bodies.completion import GenerationBody
from neper.server.choice import Delta
from neper.server.generation import Generation
from neper.server.service import Service

Body = TypeVar("Body", bound=GenerationBody)


class Reply(ABC, Generic[Body]):
    """Shapes one generation's deltas.

    A stream calls `begin`, `event` for each delta, then `end` or `broken`. A full reply calls `add` for each delta,
    then `parts`. Both await `open` before the first delta of a choice.
    """

    done = b""
    """The end of every stream, broken ones too."""
    content_type = b"application/json"
    """The form of the full reply."""

    def __init__(self, service: Service, body: Body, generation: Generation, reply_id: str) -> None:
        self.service = service
        self.request = body
        self.generation = generation
        self.ids_as_text = bool(body.return_tokens_as_token_ids)
        self._reply_id = reply_id
        self._created = int(time.time())

    async def open(self, delta: Delta) -> None:
        """Write the part of the reply before a choice's first delta, which is this one."""

    @abstractmethod
    def begin(self) -> bytes:
        """Events before the first delta."""

    @abstractmethod
    def event(self, delta: Delta) -> bytes:
        """Events of one delta; b"" when it shows nothing."""

    @abstractmethod
    def end(self) -> bytes:
        """Events after the last delta."""

    @abstractmethod
    def broken(self, error: NeperError, unfinished: list[int]) -> bytes:
        """Events of an error: one for each choice that it ended, and its own."""

    @abstractmethod
    def add(self, delta: Delta) -> None:
        """Fold one delta into the full reply."""

    @abstractmethod
    def parts(self) -> Iterator[bytes]:
        """The full reply, in parts that are made on demand and not kept."""

    def drafted(self) -> dict[str, int]:
        """Counts of drafted tokens, by their names in a usage. None where the engine drafts none."""
        usage = self.generation.usage()
        if not (self.service.engine.capabilities.speculative or usage.accepted_tokens or usage.rejected_tokens):
            return {}
        return {
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.rejected_tokens,
        }


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"
