"""Meter: the progress of a run on stderr, with its rate and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

_SECONDS = 10.0
"""Between two lines, where there is no terminal."""


class Meter:
    """Shows a bar on a terminal, and a line every ten seconds elsewhere. A context manager.

    Args:
        done: the part of the rows that earlier runs have scored, 0 to 1.
        clock: seconds, from any origin.
    """

    def __init__(self, stream: TextIO, done: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._before = done
        self._rows = self._tokens = 0
        self._start = self._last = clock()
        console = Console(file=stream, markup=False, highlight=False)
        self._bar = Progress(
            TextColumn("scoring"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1.0)

    def advance(self, rows: int, tokens: int, done: float) -> None:
        """So many more rows are done, which had so many scored tokens, and that part of all rows."""
        self._rows += rows
        self._tokens += tokens
        now = self._clock()
        text = self._text(now - self._start, done)
        self._bar.update(self._task, description=text, completed=done, refresh=True)
        if self._bar.disable and now - self._last >= _SECONDS:
            self._last = now
            self._stream.write(f"scoring: {100 * done:.0f} %, {text}\n")
            self._stream.flush()

    def _text(self, seconds: float, done: float) -> str:
        seconds = max(seconds, 1e-9)
        rates = f"{self._rows / seconds:,.1f} rows/s, {self._tokens / seconds:,.0f} tokens/s"
        share = done - self._before
        left = f"{_duration(seconds * (1 - done) / share)} left" if share > 0 else "time left not known"
        return f"{self._rows:,} rows, {rates}, {left}"

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
