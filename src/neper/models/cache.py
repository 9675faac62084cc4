"""Where converted models are kept."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

CONVERTER_VERSION = 1
"""Part of the cache key: raise it when converted directories change."""


def default_cache_dir() -> Path:
    """`neper` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "neper"


def directory(cache_dir: Path, key: str) -> Path:
    """The place of the conversion `key`, whether it is there or not."""
    return cache_dir / f"{key}-v{CONVERTER_VERSION}"


def cached(cache_dir: Path, key: str) -> Path | None:
    """The finished conversion `key` in `cache_dir`, if there is one."""
    finished = directory(cache_dir, key)
    return finished if (finished / "config.json").is_file() else None


def file_key(path: Path) -> str:
    """A cache key for the file as it is now: its name, and a hash of path, size and time of change."""
    status = path.stat()
    identity = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
