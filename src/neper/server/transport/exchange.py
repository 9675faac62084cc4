"""An exchange: one HTTP request being answered, as the log and the metrics see it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from neper.errors import NeperError

_KEY = "neper.exchange"


@dataclass(eq=False, slots=True)
class Exchange:
    """The notes on a request while it is answered. They travel in its ASGI scope.

    Attributes:
        started, first_results: the times of its arrival, and of the engine's first results for it (None: not yet).
        status: that of the reply; 0 while nothing was sent.
        prompt_tokens, generated_tokens: tokens that were computed for it.
        body_bytes: bytes of its body that were received.
        reply_bytes: bytes of its reply, if it is large.
        error: the error that ended it, also after a stream's status was sent.
        arrived: its whole body is there.
        cut_by: the error with which `cut` ended it.
    """

    request_id: str
    arrived: bool = field(default=True, kw_only=True)
    started: float = field(default_factory=time.monotonic)
    first_results: float | None = None
    status: int = 0
    body_bytes: int = 0
    reply_bytes: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    error: NeperError | None = None
    cut_by: NeperError | None = None
    _task: asyncio.Task[Any] | None = field(default_factory=asyncio.current_task, init=False)

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
