"""The progress of a run, by a clock of the test's own."""

from __future__ import annotations

import io

from neper.score.meter import Meter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, done: float = 0.0) -> str:
    """What is shown of 50 windows in 100 seconds, each of 10 rows and 500 tokens, of twice as many."""
    now = 0.0
    with Meter(stream, done, lambda: now) as meter:
        for window in range(1, 51):
            now = 2.0 * window
            meter.advance(10, 500, done + (1 - done) * window / 100)
    return stream.getvalue()


def test_a_file_gets_a_line_every_ten_seconds() -> None:
    lines = shown(io.StringIO()).splitlines()
    assert len(lines) == 10
    assert lines[0] == "scoring: 5 %, 50 rows, 5.0 rows/s, 250 tokens/s, 3:10 left"
    assert lines[-1] == "scoring: 50 %, 500 rows, 5.0 rows/s, 250 tokens/s, 1:40 left"


def test_rates_are_those_of_this_run() -> None:
    assert (
        shown(io.StringIO(), done=0.5).splitlines()[-1].endswith("75 %, 500 rows, 5.0 rows/s, 250 tokens/s, 1:40 left")
    )


def test_a_terminal_sees_a_bar_that_is_wiped_at_the_end() -> None:
    output = shown(Terminal())
    assert "━" in output
    assert "5.0 rows/s" in output
    assert "\n" not in output.rstrip("\n").rsplit("\n", 1)[-1]
    assert output.endswith("\x1b[2K")
