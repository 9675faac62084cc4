"""LineEngine at its start and its end: what does not start says why, and nothing outlives it."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from neper.config import LineEngineConfig
from neper.errors import StartupError
from neper.wire.drive import LineEngine
from tests.wire.driven import (
    BOTH,
    LOOPS,
    TWO,
    VOCAB_SIZE,
    driven,
    error_of,
    go,
    gone,
    request,
    steps,
    until,
)

pytestmark = pytest.mark.usefixtures("soon")


def test_lines_while_it_starts_show_that_it_lives(tmp_path: Path) -> None:
    async def test() -> None:
        beats = [{"print": ["Hello, I am an engine", "INFO loading"]}, {"sleep": 0.05}] * 6
        async with driven(tmp_path, starts=[[*beats, *steps("READY 512 stop")]], start_timeout=0.2) as child:
            await child.next_is_right()

    go(test())


@LOOPS
@pytest.mark.parametrize(
    ("start", "says"),
    [
        ([{"sleep": 600}], "0.2 seconds"),
        ([{"print": ["INFO loading"]}, {"sleep": 600}], "0.2 seconds"),
        ([{"print": ["INFO loading"]}, {"exit": 7}], "status 7"),
        ([{"exit": 0}], "status 0"),
        ([{"stderr": 5000}, {"exit": 7}], "status 7"),
        ([{"spawn": True}, {"exit": 7}], "status 7"),
        ([{"print": ["READY soon"]}, {"sleep": 600}], "READY soon"),
        ([{"print": ["READY"]}, {"sleep": 600}], "READY"),
        ([{"print": ["READY 0"]}, {"sleep": 600}], "READY 0"),
        ([{"print": ["READY 512 slots=many"]}, {"sleep": 600}], "slots=many"),
        ([{"print": ["Hello, I am an engine"]}, {"sleep": 600}], "0.2 seconds"),
        ([{"print": ["INFO vocab_size=many", "READY 512"]}, {"sleep": 600}], "vocab_size"),
    ],
)
def test_engines_that_do_not_start(tmp_path: Path, start: list[dict[str, Any]], says: str, loop: Any) -> None:
    async def test() -> None:
        (tmp_path / "log").write_text("a line from before\n")
        with pytest.raises(StartupError) as failed:
            async with driven(tmp_path, starts=[[{"stderr": 500}, *start]], start_timeout=0.2):
                pass
        assert says in str(failed.value)
        assert "a line of the engine's log" in str(failed.value)
        assert "from before" not in str(failed.value)
        assert len(str(failed.value)) < 4000
        notes = (tmp_path / "record").read_text().splitlines()
        for note in notes:
            pid = json.loads(note.split(" ", 1)[1])
            await until(lambda pid=pid: gone(pid if isinstance(pid, int) else pid[0]), 1)  # type: ignore[misc]

    go(test(), loop)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("/no/such/engine --serve", "/no/such/engine"),
        ("engine 'unbalanced", "engine"),
        ("", "engine"),
        ("  ", "engine"),
        ("/etc", "/etc"),
    ],
)
def test_commands_that_cannot_be_run(tmp_path: Path, command: str, says: str) -> None:
    async def test() -> None:
        async def start() -> None:
            config = LineEngineConfig(engine_command=command, tokenizer="none", engine_log=str(tmp_path / "log"))
            await LineEngine(config, vocab_size=VOCAB_SIZE).start()

        with pytest.raises(StartupError, match=says):
            await start()

    go(test())


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(StartupError, match="nowhere"):
            async with driven(tmp_path, engine_log=str(tmp_path / "nowhere" / "log")):
                pass

    go(test())


@LOOPS
@BOTH
def test_close_says_quit(tmp_path: Path, ready: str, loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neper.wire.child._EXIT_SECONDS", 8.0)

    async def test() -> None:
        async with driven(tmp_path, ready) as child:
            await child.next_is_right()
            began = time.monotonic()
            await child.engine.close()
            assert time.monotonic() - began < 6  # it was not waited for in vain
            assert child.received[-1] == "QUIT"
            assert not child.engine.alive
            assert gone(child.pids[0])
            await child.engine.close()
            assert len(child.pids) == 1

    go(test(), loop)


@LOOPS
@BOTH
@pytest.mark.parametrize("ignores", ["QUIT", "signals too", "everything"])
def test_close_ends_what_ignores_it_and_its_children(tmp_path: Path, ready: str, ignores: str, loop: Any) -> None:
    async def test() -> None:
        start: list[dict[str, Any]] = [{"spawn": True}, *steps(ready)]
        start += {"QUIT": [], "signals too": [{"deaf": True}], "everything": [{"deaf": True}, {"freeze": True}]}[
            ignores
        ]
        async with driven(tmp_path, starts=[start], quits=False) as child:
            stream = child.engine.submit(request("0", listed=1))
            await until(lambda: child.notes("GEN"))
            await child.engine.close()
            assert gone(child.pids[0])
            [spawned] = child.notes("#spawned")
            await until(lambda: gone(int(spawned)), 1)
            stream.close()

    go(test(), loop)


@BOTH
def test_close_ends_open_streams(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready, gens=[steps(*TWO[:2])] * 3) as child:
            streams = [child.engine.submit(request(f"{number}", listed=2)) for number in range(5)]
            await streams[0].__anext__()
            await child.engine.close()
            for stream in streams[1:]:
                chunks, _ = await error_of(stream)
                assert all(chunk.finish_reason is None for chunk in chunks)
            await error_of(streams[0])

    go(test())


@LOOPS
def test_close_while_it_is_being_started_again(tmp_path: Path, loop: Any) -> None:
    async def test() -> None:
        starts: list[list[dict[str, Any]]] = [steps("READY 512"), [{"sleep": 600}]]
        async with driven(tmp_path, starts=starts, gens=[[{"exit": 1}]], start_timeout=600) as child:
            waiting = [child.engine.submit(request(f"{number}")) for number in range(2)]
            await error_of(waiting[0])
            await until(lambda: len(child.pids) == 2)
            await child.engine.close()
            await error_of(waiting[1])
            assert gone(child.pids[1])
            assert len(child.pids) == 2

    go(test(), loop)


@LOOPS
def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path, loop: Any) -> None:
    async def test() -> None:
        async def start() -> None:
            async with driven(tmp_path, starts=[[{"deaf": True}, {"sleep": 600}]], start_timeout=600):
                pass

        starting = asyncio.ensure_future(start())
        record = tmp_path / "record"
        await until(lambda: record.exists() and record.read_text())
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert gone(json.loads(record.read_text().split(" ", 1)[1])[0])

    go(test(), loop)
