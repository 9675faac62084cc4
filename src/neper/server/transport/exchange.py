"""An exchange: one HTTP request being answered, as the log and the metrics see it."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Scope

from neper.errors import NeperError

_KEY = "neper.exchange"


class Exchange:
    """The notes on a request while it is answered. They travel in its ASGI scope.

    Attributes:
        started, first_results: the times of its arrival, and of the engine's first results for it (None: not yet).
        status: of the reply; 0 while nothing was sent.
        prompt_tokens, generated_tokens: tokens that were computed for it.
        body_bytes: bytes of its body that were received.
        reply_bytes: bytes of its reply, if it is large.
        error: the error that ended it, also after a stream's status was sent.
        arrived: its whole body is there.
        cut_by: the error with which `cut` ended it.
    """

    __slots__ = (
        "_task",
        "arrived",
        "body_bytes",
        "cut_by",
        "error",
        "first_results",
        "generated_tokens",
        "prompt_tokens",
        "reply_bytes",
        "request_id",
        "started",
        "status",
    )

    def __init__(self, request_id: str, *, arrived: bool = True) -> None:
        self.request_id = request_id
        self.started = time.monotonic()
        self.first_results: float | None = None
        self.status = 0
        self.body_bytes = 0
        self.reply_bytes = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.error: NeperError | None = None
        self.arrived = arrived
        self.cut_by: NeperError | None = None
        self._task = asyncio.current_task()

    def cut(self, error: NeperError) -> None:
        """Cancel the task that answers it; the gate then answers with `error`."""
        if self.cut_by is None and self._task is not None:
            self.cut_by = error
            self._task.cancel()

    def attach(self, scope: Scope) -> None:
        scope[_KEY] = self

    @classmethod
    def of(cls, scope: Scope) -> Exchange:
        """The exchange attached to a scope."""
        exchange = scope[_KEY]
        assert isinstance(exchange, Exchange)
        return exchange
