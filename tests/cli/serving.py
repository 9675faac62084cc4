"""A `neper serve` of its own process, for tests."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

START_SECONDS = 300


class ServerProcess:
    """`neper serve ARGUMENTS` on 127.0.0.1 and a free port; killed, if it still runs, when the context is left.

    Args:
        python: the interpreter.
        program: the module that is run in neper's place, and what it takes before "serve".

    Attributes:
        url: where it serves; "" before `wait_ready`.
        command: the curl line that it printed.
    """

    def __init__(
        self, *arguments: str | Path, python: str | Path = sys.executable, program: Sequence[str] = ("neper",)
    ) -> None:
        self.url = ""
        self.command = ""
        self.process = subprocess.Popen(
            # One thread: two that wait for each other on a busy machine make a tiny model many times slower.
            [python, "-m", *program, "serve", *map(str, arguments), "--port", "0", "--num-threads", "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> ServerProcess:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+", line)
        if match is None:
            raise AssertionError(f"the server did not start: {line!r} {self.finish()}")
        self.url = match[0]
        self.command = self.process.stdout.readline()
        return self

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def finish(self, timeout: float = START_SECONDS) -> tuple[int, str]:
        """Exit code and stderr, once it has ended."""
        _, stderr = self.process.communicate(timeout=timeout)
        return self.process.returncode, stderr

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()
