"""`neper` with a watch on its event loop: python -m tests.attacks.watched FILE serve …

FILE holds two float64 that whoever started it reads and may set to 0: the longest time in seconds for which the loop
did nothing else, and how much of that the process was computing. The second does not count what other processes took.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from neper.cli import main

TICK_SECONDS = 0.005


class Watch:
    """The longest holds of an event loop, kept in a file that both processes map."""

    _form = struct.Struct("dd")

    def __init__(self, file: Path) -> None:
        if not file.exists():
            file.write_bytes(bytes(self._form.size))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), self._form.size)

    def read(self) -> tuple[float, float]:
        wall, computing = self._form.unpack_from(self._memory)
        return wall, computing

    def reset(self) -> None:
        self._form.pack_into(self._memory, 0, 0.0, 0.0)

    async def keep(self) -> None:
        """Tick. More than the pause between two ticks is a hold: a callback's, or a thread's with the GIL."""
        wall, computed = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now, now_computed = time.perf_counter(), time.process_time()
            held = max(0.0, now - wall - TICK_SECONDS)
            longest, longest_computing = self.read()
            computing = min(held, now_computed - computed)
            self._form.pack_into(self._memory, 0, max(longest, held), max(longest_computing, computing))
            wall, computed = now, now_computed


def watched(serve: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    async def run(*arguments: Any, **options: Any) -> None:
        task = asyncio.create_task(watch.keep())
        try:
            await serve(*arguments, **options)
        finally:
            task.cancel()

    return run


if __name__ == "__main__":
    uvicorn.Server.serve = watched(uvicorn.Server.serve, Watch(Path(sys.argv.pop(1))))  # type: ignore[method-assign]
    main()
