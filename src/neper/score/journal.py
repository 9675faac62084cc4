"""Journal: how far the output of a run has come, in a file that also keeps other processes from the same output.

Its first line says what is scored and how. Each further line is a Commit: the state of the output's files after a
window of rows. A line that a killed process wrote in part does not count.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from neper.errors import StartupError


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a run, and the sizes in bytes of the files that hold it.

    Attributes:
        row: the number of the last row.
        scored, failed: how many rows.
        complete: the pieces hold all rows, and the result is being made of them.
    """

    row: int = 0
    pieces: int = 0
    errors: int = 0
    scored: int = 0
    failed: int = 0
    complete: bool = False


class Journal:
    """The journal at a path, locked until it is closed or its process ends.

    Attributes:
        run: what the first line says; None in a new journal.
        last: the last commit.

    Raises:
        StartupError: another process has it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            self._file = path.open("a+b")
            try:
                _lock(self._file.fileno())
            except BlockingIOError:
                self._file.close()
                raise StartupError(f"another process is writing this output: it holds {path}") from None
            # One that another process has just removed would be nobody's.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file.fileno()), path.stat()):
                    break
            self._file.close()
        self.run: dict[str, Any] | None = None
        self.last = Commit()
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def begin(self, run: dict[str, Any]) -> None:
        self.run = run
        self._append(run)

    def commit(self, commit: Commit) -> None:
        self.last = commit
        self._append(commit)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()

    def _read(self) -> None:
        self._file.seek(0)
        read = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            try:
                if self.run is None:
                    self.run = msgspec.json.decode(line, type=dict[str, Any])
                else:
                    self.last = msgspec.json.decode(line, type=Commit)
            except msgspec.DecodeError as error:
                raise StartupError(f"{self.path} is no journal of neper: {error}") from None
            read += len(line)
        self._file.truncate(read)

    def _append(self, value: Any) -> None:
        self._file.write(msgspec.json.encode(value) + b"\n")
        sync(self._file)


def sync(file: Any) -> None:
    """Flush a file's buffer, and let the system write it to the disk."""
    file.flush()
    os.fsync(file.fileno())


def _lock(descriptor: int) -> None:
    """Lock a file; BlockingIOError where it is locked. Where files cannot be locked, nothing is done."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # some network file systems
        return
