"""Scratch directories, whose owners may be killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from neper.engine.remote.client import _socket_directory
from neper.errors import StartupError
from neper.scratch import ScratchDirectory

OWNER = """
import sys
from pathlib import Path
from neper.scratch import ScratchDirectory
print(ScratchDirectory("x-", Path(sys.argv[1])).path, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="directories cannot be locked")
def test_case_120_what_the_killed_left_goes_and_what_the_living_use_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        used = Path(owner.stdout.readline().strip())
        (used / "file").touch()
        (tmp_path / "y-other").mkdir()
        with ScratchDirectory("x-", tmp_path) as mine:
            assert sorted(tmp_path.iterdir()) == sorted([mine, used, tmp_path / "y-other"])
        assert not mine.exists()
        owner.kill()
        owner.wait()
        with ScratchDirectory("x-", tmp_path) as mine:
            assert sorted(tmp_path.iterdir()) == sorted([mine, tmp_path / "y-other"])


def test_many_at_once_each_get_one_of_their_own(tmp_path: Path) -> None:
    """A new one that is not locked yet may be taken for one that was left; its owner then makes another."""

    async def run() -> None:
        made = await asyncio.gather(*(asyncio.to_thread(lambda: ScratchDirectory("x-", tmp_path)) for _ in range(50)))
        assert len({scratch.path for scratch in made}) == 50
        assert all(scratch.path.is_dir() for scratch in made)
        for scratch in made:
            scratch.close()
            scratch.close()

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_case_120_a_long_directory_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir()
    for temporary in (str(long), "/no/such/directory"):
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        scratch = _socket_directory()
        assert len(os.fsencode(scratch.path / "from-engine")) <= 103
        assert scratch.path.is_dir()
        assert long not in scratch.path.parents
        scratch.close()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: (_ for _ in ()).throw(PermissionError()))
    with pytest.raises(StartupError, match="is too long for the path of a socket; set TMPDIR"):
        _socket_directory()
