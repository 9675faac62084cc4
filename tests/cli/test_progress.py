from __future__ import annotations

import io

from neper.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_one_line_rewritten_per_percent_and_wiped_at_the_end() -> None:
    out = Terminal()
    with ProgressLine(out) as progress:
        for done in range(1001):
            progress(done, 1000, "loading weights")
    shown = out.getvalue().split("\r")
    assert [text for text in shown if text.strip()] == [f"loading weights: {n} %" for n in range(101)]
    assert shown[-2:] == [" " * len("loading weights: 100 %"), ""]
    assert "\n" not in out.getvalue()


def test_a_file_gets_one_line_a_step() -> None:
    out = io.StringIO()
    with ProgressLine(out) as progress:
        for what in ("converting", "loading"):
            for done in range(3):
                progress(done, 2, what)
    assert out.getvalue() == "converting ...\nloading ...\n"


def test_nothing_done_nothing_said() -> None:
    out = Terminal()
    with ProgressLine(out):
        pass
    assert out.getvalue() == ""
