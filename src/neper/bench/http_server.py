"""The server under measurement: `neper serve` in a process of its own, and the CPU time that it has used."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from neper.errors import StartupError

_STOP_SECONDS = 20
_LAST_LINES = 10


@dataclass(frozen=True)
class Server:
    """A running `neper serve`; `serving` makes one.

    Attributes:
        pid: that of the API process.
        port: the port that it listens on.
    """

    pid: int
    port: int
    stderr: IO[bytes]

    def cpu_seconds(self) -> float | None:
        """CPU time of all threads of the API process, without its engine; None where there is no /proc.

        The system counts it in ticks, of 10 ms usually.
        """
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return None
        # The second field is the command in parentheses, and may hold anything.
        fields = stat[stat.rindex(")") + 2 :].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def last_lines(self) -> str:
        """The end of its stderr."""
        return _last_lines(self.stderr)


@contextlib.contextmanager
def serving(arguments: Sequence[str]) -> Iterator[Server]:
    """`neper serve ARGUMENTS` on 127.0.0.1 and a free port, ready, and ended with the context.

    Raises:
        StartupError: it ended before it was ready; its last lines say why.
    """
    command = [sys.executable, "-m", "neper", "serve", *arguments, "--host", "127.0.0.1", "--port", "0"]
    command += ["--log-level", "warning"]
    # stderr is a file, since a full pipe that nobody reads would stop the server.
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            assert process.stdout is not None
            ready = re.search(r" on http://127\.0\.0\.1:(\d+) ", process.stdout.readline())
            if ready is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_SECONDS)  # its last line is written by then
                raise StartupError(f"bench http: the server did not start; its last lines:\n{_last_lines(stderr)}")
            yield Server(process.pid, int(ready[1]), stderr)
        finally:
            _stop(process)


def _last_lines(stderr: IO[bytes]) -> str:
    stderr.seek(0)
    return "\n".join(stderr.read().decode("utf-8", "replace").splitlines()[-_LAST_LINES:])


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # its engine notices and ends
        process.communicate()
