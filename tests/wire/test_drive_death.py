"""LineEngine and the end of its process: who is told, who waits, and what its log keeps."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from neper.config import LineEngineConfig
from neper.errors import OverloadedError
from neper.types import FinishReason
from neper.wire.drive import LineEngine
from tests.wire.driven import (
    ALL_FORMS,
    BOTH,
    DONE,
    LOOPS,
    PROGRAM,
    TAGGED,
    TWO,
    TWO_ROWS,
    UNTAGGED,
    VOCAB_SIZE,
    Driven,
    Reply,
    another_process,
    driven,
    error_of,
    expected,
    gather,
    go,
    gone,
    request,
    rows_of,
    steps,
    until,
)

pytestmark = pytest.mark.usefixtures("soon")

FIRST_ONLY = {
    "after a token": [*steps(*TWO[:2]), {"exit": 3}],
    "in the middle of a token": [*steps(*TWO[:2]), {"raw": "T 1"}, {"exit": 3}],
    "in the middle of its scores": [*steps(*TWO[:3]), {"raw": "LP -1 7:-0.2"}, {"exit": 3}],
    "while its scores are due": [*steps(*TWO[:3]), {"exit": 0}],
}


@ALL_FORMS
@pytest.mark.parametrize("name", FIRST_ONLY)
def test_death_while_a_request_runs(tmp_path: Path, ready: str, name: str) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready, gens=[FIRST_ONLY[name]]) as child:
            chunks, _ = await error_of(child.engine.submit(request("0", listed=2)))
            assert [found for chunk in chunks for found in rows_of(chunk)] == TWO_ROWS[:1]
            assert all(chunk.finish_reason is None for chunk in chunks)
            with pytest.raises(OverloadedError) as refused:
                child.engine.submit(request("1"))
            assert refused.value.retry_after
            await another_process(child)
            assert child.engine.stats().restarts == 1
            await child.next_is_right()
            assert len(child.pids) == 2

    go(test())


@LOOPS
@BOTH
def test_what_was_said_before_death_counts(tmp_path: Path, ready: str, loop: Any) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready, gens=[[*steps(*TWO, DONE), {"exit": 1}]]) as child:
            assert await child.ask(request("0", max_tokens=2, listed=2)) == Reply([5, 6], TWO_ROWS, FinishReason.LENGTH)
            await another_process(child)
            await child.next_is_right()

    go(test(), loop)


def test_a_death_line_cut_short_is_no_end(tmp_path: Path) -> None:
    async def test() -> None:
        async with driven(tmp_path, gens=[[*steps(*TWO), {"raw": DONE}, {"exit": 1}]]) as child:
            await error_of(child.engine.submit(request("0", max_tokens=2, listed=2)))
            await another_process(child)
            await child.next_is_right()

    go(test())


@BOTH
def test_requests_that_wait_survive_a_death(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        slots = 1 if ready == UNTAGGED else 3
        dying = [*steps(*TWO[:2]), {"wait": f"GEN {slots}"}, {"sleep": 0.01}, {"exit": 1}]
        async with driven(tmp_path, ready, gens=[dying] * slots) as child:
            running = [child.engine.submit(request(f"a-{number}", listed=2)) for number in range(slots)]
            waiting = [request(f"b-{number}", [number], listed=3) for number in range(4)]
            streams = [child.engine.submit(item) for item in waiting]
            await asyncio.gather(*map(error_of, running))
            streams.pop(1).close()
            left = waiting.pop(1)
            assert await asyncio.gather(*map(gather, streams)) == [expected(item) for item in waiting]
            assert len(child.pids) == 2
            assert not [line for line in child.notes("GEN")[slots:] if line.endswith(f" {left.prompt_token_ids[0]}")]
            await child.next_is_right()

    go(test())


@LOOPS
@BOTH
def test_death_between_requests(tmp_path: Path, ready: str, loop: Any) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready) as child:
            await child.asks_right(request("0", listed=2))
            os.kill(child.pids[0], signal.SIGKILL)
            await until(lambda: not child.engine.alive)
            await another_process(child)
            await child.next_is_right()
            assert child.engine.stats().restarts == 1

    go(test(), loop)


def test_an_engine_that_closes_its_stdout_is_started_again(tmp_path: Path) -> None:
    async def test() -> None:
        file = tmp_path / "engine.sh"
        inner = shlex.join([sys.executable, "-I", "-S", str(PROGRAM), str(tmp_path / "script.json")])
        mark = shlex.quote(str(tmp_path / "mark"))
        file.write_text(
            f"if [ -e {mark} ]; then exec {inner}; fi\ntouch {mark}\necho READY 512\nread line\nexec >&-\nsleep 600\n"
        )
        (tmp_path / "script.json").write_text(json.dumps({"record": str(tmp_path / "record")}))
        command = shlex.join(["/bin/sh", str(file)])
        config = LineEngineConfig(engine_command=command, tokenizer="none", engine_log=str(tmp_path / "log"))
        engine = LineEngine(config, vocab_size=VOCAB_SIZE)
        await engine.start()
        try:
            await error_of(engine.submit(request("0", listed=1)))
            child = Driven(engine, tmp_path / "record", VOCAB_SIZE)
            await until(lambda: child.record.exists())
            await another_process(child, 1)
            await child.next_is_right()
        finally:
            await engine.close()

    go(test())


@LOOPS
@BOTH
def test_death_leaves_no_children_and_is_noticed_in_spite_of_them(tmp_path: Path, ready: str, loop: Any) -> None:
    async def test() -> None:
        gens = [[{"spawn": True}, *steps(*TWO[:2]), {"exit": 1}]]
        async with driven(tmp_path, ready, gens=gens) as child:
            chunks, _ = await error_of(child.engine.submit(request("0", listed=2)))
            assert [found for chunk in chunks for found in rows_of(chunk)] == TWO_ROWS[:1]
            [spawned] = child.notes("#spawned")
            await until(lambda: gone(int(spawned)))
            await another_process(child)
            await child.next_is_right()

    go(test(), loop)


def test_the_next_process_may_be_another(tmp_path: Path) -> None:
    async def test() -> None:
        starts = [steps("INFO vocab_size=90", TAGGED), steps("INFO max_logprobs=7 vocab_size=80", "READY 40")]
        gens = [[*steps(*TWO[:1]), {"wait": "GEN 3"}, {"exit": 1}]] * 3
        async with driven(tmp_path, starts=starts, gens=gens) as child:
            running = [child.engine.submit(request(f"a-{number}", listed=2)) for number in range(3)]
            waiting = [request(f"b-{number}", [number], listed=3) for number in range(2)]
            streams = [child.engine.submit(item) for item in waiting]
            await asyncio.gather(*map(error_of, running))
            assert await asyncio.gather(*map(gather, streams)) == [expected(item, 80) for item in waiting]
            has = child.engine.capabilities
            assert (has.vocab_size, has.max_model_len, has.max_num_seqs, has.max_logprobs) == (80, 40, 1, 7)
            child.vocab_size = 80
            await child.next_is_right()

    go(test())


def test_it_is_started_again_until_it_starts(tmp_path: Path) -> None:
    async def test() -> None:
        fine: list[dict[str, Any]] = steps("READY 512 stop")
        starts = [fine, [{"exit": 1}], steps("READY soon"), fine]
        async with driven(tmp_path, starts=starts, gens=[[{"exit": 1}]]) as child:
            await error_of(child.engine.submit(request("0")))
            await another_process(child, 4)
            await child.next_is_right()
            assert gone(child.pids[2])

    go(test())


@LOOPS
@BOTH
def test_a_megabyte_of_log_while_it_runs(tmp_path: Path, ready: str, loop: Any) -> None:
    async def test() -> None:
        log = tmp_path / "engine.log"
        log.write_text("from before\n")
        gens = [[*steps(*TWO[:2]), {"stderr": 2**20}, *steps(*TWO[2:], DONE)]]
        async with driven(tmp_path, ready, gens=gens, engine_log=str(log)) as child:
            assert (await child.ask(request("0", max_tokens=2, listed=2))).rows == TWO_ROWS
            await child.next_is_right()
        text = log.read_text()
        assert text.startswith("from before\na line of the engine's log\n")
        assert len(text) > 2**20

    go(test(), loop)


def test_where_the_log_is_if_nothing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        script = tmp_path / "script.json"
        script.write_text(
            json.dumps({"record": str(tmp_path / "record"), "starts": [[{"stderr": 100}, *steps(UNTAGGED)]]})
        )
        command = shlex.join([sys.executable, "-I", "-S", str(PROGRAM), str(script)])
        engine = LineEngine(LineEngineConfig(engine_command=command, tokenizer="none"), vocab_size=VOCAB_SIZE)
        with caplog.at_level("INFO", "neper"):
            await engine.start()
        await engine.close()
        [log] = tmp_path.glob("*.log")
        assert log.read_text().startswith("a line of the engine's log\n")
        assert str(log) in caplog.text

    go(test())


@LOOPS
def test_an_engine_that_does_not_read_blocks_nothing(tmp_path: Path, loop: Any) -> None:
    async def test() -> None:
        file = tmp_path / "go"
        starts = [[*steps("READY 60000 stop slots=3"), {"wait": f"file {file}"}]]
        async with driven(tmp_path, starts=starts) as child:
            long = [request(f"{number}", [number] * 50_000, 2, listed=1) for number in range(3)]
            streams = [child.engine.submit(item) for item in long]
            await asyncio.sleep(0.02)
            file.touch()  # nobody would, if the loop waited for the engine to read
            assert await asyncio.gather(*map(gather, streams)) == [expected(item) for item in long]

    go(test(), loop)
