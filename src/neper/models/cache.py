"""The cache of converted models."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from neper.errors import ModelLoadError
from neper.machine import format_size

# For the tokenizer and the rest of a converted directory.
_OTHER_FILES = 32 * 2**20

CONVERTER_VERSION = 2
"""Part of the cache key: raise it when converted directories change."""


def default_cache_dir() -> Path:
    """`neper` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "neper"


def directory(cache_dir: Path, key: str) -> Path:
    """The place of the conversion `key`, which may not exist yet."""
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


def check_space(cache_dir: Path, weights: int) -> None:
    """Raises ModelLoadError where `weights` bytes and the files beside them do not fit, before any work is done.

    Args:
        cache_dir: an existing directory.
    """
    needed, free = weights + _OTHER_FILES, shutil.disk_usage(cache_dir).free
    if free < needed:
        raise ModelLoadError(
            f"the converted model needs {format_size(needed)} in {cache_dir}, which has {format_size(free)} left; "
            "free some space there or choose another cache directory (XDG_CACHE_HOME)"
        )
