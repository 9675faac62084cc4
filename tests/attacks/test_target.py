"""What measures the attacks sees what it should."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

from tests.attacks.target import Target, at_once
from tests.attacks.watched import Watch

HOLD = 0.2


def test_the_watch_sees_a_callback_that_computes(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "loop")

    async def run() -> None:
        task = asyncio.create_task(watch.keep())
        await asyncio.sleep(0.05)
        end = time.process_time() + HOLD
        while time.process_time() < end:
            pass
        await asyncio.sleep(0.05)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    held, computing = Watch(tmp_path / "loop").read()
    assert held >= computing >= HOLD - 0.01
    watch.reset()
    assert watch.read() == (0.0, 0.0)


def test_small_requests_are_no_attack(target: Target) -> None:
    def ask() -> list[int]:
        return [target.post("/v1/completions", b'{"prompt":"Hi","max_tokens":1}')[0] for _ in range(30)]

    figures = target.attack("small requests", lambda: at_once([ask]), sent=100)
    assert figures.asked >= 3
    figures.check()
