"""Files of unknown origin: they are read only if they are regular, and not larger than such a file can be."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from neper.errors import ModelLoadError, NeperError

logger = logging.getLogger("neper.models")

MAX_JSON = 16 * 2**20
"""Bytes of a JSON file that is read here: configurations and indices. The largest known ones are below 2 MiB."""

MAX_TOKENIZER = 128 * 2**20
"""Bytes of a tokenizer's file. The largest known ones are below 40 MiB."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_LINE = 400
_MESSAGE = 1500


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn every failure inside into an error about this file.

    Raises:
        ModelLoadError: one line that names the file; the rest goes to the log, at debug.
    """
    try:
        yield
    except ModelLoadError as error:
        # It may quote the file, which may hold anything.
        message = one_line(error.message, _MESSAGE)
        if message == error.message:
            raise
        raise ModelLoadError(message) from error
    except NeperError:
        raise
    except OSError as error:
        logger.debug("reading %s failed", path, exc_info=True)
        raise ModelLoadError(f"cannot read {path}: {error.strerror or one_line(error)}") from error
    except MemoryError as error:
        raise ModelLoadError(f"cannot read {path}: there is too little memory for what it asks for") from error
    except RecursionError as error:
        raise ModelLoadError(f"cannot read {path}: it is nested too deeply") from error
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        logger.debug("reading %s failed", path, exc_info=True)
        raise ModelLoadError(f"cannot read {path}: {one_line(error) or type(error).__name__}") from error


def one_line(error: object, limit: int = _LINE) -> str:
    """The text of an error, on one line that is not too long."""
    text = " ".join(str(error).split())
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. A pipe or a device could make us wait for ever.

    Raises:
        ModelLoadError: it is not there, not regular, not readable, or a pointer of Git LFS in its place.
    """
    with reading(path):
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        except (FileNotFoundError, NotADirectoryError):
            raise ModelLoadError(f"{path.parent} has no {path.name}") from None
        file = os.fdopen(descriptor, "rb")
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ModelLoadError(f"{path} is not a regular file")
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ModelLoadError(
                    f"{path} is a Git LFS pointer in place of the file: run `git lfs pull` in its directory"
                )
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file


def read_bytes(path: Path, limit: int) -> bytes:
    """A whole regular file of at most `limit` bytes; ModelLoadError otherwise."""
    with open_regular(path) as file, reading(path):
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ModelLoadError(f"{path} has more than {limit} bytes, which no such file needs")
    return data


def read_text(path: Path, limit: int = MAX_JSON) -> str:
    """A UTF-8 text of at most `limit` bytes; ModelLoadError otherwise."""
    data = read_bytes(path, limit)
    with reading(path):
        return data.decode("utf-8-sig")


def read_json(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        unique: a key that stands twice in an object is an error. (Otherwise the last one counts, as with most readers.)

    Raises:
        ModelLoadError: there is no such file, it is too large, it is not JSON, or not an object.
    """
    text = read_text(path)
    with reading(path):
        values = json.loads(text, object_pairs_hook=_unique if unique else None, parse_constant=_no_number)
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key!r} stands twice in one object")
        values[key] = value
    return values


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def inside(directory: Path, name: Any) -> Path:
    """The file of that name in a directory, or below it.

    Only the name is checked. Links may lead out: the hub's cache is made of them.

    Raises:
        ModelLoadError: the name leads out of the directory, or is no name.
    """
    text = name if isinstance(name, str) else ""
    parts = text.replace("\\", "/").split("/")
    if "\0" in text or ".." in parts or not parts[0] or ":" in parts[0] or not parts[-1].strip("."):
        raise ModelLoadError(f"{directory} names a file that is not in it: {one_line(repr(name))}")
    return directory / text
