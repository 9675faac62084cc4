"""Work on long texts: in threads of its own, so that small requests never wait behind it, and ended once nobody waits.

Encoding lets other threads run, but takes a second per megabyte. Clients that send much and leave must not be served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from neper.errors import ContextLengthError, OverloadedError
from neper.server.transport.disconnect import ClientDisconnected

# Above this, work is done in a thread: at about 1 MB/s it would hold the event loop, and all streams, for 10 ms.
INLINE_CHARACTERS = 10_000
THREADS = 2
# Texts above this have one thread, one at a time: encoding a word of so many characters takes 200 bytes for each.
VERY_LONG_CHARACTERS = 64 * 1024
MAX_WAITING = 256

Result = TypeVar("Result")


class Encoding:
    """The progress of an encoder. It ends at too many ids, or when nobody waits for them.

    Args:
        limit: most ids; None = any number.
    """

    def __init__(self, limit: int | None) -> None:
        self.left = False
        self._limit = limit

    def progress(self, num_ids: int) -> None:
        """Note that there are at least `num_ids`. Raises ContextLengthError, ClientDisconnected."""
        if self.left:
            raise ClientDisconnected
        if self._limit is not None and num_ids > self._limit:
            raise ContextLengthError(f"the text has more than {self._limit} tokens, as many as are taken here")


class LongTexts:
    """Does work on texts: at once if they are short, else in a thread. One of the threads is for very long texts."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "texts")
        self._very_long = ThreadPoolExecutor(1, "very-long-texts")
        self._num_waiting = 0

    async def run(self, size: int, work: Callable[[], Result], encoding: Encoding | None = None) -> Result:
        """Do work on about `size` characters. When the caller is cancelled, `encoding` notices it.

        Raises OverloadedError where too much work waits.
        """
        if size <= INLINE_CHARACTERS:
            return work()
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError(f"{self._num_waiting} long texts are waiting to be encoded", retry_after=1)
        threads = self._threads if size <= VERY_LONG_CHARACTERS else self._very_long
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        finally:
            self._num_waiting -= 1
            if encoding is not None:
                encoding.left = True
