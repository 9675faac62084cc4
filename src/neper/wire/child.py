"""A child process that speaks lines: its stdout as lines, its stderr in a file, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from neper.errors import StartupError

MAX_LINE = 16 * 2**20
"""Most bytes of a line. Only the two ends of a longer line are kept."""

_END = 500
_EXIT_SECONDS = 10.0
# The pipe may still hold the last words of a process that has ended.
_LAST_LINES_SECONDS = 0.1
_SHOWN_LOG = 2000


class Child(asyncio.SubprocessProtocol):
    """A process in a session of its own, so that a Ctrl-C in the terminal is ours to handle.

    Args:
        on_lines: called with whole lines, without line feeds, as they come. An incomplete line at the end is dropped.
        log: a file that the process's stderr is appended to.
        farewell: the line that asks it to end.

    Attributes:
        on_lines: can be changed at any time.
        gone: done once the process can say nothing more.
    """

    def __init__(self, on_lines: Callable[[list[bytes]], None], log: Path, *, farewell: bytes) -> None:
        self.on_lines = on_lines
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._farewell = farewell
        self._log = log
        self._log_start = 0
        self._exited = asyncio.Event()
        self._silent = False
        self._closing = False
        self._parts: list[bytes] = []
        self._size = 0
        self._transport: asyncio.SubprocessTransport | None = None

    async def start(self, command: list[str]) -> None:
        """Run a command. Raises StartupError when there is no such program, or the log cannot be written."""
        try:
            with self._log.open("ab") as stderr:
                self._log_start = stderr.tell()
                await asyncio.get_running_loop().subprocess_exec(
                    lambda: self, *command, stdin=-1, stdout=-1, stderr=stderr, start_new_session=True
                )
        except OSError as error:
            raise StartupError(f"the engine could not be started: {command[0]}: {error}") from None

    @property
    def status(self) -> int | None:
        """The exit status, once it has ended; negative: the signal that ended it."""
        return None if self._transport is None else self._transport.get_returncode()

    def write(self, line: bytes) -> None:
        """Send a line. A line that cannot be sent is lost with the process, whose end is noticed elsewhere."""
        if self._transport is not None and (stdin := self._transport.get_pipe_transport(0)) is not None:
            cast("asyncio.WriteTransport", stdin).write(line)

    def last_words(self) -> str:
        """The end of its stderr; "" where it wrote nothing."""
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - _SHOWN_LOG))
            return log.read().decode("utf-8", "replace").strip()
        return ""

    async def close(self, *, kill: bool = False) -> None:
        """End the process and those that it started. Unless `kill`, it first gets its farewell and time to end."""
        if self._transport is None:
            return
        self._closing = True
        if not kill and self.status is None:
            self.write(self._farewell)
            if (stdin := self._transport.get_pipe_transport(0)) is not None:
                stdin.close()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._exited.wait(), _EXIT_SECONDS)
        if self.status is None:
            self._kill()
            await self._exited.wait()
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join([*self._parts, lines[0]])
            self._parts, self._size = [], 0
            self.on_lines(lines)
        self._parts.append(rest)
        self._size += len(rest)
        if self._size > MAX_LINE:
            # The name of its request is at its end. The byte between is not text, so that no number can be misread.
            line = b"".join(self._parts)
            self._parts = [line[:_END] + b" \xff " + line[-_END:]]
            self._size = len(self._parts[0])

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self._silent = True
            self._end()
        elif fd == 0 and not self._closing:
            self._kill()  # no line can reach it any more

    def process_exited(self) -> None:
        self._exited.set()
        self._kill()  # its own children must not outlive it
        self._end()

    def _end(self) -> None:
        """Note that it has exited or closed its stdout. The other one follows soon, or does not matter."""
        if self._silent and self._exited.is_set():
            self._set_gone()
        else:
            asyncio.get_running_loop().call_later(_LAST_LINES_SECONDS, self._set_gone)

    def _set_gone(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    def _kill(self) -> None:
        assert self._transport is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if sys.platform == "win32":
                self._transport.kill()
            else:
                os.killpg(self._transport.get_pid(), signal.SIGKILL)
