"""A line on stderr that shows the progress of a long step."""

from __future__ import annotations

from typing import TextIO


class ProgressLine:
    """Called with (done, total, what). A terminal sees one line that is rewritten; a file gets a line per step.

    Use it as a context manager: leaving it wipes the line.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rewrites = stream.isatty()
        self._shown: tuple[str, int] | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        percent = 100 * done // total if total else 100
        if self._shown == (what, percent) or (not self._rewrites and self._shown and self._shown[0] == what):
            return
        if self._rewrites:
            self._wipe()
            self._stream.write(f"{what}: {percent} %")
        else:
            self._stream.write(f"{what} ...\n")
        self._stream.flush()
        self._shown = (what, percent)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *error: object) -> None:
        if self._rewrites:
            self._wipe()
            self._stream.flush()

    def _wipe(self) -> None:
        if self._shown:
            width = len(f"{self._shown[0]}: {self._shown[1]} %")
            self._stream.write("\r" + " " * width + "\r")
