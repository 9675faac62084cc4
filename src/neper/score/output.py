"""Output: the result of a run and its errors, written so that a run that was killed can go on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from neper.errors import StartupError
from neper.score.form import Writer
from neper.score.journal import Commit, Journal, sync


class Output:
    """Appends rows, a window at a time, to OUT.part and to the file of errors. At the end OUT.part becomes OUT.

    What stands behind the sizes in the journal was not committed, and is cut off by the next run.

    Attributes:
        pieces: OUT.part.

    Args:
        target: the result, OUT.
        errors: a line of JSON per failed row: its number and the reason. It exists where there is one.
        run: what is scored and how: a run that is continued must be of the same.

    Raises:
        StartupError: the result exists, another process writes it, or it was begun by a run of something else.
    """

    def __init__(self, target: Path, errors: Path, run: dict[str, Any]) -> None:
        self.target = target
        self.errors = errors
        self.pieces = target.with_name(target.name + ".part")
        self._journal = Journal(target.with_name(target.name + ".journal"))
        with ExitStack() as opened:
            opened.callback(self._journal.close)
            opened.callback(self._tidy)
            if self._journal.run is None:
                self._check_free()
                self._journal.begin(run)
            else:
                self._check_same(run)
            if self.last.complete and not self.pieces.exists():
                self._pieces = None
            else:
                self._pieces = opened.enter_context(self.pieces.open("ab"))
                self._cut(self.pieces, self.last.pieces)
            self._errors = opened.enter_context(errors.open("ab"))
            self._cut(errors, self.last.errors)
            self._opened = opened.pop_all()

    @property
    def last(self) -> Commit:
        return self._journal.last

    def commit(self, row: int, pieces: bytes, scored: int, failures: Sequence[tuple[int, str]]) -> None:
        """Append what came of the rows up to number `row`."""
        assert self._pieces is not None
        lines = b"".join(msgspec.json.encode({"row": n, "error": reason}) + b"\n" for n, reason in failures)
        for file, data in ((self._pieces, pieces), (self._errors, lines)):
            if data:
                file.write(data)
                sync(file)
        last = self.last
        commit = Commit(
            row=row,
            pieces=last.pieces + len(pieces),
            errors=last.errors + len(lines),
            scored=last.scored + scored,
            failed=last.failed + len(failures),
        )
        self._journal.commit(commit)

    def finish(self, writer: Writer) -> None:
        """Make the result. All rows have been committed."""
        if not self.last.complete:
            if self.target.exists():
                raise StartupError(f"{self.target} was made by something else meanwhile; the rows are in {self.pieces}")
            self._journal.commit(msgspec.structs.replace(self.last, complete=True))
        if self._pieces is not None:
            writer.finish(self.pieces, self.target)

    def close(self) -> None:
        """Leave the files to a run that goes on, or remove those that none needs."""
        self._opened.close()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _tidy(self) -> None:
        """Remove what no run needs any more."""
        done = self.last.complete and not self.pieces.exists()
        nothing = self.last == Commit() and self._journal.run is not None
        if nothing:
            self.pieces.unlink(missing_ok=True)
        if nothing or (done and not self.last.errors):
            self.errors.unlink(missing_ok=True)
        if done or nothing or self._journal.run is None:
            self._journal.remove()

    def _check_free(self) -> None:
        for path in (self.target, self.errors, self.pieces):
            if path.exists():
                raise StartupError(f"{path} exists already; remove it, or name another file")

    def _check_same(self, run: dict[str, Any]) -> None:
        before = self._journal.run or {}
        for name in (*before, *run):
            if before.get(name) != run.get(name):
                raise StartupError(
                    f"the output was begun with another {name} ({before.get(name)}, now {run.get(name)}); "
                    f"remove {self._journal.path} and {self.pieces} to begin anew"
                )

    def _cut(self, path: Path, size: int) -> None:
        if path.stat().st_size < size:
            raise StartupError(f"{path} has lost rows since; remove it and {self._journal.path} to begin anew")
        os.truncate(path, size)
