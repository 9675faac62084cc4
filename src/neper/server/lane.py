"""A lane: one thread for work that holds Python's lock, and with it the event loop, for milliseconds at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# After a piece of work the lane rests for this many times as long. So the event loop always gets the larger share of
# the time.
REST = 2.0

Result = TypeVar("Result")


class Lane:
    """Does one piece of work at a time, and rests in between."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._rests_until = 0.0

    async def run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._in_turn, work)

    def _in_turn(self, work: Callable[[], Result]) -> Result:
        start = time.monotonic()
        if start < self._rests_until:
            time.sleep(self._rests_until - start)
            start = time.monotonic()
        try:
            return work()
        finally:
            end = time.monotonic()
            self._rests_until = end + REST * (end - start)
