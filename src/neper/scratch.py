"""Scratch directories. The process that made one removes it. Where that process was killed, the next one does.

A process holds a lock on its directory as long as it lives. The kernel releases the locks of processes that ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

# Some directories cannot be locked (some network file systems, Windows): there age alone says that one is abandoned.
_STALE_SECONDS = 3600.0


class ScratchDirectory:
    """A new private directory `PREFIX…` in `parent`. Those that dead processes left under that prefix are removed.

    Raises OSError when it cannot be made.
    """

    def __init__(self, prefix: str, parent: Path) -> None:
        for left in parent.glob(f"{prefix}*"):
            _remove_if_left(left)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            # Before it is locked, another process may take it for an abandoned one.
            with contextlib.suppress(BlockingIOError):
                self._lock = _lock(self.path)
                if self.path.is_dir():
                    return
                self._unlock()

    def close(self) -> None:
        """Remove it, unless it was moved. Safe more than once."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.close()


def _lock(path: Path) -> int | None:
    """A locked descriptor of a directory. None: it cannot be locked here. Raises BlockingIOError: it is in use."""
    try:
        import fcntl

        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_if_left(path: Path) -> None:
    with contextlib.suppress(OSError):  # in use, another user's, or gone meanwhile
        lock = _lock(path)
        try:
            newest = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
            if lock is not None or time.time() - newest > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        finally:
            if lock is not None:
                os.close(lock)
