"""Memory of large requests: given back to the system soon after they end, which the C library alone would not do."""

from __future__ import annotations

import asyncio
import ctypes
import functools
from collections.abc import Callable

LARGE_BYTES = 2**18
PAUSE_SECONDS = 1.0


class MemoryReturn:
    """Trims the heap a while after large requests, once for all that end in between."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def ended(self, num_bytes: int) -> None:
        """Note the end of a request whose body and reply had so many bytes."""
        if num_bytes >= LARGE_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._give_back)

    def _give_back(self) -> None:
        self._timer = None
        trim = _malloc_trim()
        if trim is not None:
            asyncio.get_running_loop().run_in_executor(None, trim, 0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim. None with other C libraries, which return memory by themselves or have no such call."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return trim
