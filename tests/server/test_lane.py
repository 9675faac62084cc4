from __future__ import annotations

import asyncio

import pytest

from neper.server import lane


class Clock:
    """Time that passes in sleeps and in work alone."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_a_lane_rests_in_proportion_to_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(lane, "time", clock)
    own = lane.Lane("test")

    def work(seconds: float, result: object) -> object:
        clock.now += seconds
        if isinstance(result, Exception):
            raise result
        return result

    async def use() -> None:
        assert await own.run(lambda: work(1.0, "first")) == "first"
        with pytest.raises(ValueError):
            await own.run(lambda: work(0.5, ValueError()))
        clock.now += 0.25
        assert await own.run(lambda: work(0.0, "third")) == "third"
        assert await own.run(lambda: work(0.0, "fourth")) == "fourth"

    asyncio.run(use())
    assert clock.slept == [lane.REST * 1.0, lane.REST * 0.5 - 0.25]
