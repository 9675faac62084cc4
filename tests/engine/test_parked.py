"""Sequences whose slow grammar goes on beside the steps: nobody waits for them, and nothing of them is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from neper.engine.core import EngineCore
from neper.engine.plan.grammars import EngineGrammars
from neper.engine.plan.sequence import Sequence
from neper.text import grammar
from neper.text.matcher import Matcher
from neper.types import Fault, FinishReason, Request, SamplingParams
from tests.helpers.engine import Result, make_core, prompts, request, run, wait_for_grammars

END = 2
CHOICE = grammar.choice(["one answer", "another answer", "日本"]).text()
TEXTS = prompts(4, 30, seed=4)
SMALL = {"kv_cache_memory": 9 * 16 * 2 * 2 * 2 * 16 * 4, "max_model_len": 128}  # the blocks of one context


def guided(name: str, prompt: list[int]) -> Request:
    return request(name, prompt, SamplingParams(temperature=1.0, seed=3, grammar=CHOICE), top_k=2, eos=(END,))


def free(name: str, prompt: list[int], max_tokens: int = 20) -> Request:
    return request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), top_k=2)


class Parking:
    """Requests named "slow" have slow grammars, which go on once `gate` is open.

    Attributes:
        advance: takes the place of the matcher's own.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.advance: Callable[[Matcher, int], bool] = Matcher.advance
        real = EngineGrammars._matcher

        def matcher(grammars: EngineGrammars, seq: Sequence) -> Matcher:
            made = real(grammars, seq)
            if seq.request.request_id == "slow":
                made.slow = True
                monkeypatch.setattr(made, "_judge", lambda: None)
                monkeypatch.setattr(made, "advance", lambda token_id: self._advance(made, token_id))
            return made

        monkeypatch.setattr(EngineGrammars, "_matcher", matcher)
        monkeypatch.setattr(EngineGrammars, "_ready", lambda grammars, seq: None)

    def _advance(self, matcher: Matcher, token_id: int) -> bool:
        assert self.gate.wait(60)
        return self.advance(matcher, token_id)


@pytest.fixture
def parking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parking]:
    parking = Parking(monkeypatch)
    yield parking
    parking.gate.set()


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def alone(tiny_dir: Callable[..., Path]) -> Callable[[Request], Result]:
    core = make_core(tiny_dir("llama"), overlap=False)
    return lambda item: run(core, [item])[item.request_id]


class Steps:
    """An engine stepped as far as a test wants."""

    def __init__(self, core: EngineCore, *items: Request) -> None:
        self.core = core
        self.results: dict[str, Result] = {}
        self.add(*items)

    def add(self, *items: Request) -> None:
        for item in items:
            self.core.add(item)
            self.results[item.request_id] = Result()
        wait_for_grammars(self.core)

    def until(self, reached: Callable[[], bool]) -> None:
        for _ in range(3000):
            if reached():
                return
            for chunk in self.core.step():
                self.results[chunk.request_id].chunks.append(chunk)
            self.core.check()
        raise AssertionError("it is never reached")

    def ended(self, *names: str) -> Callable[[], bool]:
        return lambda: all(self.results[name].chunks and self.results[name].finish_reason for name in names)

    def parked(self) -> bool:
        return "slow" in self.core._sequences and self.core._sequences["slow"].parked


def same(got: Result, want: Result) -> None:
    assert got.finish_reason is want.finish_reason, got.last.error
    assert got.token_ids == want.token_ids


def test_others_go_on_while_a_slow_grammar_is_at_work(
    tiny_dir: Callable[..., Path], parking: Parking, alone: Callable[[Request], Result], overlap: bool
) -> None:
    others = [guided("quick", TEXTS[1]), free("free", TEXTS[2]), free("late", TEXTS[3])]
    slow = guided("slow", TEXTS[0])
    core = make_core(tiny_dir("llama"), overlap=overlap, max_num_seqs=3)
    steps = Steps(core, slow, *others[:2])
    steps.until(steps.parked)
    steps.add(others[2])
    steps.until(steps.ended("quick", "free", "late"))
    assert steps.parked()
    assert len(steps.results["slow"].token_ids) == 1, "what is read is sent, and no more is made"
    parking.gate.set()
    steps.until(steps.ended("slow"))
    for item in (slow, *others):
        same(steps.results[item.request_id], alone(item))
    assert not core.has_work


def test_a_parked_sequence_can_be_aborted(
    tiny_dir: Callable[..., Path], parking: Parking, alone: Callable[[Request], Result], overlap: bool
) -> None:
    slow = guided("slow", TEXTS[0])
    steps = Steps(make_core(tiny_dir("llama"), overlap=overlap, max_num_seqs=1), slow)
    steps.until(steps.parked)
    steps.core.abort("slow")
    steps.core.check()
    assert not steps.core.has_work
    assert steps.core.stats().free_blocks == steps.core.stats().total_blocks
    parking.gate.set()
    steps.add(slow)
    steps.until(steps.ended("slow"))
    same(steps.results["slow"], alone(slow))


def test_a_parked_sequence_can_be_preempted_and_keeps_nobody_waiting(
    tiny_dir: Callable[..., Path], parking: Parking, alone: Callable[[Request], Result], overlap: bool
) -> None:
    old, slow, new = free("old", TEXTS[1], 90), guided("slow", TEXTS[0]), free("new", TEXTS[2])
    core = make_core(tiny_dir("llama"), overlap=overlap, **SMALL)
    steps = Steps(core, old, slow)
    steps.until(steps.ended("old"))
    assert core.stats().preemptions == 1
    assert steps.parked()
    assert core.stats().free_blocks == core.stats().total_blocks
    steps.add(new)
    steps.until(steps.ended("new"))
    parking.gate.set()
    steps.until(steps.ended("slow"))
    for item in (old, slow, new):
        same(steps.results[item.request_id], alone(item))


def does_not_fit(matcher: Matcher, token_id: int) -> bool:
    return False


def breaks(matcher: Matcher, token_id: int) -> bool:
    raise RuntimeError("it broke")


def takes_too_long(matcher: Matcher, token_id: int) -> bool:
    matcher._spare = -1.0
    return Matcher.advance(matcher, token_id)


@pytest.mark.parametrize(
    ("advance", "message", "fault"),
    [
        (does_not_fit, "a token was sampled that the grammar does not allow", Fault.ENGINE),
        (breaks, "the grammar could not be followed: it broke", Fault.ENGINE),
        (takes_too_long, "the grammar cannot be followed any further: it takes more than", Fault.REQUEST),
    ],
)
def test_a_slow_grammar_that_fails_ends_its_request_alone(
    tiny_dir: Callable[..., Path],
    parking: Parking,
    alone: Callable[[Request], Result],
    overlap: bool,
    advance: Callable[[Matcher, int], bool],
    message: str,
    fault: Fault,
) -> None:
    parking.advance = advance
    parking.gate.set()
    others = [guided("quick", TEXTS[1]), free("free", TEXTS[2])]
    steps = Steps(make_core(tiny_dir("llama"), overlap=overlap), guided("slow", TEXTS[0]), *others)
    steps.until(steps.ended("slow", "quick", "free"))
    last = steps.results["slow"].last
    assert last.finish_reason is FinishReason.ERROR
    assert (last.error or "").startswith(message)
    assert last.fault is fault
    for item in others:
        same(steps.results[item.request_id], alone(item))
    assert not steps.core.has_work
    assert steps.core.stats().free_blocks == steps.core.stats().total_blocks


def test_a_step_that_raises_ends_parked_sequences_too(tiny_dir: Callable[..., Path], parking: Parking) -> None:
    steps = Steps(make_core(tiny_dir("llama")), guided("slow", TEXTS[0]))
    steps.until(steps.parked)
    assert [chunk.request_id for chunk in steps.core.fail_all("it broke")] == ["slow"]
    steps.core.check()
    assert not steps.core.has_work
