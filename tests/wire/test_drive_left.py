"""LineEngine and requests that are left, or of which nothing is heard: nothing late gets into the next one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from neper.errors import EngineDeadError
from neper.types import FinishReason
from tests.wire.driven import (
    ALL_FORMS,
    BOTH,
    CANCEL,
    DONE,
    EOS,
    LOOPS,
    SILENCE,
    TAGGED,
    TWO,
    TWO_ROWS,
    UNTAGGED,
    Clock,
    Reply,
    another_process,
    driven,
    expected,
    folded,
    gather,
    go,
    gone,
    is_broken,
    request,
    rows_of,
    steps,
    stopped,
    until,
)

pytestmark = pytest.mark.usefixtures("soon")


@LOOPS
@ALL_FORMS
def test_a_request_that_is_left_is_stopped_and_its_lines_go_nowhere(tmp_path: Path, ready: str, loop: Any) -> None:
    async def test() -> None:
        # The driver must wait for DONE, and the scores of the token that it did not wait for come late.
        async with driven(tmp_path, ready, gens=[stopped(*TWO[:3], ready=ready)]) as child:
            stream = child.engine.submit(request("0", listed=2))
            assert rows_of(await stream.__anext__()) == TWO_ROWS[:1]
            stream.close()
            stream.close()
            with pytest.raises(StopAsyncIteration):
                await stream.__anext__()
            await child.next_is_right()
            await until(lambda: not child.engine.stats().running)
            gen = child.notes("GEN")[0]
            stops = [] if "stop" not in ready else [gen.split()[0] if "slots" in ready else ""]
            assert child.notes("STOP") == stops
            assert len(child.pids) == 1
            assert child.engine.stats().waiting == 0

    go(test(), loop)


@pytest.mark.parametrize("ready", ["READY 512", "READY 512 stop"])
def test_the_slot_of_a_request_that_was_left_is_taken_until_it_is_done(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        file = tmp_path / "go"
        first = [*steps(*TWO[:2]), {"wait": f"file {file}"}, *steps(*TWO[2:], CANCEL)]
        async with driven(tmp_path, ready, gens=[first]) as child:
            stream = child.engine.submit(request("0", listed=2))
            await stream.__anext__()
            stream.close()
            after = asyncio.ensure_future(child.ask(request("1", listed=2)))
            await asyncio.sleep(0.03)
            assert len(child.notes("GEN")) == 1
            file.touch()
            assert await after == expected(request("1", listed=2))
            await child.next_is_right()

    go(test())


@BOTH
def test_a_request_that_is_left_before_it_was_sent_is_never_sent(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        file = tmp_path / "go"
        wait: list[dict[str, Any]] = [{"wait": f"file {file}"}, *steps(*TWO, DONE)]
        slots = 1 if ready == UNTAGGED else 3
        async with driven(tmp_path, ready, gens=[wait] * slots) as child:
            running = [child.engine.submit(request(f"{n}", max_tokens=2, listed=2)) for n in range(slots)]
            await until(lambda: len(child.notes("GEN")) == slots)
            left = child.engine.submit(request("left", [66]))
            assert child.engine.stats().waiting == 1
            left.close()
            assert child.engine.stats().waiting == 0
            file.touch()
            for reply in await asyncio.gather(*map(gather, running)):
                assert reply.rows == TWO_ROWS
            await child.next_is_right()
            assert not child.notes("STOP")
            assert not [line for line in child.notes("GEN") if line.endswith(" 66")]

    go(test())


@BOTH
def test_closing_a_stream_at_its_end_stops_nothing(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready) as child:
            stream = child.engine.submit(request("0", listed=1))
            chunks = [chunk async for chunk in stream]
            assert folded(chunks) == expected(request("0", listed=1))
            stream.close()
            await child.next_is_right()
            assert not child.notes("STOP")

    go(test())


@BOTH
def test_closing_a_stream_wakes_the_task_that_waits_for_it(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready, gens=[stopped(ready=ready)]) as child:
            stream = child.engine.submit(request("0"))
            reader = asyncio.ensure_future(gather(stream))
            await until(lambda: child.notes("GEN"))
            stream.close()
            assert (await reader).token_ids == []
            await child.next_is_right()

    go(test())


@ALL_FORMS
@pytest.mark.parametrize("top_k", [None, 2])
def test_stop_ids_end_a_request(tmp_path: Path, ready: str, top_k: int | None) -> None:
    async def test() -> None:
        lines = [line for line in [*TWO, "T 7", "LP -1 7:-1 8:-2"] if top_k is not None or line.startswith("T")]
        async with driven(tmp_path, ready, gens=[stopped(*lines, ready=ready)]) as child:
            reply = await child.ask(request("0", listed=top_k, stop_token_ids=(90, 6)))
            rows = [None, None] if top_k is None else TWO_ROWS
            assert reply == Reply([5, 6], rows, FinishReason.STOP, stop_token_id=6)
            await child.next_is_right()
            assert len(child.notes("STOP")) == ("stop" in ready)

    go(test())


@BOTH
def test_a_stop_id_that_is_the_last_token_anyway(tmp_path: Path, ready: str) -> None:
    async def test() -> None:
        lines = steps(*TWO[:2], f"T {EOS}", f"LP -1 {EOS}:-1 2:-2", "DONE 2 3 1 2 stop")
        async with driven(tmp_path, ready, gens=[lines]) as child:
            reply = await child.ask(request("0", listed=2, stop_token_ids=(EOS,)))
            assert (reply.token_ids, reply.finish_reason, reply.stop_token_id) == ([5, EOS], FinishReason.STOP, EOS)
            await child.next_is_right()

    go(test())


@BOTH
def test_silence_ends_a_request_that_is_then_stopped(tmp_path: Path, ready: str, clock: Clock) -> None:
    async def test() -> None:
        gens = [stopped(*TWO[:3], ready=ready)]
        async with driven(tmp_path, ready, gens=gens, silence_timeout=SILENCE) as child:
            stream = child.engine.submit(request("0", listed=2))
            first = await stream.__anext__()
            clock.now += SILENCE
            reply = folded([first, *[chunk async for chunk in stream]])
            await is_broken(child, reply, 1, f"nothing of this request for {SILENCE} seconds")
            assert len(child.notes("STOP")) == 1

    go(test())


@ALL_FORMS
def test_silence_after_that_ends_the_engine(tmp_path: Path, ready: str, clock: Clock) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready, gens=[steps(*TWO[:2])], silence_timeout=SILENCE) as child:
            stream = child.engine.submit(request("0", listed=2))
            first = await stream.__anext__()
            clock.now += SILENCE
            reply = folded([first, *[chunk async for chunk in stream]])
            assert reply.finish_reason is FinishReason.ERROR
            assert reply.rows == TWO_ROWS[:1]
            assert child.engine.alive
            clock.now += SILENCE
            await another_process(child)
            assert gone(child.pids[0])
            assert child.engine.stats().restarts == 1
            await child.next_is_right()

    go(test())


@ALL_FORMS
def test_an_engine_that_does_not_end_a_request_that_was_left_is_ended(tmp_path: Path, ready: str, clock: Clock) -> None:
    async def test() -> None:
        async with driven(tmp_path, ready, gens=[steps(*TWO[:2])], silence_timeout=SILENCE) as child:
            stream = child.engine.submit(request("0", listed=2))
            await stream.__anext__()
            stream.close()
            clock.now += SILENCE
            await another_process(child)
            await child.next_is_right()

    go(test())


@BOTH
def test_silence_is_each_request_s_own(tmp_path: Path, ready: str, clock: Clock) -> None:
    """Time passes with the lines of the other request, where an engine has two at a time."""

    async def test() -> None:
        heard = steps(*[f"PP {count} 20" for count in range(20)])
        gens = [[{"wait": "STOP"}, *steps(CANCEL)], [{"wait": "GEN 2"}, *heard, *steps(*TWO, DONE)]]
        async with driven(tmp_path, ready, gens=gens, silence_timeout=SILENCE) as child:
            clock.a_line = SILENCE / 10
            asked = [request(name, max_tokens=2, listed=2) for name in ("silent", "slow")]
            replies = [asyncio.ensure_future(child.ask(item)) for item in asked]
            await until(lambda: child.notes("GEN"))
            clock.now += 0 if ready == TAGGED else SILENCE
            silent, slow = await asyncio.gather(*replies)
            clock.a_line = 0
            assert silent.finish_reason is FinishReason.ERROR
            assert slow == Reply([5, 6], TWO_ROWS, FinishReason.LENGTH)
            await until(lambda: len(child.notes("STOP")) == 1)
            assert len(child.pids) == 1
            await child.next_is_right()

    go(test())


@LOOPS
def test_those_that_wait_when_the_engine_hangs_are_for_the_next_one(tmp_path: Path, loop: Any, clock: Clock) -> None:
    """Another slot goes on with its lines until the process has ended."""

    async def test() -> None:
        form = {"ready": "READY 200000 stop slots=2", "gens": [steps(*TWO[:2]), None], "pause": 0.00001}
        async with driven(tmp_path, silence_timeout=SILENCE, **form) as child:
            clock.a_line = SILENCE / 1000
            busy = [request("silent", max_tokens=10, listed=2), request("talking", max_tokens=100_000)]
            told = [asyncio.ensure_future(gather(child.engine.submit(item))) for item in busy]
            await until(lambda: len(child.notes("GEN")) == 2)
            waiting = [request(f"{number}", [number], 4, listed=1) for number in range(4)]
            replies = [asyncio.ensure_future(child.ask(item)) for item in waiting]
            assert (await told[0]).finish_reason is FinishReason.ERROR
            with pytest.raises(EngineDeadError):
                await told[1]
            assert await asyncio.gather(*replies) == [expected(item) for item in waiting]
            assert child.engine.stats().restarts == 1

    go(test(), loop)


def test_a_request_that_is_left_late_has_time_to_end(tmp_path: Path, clock: Clock) -> None:
    async def test() -> None:
        file = tmp_path / "go"
        gens = [[{"wait": "STOP"}, {"wait": f"file {file}"}, *steps(CANCEL)]]
        async with driven(tmp_path, TAGGED, gens=gens, silence_timeout=SILENCE) as child:
            stream = child.engine.submit(request("0", listed=2))
            await until(lambda: child.notes("GEN"))
            clock.now += 0.9 * SILENCE
            stream.close()
            clock.now += 0.9 * SILENCE
            await asyncio.sleep(SILENCE)  # the driver looks at its clock some times
            file.touch()
            await until(lambda: child.engine.stats().running == 0)
            assert child.engine.alive
            await child.next_is_right()
            assert len(child.pids) == 1

    go(test())


def test_waiting_requests_are_not_silent(tmp_path: Path, clock: Clock) -> None:
    async def test() -> None:
        async with driven(tmp_path, pause=SILENCE / 2, silence_timeout=SILENCE) as child:
            clock.a_line = SILENCE / 4  # the last one waits five times as long as it may be silent
            asked = [request(f"a-{number}", [number], 5, listed=1) for number in range(3)]
            await asyncio.gather(*map(child.asks_right, asked))

    go(test())


def test_an_idle_engine_is_not_silent(tmp_path: Path, clock: Clock) -> None:
    async def test() -> None:
        async with driven(tmp_path, silence_timeout=SILENCE) as child:
            await child.asks_right(request("0"))
            clock.now += 100 * SILENCE
            await asyncio.sleep(SILENCE)
            assert child.engine.alive
            assert len(child.pids) == 1

    go(test())
