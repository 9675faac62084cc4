"""Keeps an engine's process running: when it dies, the next one is started."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from neper.errors import StartupError

logger = logging.getLogger("neper.engine")

_FIRST_BACKOFF = 1.0
_LONGEST_BACKOFF = 30.0
_HEALTHY_SECONDS = 60.0


class Connection(Protocol):
    """A process and the way to it."""

    @property
    def status(self) -> int | None:
        """The exit status, once it has ended."""
        ...

    async def close(self, *, kill: bool = False) -> None:
        """End the process, unless `kill` by asking it first, and remove what was made for it. Safe more than once."""
        ...


C = TypeVar("C", bound=Connection)


class Supervisor(Generic[C]):
    """One process after the other: the next is started after 1 s, then 2 s, and so on to 30 s while they keep dying.

    Args:
        launch: starts a process; returns once it is ready, or raises (StartupError: it cannot start as configured).
        serve: works with it until it is gone.
        lost: ends what it was working at; called when it is gone, before the next one is started.

    Attributes:
        connection: the process that is alive, or the last one.
        alive: False until the first is ready, while the next one is started, and from `close` on.
        restarts: how often a start was tried again.
    """

    def __init__(
        self, launch: Callable[[], Awaitable[C]], serve: Callable[[C], Awaitable[None]], lost: Callable[[], None]
    ) -> None:
        self._launch = launch
        self._serve = serve
        self._lost = lost
        self.connection: C | None = None
        self.alive = False
        self.restarts = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the first process and wait until it is ready. Raises what `launch` does."""
        await self._start()
        self._task = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        """End the process, and start no other. To end a `start` under way, cancel it."""
        self.alive = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))  # however it ended, the process must be ended too
            self._task = None
        if self.connection is not None:
            await self.connection.close()
            self.connection = None

    async def _start(self) -> C:
        connection = self.connection = await self._launch()
        self.alive = True
        return connection

    async def _supervise(self) -> None:
        backoff = _FIRST_BACKOFF
        connection = self.connection
        while True:
            assert connection is not None
            started = time.monotonic()
            try:
                await self._serve(connection)
                logger.error("the engine process is lost (exit status %s)", connection.status)
            except Exception:  # a message that cannot be read: the two sides no longer agree on anything
                logger.exception("lost touch with the engine process")
            self.alive = False
            self._lost()
            await connection.close(kill=True)
            if time.monotonic() - started > _HEALTHY_SECONDS:
                backoff = _FIRST_BACKOFF
            while not self.alive:
                logger.info("starting the engine again in %.0f s", backoff)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _LONGEST_BACKOFF)
                self.restarts += 1
                try:
                    connection = await self._start()
                except Exception as error:  # no memory, no files, ...: whatever it was may have passed at the next try
                    logger.error("the engine did not start: %s", error, exc_info=not isinstance(error, StartupError))
