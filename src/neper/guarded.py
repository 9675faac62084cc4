"""Commands of a terminal: their failures are one line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from neper.errors import NeperError, StartupError

INTERRUPTED = 130
READER_GONE = 141

PLAIN_HELP: dict[str, Any] = {"rich_markup_mode": None, "no_args_is_help": True, "add_completion": False}
"""Settings of a typer app whose help reads the same on a terminal, in a pipe and in docs/cli.md."""


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn failures into one line on stderr and an exit code."""

    @functools.wraps(command)
    def guard(*args: Any, **kwargs: Any) -> None:
        try:
            if not _open_standard_streams() and command.__name__ != "serve":
                raise StartupError("standard output is closed: there is nowhere to write to")
            command(*args, **kwargs)
            sys.stdout.flush()
        except NeperError as error:
            _fail(str(error))
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            drop_stdout()
            raise typer.Exit(READER_GONE) from None
        except OSError as error:
            drop_stdout()
            _fail(f"cannot write: {error.strerror or error}" if error.filename is None else f"{error}")

    return guard


def _fail(message: str) -> NoReturn:
    """One line on stderr, and the exit code of errors."""
    with contextlib.suppress(OSError):  # stderr may be full as well
        line, mark, log = message.partition(":\n")  # the last lines of another program's log stay lines
        typer.echo(f"neper: error: {' '.join(line.split())}{mark}{log}", err=True)
    raise typer.Exit(1) from None


def drop_stdout() -> None:
    """Drop buffered output. It would fail again, with a traceback, when the interpreter closes stdout."""
    if sys.stdout is sys.stderr:  # `neper engine` writes to a descriptor of its own
        return
    with contextlib.suppress(OSError, ValueError):  # a test's stdout has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_standard_streams() -> bool:
    """Open an empty stream for each standard stream that the process was started without. False = there is no stdout.

    Otherwise the next file or socket would be opened in its place, and a print would write to it.
    """
    had_stdout = sys.stdout is not None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for the whole process)
    return had_stdout
