"""Trials of grammars: who waits for whom, what is remembered, and processes that are stopped or killed."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neper.errors import InvalidRequestError, OverloadedError
from neper.text import matcher as at_work
from neper.text import trial, trials
from neper.text.grammar import choice, json_object, json_schema, regex, user_grammar
from neper.text.matcher import Grammars, Matcher, fill_masks
from neper.text.trial import Outcome, Trial
from neper.text.trials import MAX_SHORT, Trials
from tests.text.conftest import Pair

END = 2
VOCAB_SIZE = 601

LONG = "\n".join(["start: A", "A: " + " & ".join(f"/.*a.{{{n}}}/" for n in range(100))])
WIDE = {
    "1,000 optional rules": "start: " + " ".join(f"r{n}?" for n in range(1000)),
    "2,000 alternatives": "start: " + " | ".join(f"r{n}" for n in range(2000)),
}


def doubling(depth: int, end: str = "a") -> str:
    """2^depth letters, in `depth` rules."""
    rules = [f"R{n}: R{n + 1} R{n + 1}" for n in range(depth)]
    return user_grammar("\n".join(["start: R0", *rules, f'R{depth}: "{end}"'])).text()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


@pytest.fixture
def tried(byte_level: Pair) -> Trials:
    return Trials(byte_level.ours, VOCAB_SIZE, (END,))


@pytest.fixture(scope="module")
def grammars(byte_level: Pair) -> Grammars:
    return Grammars(byte_level.ours, VOCAB_SIZE, (END,))


@contextmanager
def held(lane: Any) -> Iterator[None]:
    """The lane's thread waits for something."""
    over = threading.Event()
    lane._pool.submit(over.wait, 100)
    try:
        yield
    finally:
        over.set()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each trial was given."""
    given: list[float] = []
    real = Trial.run

    def count(self: Trial, text: str, seconds: float) -> Outcome:
        given.append(seconds)
        return real(self, text, seconds)

    monkeypatch.setattr(Trial, "run", count)
    return given


def test_case_89_what_is_known_waits_for_nobody(tried: Trials) -> None:
    good, bad = choice(["a"]).text(), user_grammar("start: other").text()

    async def check() -> None:
        await tried.check(good, "p")
        with pytest.raises(InvalidRequestError):
            await tried.check(bad, "p")
        with held(tried._short), held(tried._long):
            await tried.check(json_object().text(), "p")
            await tried.check(good, "p")
            with pytest.raises(InvalidRequestError, match="unknown name"):
                await tried.check(bad, "p")

    run(check())


def test_case_89_trials_have_threads_of_their_own(tried: Trials) -> None:
    """The event loop's pool, in which texts are encoded, is neither needed nor held up."""

    async def check() -> None:
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            asyncio.get_running_loop().set_default_executor(pool)
            waiting = asyncio.ensure_future(asyncio.to_thread(over.wait, 100))
            await tried.check(choice(["b"]).text(), "p")
            over.set()
            await waiting
            with held(tried._short):
                hostile = [asyncio.ensure_future(tried.check(doubling(30, f"{n}"), "p")) for n in range(8)]
                assert await asyncio.to_thread(lambda: "encoded") == "encoded"
                for task in hostile:
                    task.cancel()

    run(check())


def test_case_89_one_grammar_is_tried_once(tried: Trials, counted: list[float]) -> None:
    async def check() -> None:
        for text in (choice(["c"]).text(), user_grammar("start: other").text()):
            for _ in range(2):
                await asyncio.gather(*(tried.check(text, "p") for _ in range(5)), return_exceptions=True)

    run(check())
    assert len(counted) == 2


def test_case_89_what_takes_long_is_tried_again_beside_short_ones(
    byte_level: Pair, counted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "SECONDS", 0.3)
    tried = Trials(byte_level.ours, VOCAB_SIZE, (END,))

    async def check() -> None:
        with held(tried._long):
            slow = asyncio.ensure_future(tried.check(user_grammar(LONG).text(), "p"))
            for n in range(3):
                await tried.check(choice([f"{n}"]).text(), "p")
            assert not slow.done()
        with pytest.raises(InvalidRequestError, match=r"more than 0\.3 seconds"):
            await slow

    run(check())
    assert counted == [trials.SHORT_SECONDS] * 4 + [trials.SECONDS]


def test_case_89_a_full_queue_refuses(tried: Trials) -> None:
    async def check() -> None:
        with held(tried._short):
            waiting = [asyncio.ensure_future(tried.check(choice([f"{n}"]).text(), "p")) for n in range(MAX_SHORT)]
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError) as error:
                await tried.check(choice(["more"]).text(), "p")
            assert error.value.status == 503
            assert error.value.retry_after
            for task in waiting[1:]:
                task.cancel()
        await waiting[0]
        await tried.check(choice(["more"]).text(), "p")

    run(check())


@pytest.mark.parametrize("reason", [signal.SIGSTOP, signal.SIGKILL])
def test_case_112_a_process_that_is_stopped_or_killed_is_replaced(
    tried: Trials, monkeypatch: pytest.MonkeyPatch, reason: signal.Signals
) -> None:
    async def check() -> None:
        await tried.check(choice(["a"]).text(), "p")
        pid = tried._short._trial.pid
        assert pid is not None
        monkeypatch.setattr(trial, "WATCHDOG_SECONDS", 1.0)
        os.kill(pid, reason)
        try:
            await tried.check(choice(["b"]).text(), "p")
        except OverloadedError:
            pass
        else:
            assert reason == signal.SIGKILL
        monkeypatch.setattr(trial, "WATCHDOG_SECONDS", 100.0)
        await tried.check(choice(["b"]).text(), "p")
        assert tried._short._trial.pid not in (pid, None)

    run(check())


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="sessions are not weighed here")
def test_case_112_trials_leave_busy_cores_to_the_server(tried: Trials) -> None:
    run(tried.check(choice(["a"]).text(), "p"))
    pid = tried._short._trial.pid
    assert pid is not None
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert Path(f"/proc/{pid}/autogroup").read_text().endswith(" nice 10\n")


def test_case_117_grammars_are_tried_beside_more_open_files_than_select_takes(tried: Trials) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1300:
        pytest.skip("the limit of open files is too low for this")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1300) if soft >= 0 else soft, hard))
    files: list[int] = []
    try:
        while not files or files[-1] < 1024:
            files.append(os.dup(0))
        run(tried.check(choice(["a"]).text(), "p"))
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_case_112_a_stopped_trial_is_no_verdict(tried: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [Outcome(stopped=True), Outcome()]
    monkeypatch.setattr(Trial, "run", lambda *_: outcomes.pop(0))

    async def check() -> None:
        with pytest.raises(OverloadedError):
            await tried.check(choice(["a"]).text(), "p")
        await tried.check(choice(["a"]).text(), "p")

    run(check())


def test_case_112_rules_that_double_are_refused(tried: Trials) -> None:
    async def check() -> None:
        with pytest.raises(InvalidRequestError, match="too large"):
            await tried.check(doubling(30), "p")
        await tried.check(choice(["a"]).text(), "p")

    run(check())


@pytest.mark.parametrize("name", WIDE)
def test_case_112_what_passes_its_trial_does_not_fail_later(
    tried: Trials, grammars: Grammars, byte_level: Pair, name: str
) -> None:
    text = user_grammar("\n".join([WIDE[name], *(f'r{n}: "a{n}"' for n in range(2000))])).text()
    run(tried.check(text, "p"))
    draw = random.Random(1)
    matcher = grammars.matcher(text)
    for _ in range(60):
        allowed = matcher.allowed()
        assert matcher.error is None
        assert allowed
        if matcher.finished or not matcher.accept(draw.choice(allowed)):
            break
    assert matcher.error is None


def masks(matchers: list[Matcher]) -> np.ndarray[Any, Any]:
    words = np.empty((len(matchers), -(-VOCAB_SIZE // 32)), dtype=np.int32)
    fill_masks(matchers, words)
    return words


def test_case_112_who_exceeds_the_budget_of_masks_is_ended_alone(
    grammars: Grammars, byte_level: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks made together are charged to nobody; if they took long, each is measured on its own from then on."""
    [letter] = [i for i in range(VOCAB_SIZE) if byte_level.ours.token_bytes(i) == b"a"]

    def begun() -> list[Matcher]:
        matchers = [grammars.matcher(choice([f"ab{n}"]).text()) for n in range(3)]
        assert all(matcher.accept(letter) for matcher in matchers)
        return matchers

    matchers, others = begun(), begun()
    expected = np.concatenate([masks([other]) for other in others])
    monkeypatch.setattr(at_work, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(at_work, "QUICK_SECONDS", 0.0)
    matchers[1]._spare = 0.0
    assert np.array_equal(masks(matchers), expected)
    assert all(matcher.slow for matcher in matchers)
    assert all(matcher.error is None for matcher in matchers)
    for matcher in matchers:
        matcher.keep_mask()
    assert [matcher.error is None for matcher in matchers] == [True, False, True]
    assert "ms a token" in (matchers[1].error or "")
    alone = masks(matchers)
    assert not alone[1].any()
    assert np.array_equal(alone[[0, 2]], expected[[0, 2]])


def test_a_grammar_is_slow_until_the_time_that_it_took_has_faded(
    grammars: Grammars, byte_level: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    [letter] = [i for i in range(VOCAB_SIZE) if byte_level.ours.token_bytes(i) == b"a"]
    matcher = grammars.matcher(regex("a*").text())
    charge, times = Matcher._charge, iter([0.0, 0.003, 0.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr(Matcher, "_charge", lambda self, _: charge(self, next(times)))
    monkeypatch.setattr(at_work, "_FADING", 0.5)
    slow = []
    for _ in range(3):
        assert matcher.accept(letter)
        matcher.keep_mask()
        slow.append(matcher.slow)
    assert slow == [True, True, False]


def test_a_grammar_goes_on_beside_others_as_it_does_alone(grammars: Grammars, byte_level: Pair) -> None:
    text = json_schema({"type": "array", "items": {"type": "integer"}}).text()
    one, other = grammars.matcher(text), grammars.matcher(text)
    draw = random.Random(2)
    for _ in range(20):
        token_id = draw.choice(one.allowed())
        assert one.accept(token_id)
        assert other.advance(token_id)
        assert np.array_equal(masks([one]), masks([other]))
    [letter] = [i for i in range(VOCAB_SIZE) if byte_level.ours.token_bytes(i) == b"a"]
    assert not other.advance(letter)
    assert other.error is not None


def test_compiled_grammars_are_kept_and_begin_anew(grammars: Grammars, byte_level: Pair) -> None:
    text = choice(["ab"]).text()
    assert grammars.ready(text) is None
    first = grammars.matcher(text)
    [letter] = [i for i in first.allowed() if byte_level.ours.token_bytes(i) == b"a"]
    assert first.accept(letter)
    again = grammars.ready(text)
    assert again is not None
    assert again.accept(letter)
    assert not again.accept(letter)
