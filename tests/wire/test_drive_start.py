"""LineEngine at its start and its end: what does not start says why, and nothing outlives it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from neper.config import LineEngineConfig
from neper.errors import StartupError
from neper.wire.child import Child
from neper.wire.drive import LineEngine
from neper.wire.handshake import Handshake
from tests.wire.driven import (
    BOTH,
    LOOPS,
    SILENCE,
    TWO,
    VOCAB_SIZE,
    Clock,
    driven,
    error_of,
    go,
    gone,
    request,
    steps,
    until,
)

pytestmark = pytest.mark.usefixtures("soon")


def test_lines_while_it_starts_show_that_it_lives(tmp_path: Path, clock: Clock) -> None:
    async def test() -> None:
        child = Child(lambda lines: None, tmp_path / "log", farewell=b"")
        handshake = Handshake(SILENCE)
        ready = asyncio.ensure_future(handshake.ready(child))
        for line in [b"Hello, I am an engine", b"INFO loading", b"INFO a=1"] * 4:
            clock.now += 0.9 * SILENCE
            handshake.take([line])
            await asyncio.sleep(0)
        handshake.take([b"READY 512 stop"])
        assert (await ready).context == 512

    go(test())


SILENT: list[list[dict[str, Any]]] = [
    [{"sleep": 600}],
    [{"print": ["INFO loading"]}, {"sleep": 600}],
    [{"print": ["Hello, I am an engine"]}, {"sleep": 600}],
]


@LOOPS
@pytest.mark.parametrize("start", SILENT)
def test_case_121_engines_that_say_nothing(
    tmp_path: Path, start: list[dict[str, Any]], loop: Any, clock: Clock
) -> None:
    """Time passes once the process has come to where it is silent, however long that takes it."""

    async def test() -> None:
        log = tmp_path / "log"
        log.touch()

        async def pass_time() -> None:
            await until(lambda: "a line of the engine's log" in log.read_text())
            while True:
                clock.now += SILENCE
                await asyncio.sleep(SILENCE)

        passing = asyncio.ensure_future(pass_time())
        with pytest.raises(StartupError) as failed:
            async with driven(tmp_path, starts=[[{"stderr": 500}, *start]], start_timeout=SILENCE):
                pass
        passing.cancel()
        await says_why(tmp_path, failed.value, f"said nothing for {SILENCE} seconds")

    go(test(), loop)


@LOOPS
@pytest.mark.parametrize(
    ("start", "says"),
    [
        ([{"print": ["INFO loading"]}, {"exit": 7}], "status 7"),
        ([{"exit": 0}], "status 0"),
        ([{"stderr": 5000}, {"exit": 7}], "status 7"),
        ([{"spawn": True}, {"exit": 7}], "status 7"),
        ([{"print": ["READY soon"]}, {"sleep": 600}], "READY soon"),
        ([{"print": ["READY"]}, {"sleep": 600}], "READY"),
        ([{"print": ["READY 0"]}, {"sleep": 600}], "READY 0"),
        ([{"print": ["READY 512 slots=many"]}, {"sleep": 600}], "slots=many"),
        ([{"print": ["INFO vocab_size=99999999999", "READY 512"]}, {"sleep": 600}], "more than 4194304"),  # case 95
        ([{"print": ["INFO vocab_size=many", "READY 512"]}, {"sleep": 600}], "vocab_size"),
    ],
)
def test_engines_that_do_not_start(tmp_path: Path, start: list[dict[str, Any]], says: str, loop: Any) -> None:
    async def test() -> None:
        (tmp_path / "log").write_text("a line from before\n")
        with pytest.raises(StartupError) as failed:
            async with driven(tmp_path, starts=[[{"stderr": 500}, *start]]):
                pass
        await says_why(tmp_path, failed.value, says)

    go(test(), loop)


async def says_why(directory: Path, error: StartupError, says: str) -> None:
    """The error has the end of the engine's log of this start, and nothing of the engine is left."""
    assert says in str(error)
    assert "a line of the engine's log" in str(error)
    assert "from before" not in str(error)
    assert len(str(error)) < 4000
    for note in (directory / "record").read_text().splitlines():
        pid = json.loads(note.split(" ", 1)[1])
        await until(lambda pid=pid: gone(pid if isinstance(pid, int) else pid[0]))  # type: ignore[misc]


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
    monkeypatch.setattr("neper.wire.child._EXIT_SECONDS", 600.0)  # it is not waited for in vain

    async def test() -> None:
        async with driven(tmp_path, ready) as child:
            await child.next_is_right()
            await child.engine.close()
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
            await until(lambda: gone(int(spawned)))
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
