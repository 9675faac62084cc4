"""`neper engine`, spoken to over its pipes: scores as the same engine gives in process, and an end to everything."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

import neper
from neper.engine.llm import LLM
from neper.types import LogprobParams, SamplingParams
from neper.wire.lines import (
    AnswerLine,
    Done,
    Failed,
    Gen,
    Info,
    Logprobs,
    Progress,
    ReadyLine,
    Stop,
    Token,
    format_request,
    parse_answer,
)
from tests.helpers.engine import prompts

SECONDS = 300
SLOTS = 4
LONG = 4000
CONTEXT = 4096
VOCAB = 1500
"""Ids of the tiny model: more than are listed whole."""


class Spoken:
    """A `neper engine` of its own process; killed, if it still runs, when the context is left.

    Args:
        patch: Python that the process runs before the command.
        on_stdout: what its stdout is; by default it is read here.

    Attributes:
        ready: its READY line; None before `start`.
        stdout: all bytes that were read.
    """

    def __init__(self, log: Path, *arguments: str | Path, patch: str = "", on_stdout: int = subprocess.PIPE) -> None:
        self.ready: ReadyLine | None = None
        self.stdout = b""
        self._log = log
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        command = [sys.executable, "-c", f"{patch}\nimport neper.cli\nneper.cli.main()", "engine"]
        settings = ["--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--no-prefix-caching"]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, *settings, *map(str, arguments)], stdin=subprocess.PIPE, stdout=on_stdout, stderr=stderr
            )
        self._reader = threading.Thread(target=self._read)
        if self.process.stdout is not None:
            self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.stdout += line
            self._lines.put(line)
        self._lines.put(b"")

    def start(self) -> list[Info]:
        """Wait until it is ready; returns what it said before."""
        infos = []
        while not isinstance(line := self.read(), ReadyLine):
            assert isinstance(line, Info), line
            infos.append(line)
        self.ready = line
        return infos

    def send(self, *lines: bytes | Gen | Stop) -> None:
        """All of them in one write."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(line if isinstance(line, bytes) else format_request(line) for line in lines))
        self.process.stdin.flush()

    def read(self) -> AnswerLine:
        line = self._lines.get(timeout=SECONDS)
        assert line.endswith(b"\n"), f"it ended: {self.stderr}"
        return parse_answer(line, tagged=self.ready is not None and self.ready.tagged)

    def until_ended(self, count: int) -> list[AnswerLine]:
        """What it says until so many requests have ended."""
        found: list[AnswerLine] = []
        while sum(isinstance(line, Done | Failed) for line in found) < count:
            found.append(self.read())
        return found

    def ask(self, gen: Gen) -> list[AnswerLine]:
        self.send(gen)
        return self.until_ended(1)

    @property
    def stderr(self) -> str:
        return self._log.read_text()

    def finish(self) -> int:
        """Its exit code, once it has ended by itself."""
        code = self.process.wait(timeout=SECONDS)
        if self._reader.ident is not None:
            self._reader.join(timeout=SECONDS)
        return code

    def __enter__(self) -> Spoken:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        if self._reader.ident is not None:
            self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                # What was never read is not worth an error.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@pytest.fixture(scope="module")
def tiny(tiny_dir: Callable[..., Path]) -> Path:
    return tiny_dir("llama", vocab_size=VOCAB, max_position_embeddings=CONTEXT, eos_token_id=None)


@pytest.fixture(scope="module")
def shared(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spoken]:
    """An engine for all tests that leave it as they found it."""
    with Spoken(tmp_path_factory.mktemp("engine") / "log", tiny, "--max-num-seqs", str(SLOTS)) as engine:
        engine.start()
        yield engine


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    """The same engine in this process."""
    return LLM(
        str(tiny), device="cpu", dtype="float32", num_threads=1, max_num_seqs=SLOTS, max_logprobs=-1,
        prefix_caching=False,
    )  # fmt: skip


@pytest.fixture
def speak(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Spoken]]:
    """Starts engines that this test alone speaks to."""
    started: list[Spoken] = []

    def start(*arguments: str, slots: int = SLOTS, **options: Any) -> Spoken:
        log = tmp_path / f"log{len(started)}"
        started.append(Spoken(log, tiny, "--max-num-seqs", str(slots), *arguments, **options))
        return started[-1]

    yield start
    for engine in started:
        with engine:
            pass


def gen(tag: str | None, prompt: list[int], max_new: int = 8, **keys: Any) -> Gen:
    return Gen(prompt_token_ids=prompt, max_new=max_new, tag=tag, **keys)


def of(lines: list[AnswerLine], tag: str | None) -> list[AnswerLine]:
    return [line for line in lines if getattr(line, "tag", None) == tag]


def tokens(lines: list[AnswerLine]) -> list[int]:
    return [line.token_id for line in lines if isinstance(line, Token)]


def scores(lines: list[AnswerLine]) -> list[Logprobs]:
    return [line for line in lines if isinstance(line, Logprobs)]


def bits(values: Any) -> bytes:
    return np.asarray(values, np.float32).tobytes()


def timeless(lines: list[AnswerLine]) -> list[AnswerLine]:
    """Without the times that DONE tells."""
    return [
        Done(line.generated, line.prompt, 0, 0, line.finish, line.accepted, line.offered, line.reused, tag=line.tag)
        if isinstance(line, Done)
        else line
        for line in lines
    ]


def greedy_tokens(llm: LLM, prompt: list[int], count: int) -> list[int]:
    [reply] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=count))
    return reply.token_ids


PROMPTS = prompts(12, 9, seed=5)


def test_what_it_says_before_it_is_ready(speak: Callable[..., Spoken], tiny: Path) -> None:
    engine = speak("--max-logprobs", "7", "--serve")
    infos = engine.start()
    told: dict[str, str] = {}
    for info in infos:
        told |= info.fields
    assert told == {
        "engine": "neper", "version": neper.__version__, "model": tiny.name, "device": "cpu", "dtype": "float32",
        "vocab_size": str(VOCAB), "max_logprobs": "7",
        "done": told["total"], "total": told["total"], "what": "loading-weights",
    }  # fmt: skip
    assert engine.ready == ReadyLine(CONTEXT, True, SLOTS)
    lines = engine.ask(gen("a", PROMPTS[0], logprobs=8))
    assert lines == [Failed("8 alternatives were asked for; 0 to 7 can be listed", "a")]


CASES: dict[str, tuple[dict[str, Any], SamplingParams]] = {
    "greedy": ({}, SamplingParams(temperature=0.0, max_tokens=8)),
    "seeded": ({"temperature": 1.1, "seed": 3}, SamplingParams(temperature=1.1, seed=3, max_tokens=8)),
    "a seed without a sign": (
        {"temperature": 1.1, "seed": 2**64 - 5},
        SamplingParams(temperature=1.1, seed=-5, max_tokens=8),
    ),
    "filtered": (
        {"temperature": 1.3, "seed": 4, "top_p": 0.8, "top_k": 30, "min_p": 0.01},
        SamplingParams(temperature=1.3, seed=4, top_p=0.8, top_k=30, min_p=0.01, max_tokens=8),
    ),
    "penalised": (
        {"penalty_repeat": 1.4, "penalty_freq": 0.5, "penalty_present": 0.3, "penalty_last_n": -1},
        SamplingParams(
            temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3, max_tokens=8
        ),
    ),
}


@pytest.mark.parametrize("k", [None, 0, 1, 20])
@pytest.mark.parametrize("case", CASES)
def test_a_request_alone_has_the_bits_of_the_engine_in_process(shared: Spoken, llm: LLM, case: str, k: int) -> None:
    keys, sampling = CASES[case]
    [reply] = llm.generate([PROMPTS[0]], sampling, LogprobParams(top_k=k))
    lines = shared.ask(gen("7", PROMPTS[0], logprobs=k, **keys))
    *before, done = lines
    assert isinstance(done, Done)
    assert timeless([done]) == [Done(8, 9, 0, 0, "length", tag="7")]
    assert done.prompt_ms > 0
    assert done.decode_ms > 0
    assert tokens(lines) == reply.token_ids
    if k is None:
        assert before == [Token(token_id, "7") for token_id in reply.token_ids]
        return
    assert [type(line) for line in before] == [Token, Logprobs] * 8
    assert reply.logprobs is not None
    assert bits([line.logprob for line in scores(lines)]) == bits(reply.logprobs.logprob)
    assert [line.ids for line in scores(lines)] == reply.logprobs.top_ids.tolist()
    assert bits([line.logprobs for line in scores(lines)]) == bits(reply.logprobs.top_logprobs)


def test_several_requests_come_interleaved_and_each_token_with_its_scores(shared: Spoken, llm: LLM) -> None:
    ks = {"a": None, "b": 0, "c": 5, "d": None}
    shared.send(*(gen(tag, PROMPTS[i], 40, logprobs=k) for i, (tag, k) in enumerate(ks.items())))
    lines = shared.until_ended(4)
    for i, (tag, k) in enumerate(ks.items()):
        own = of(lines, tag)
        assert tokens(own) == greedy_tokens(llm, PROMPTS[i], 40)
        each = [Token] if k is None else [Token, Logprobs]
        assert [type(line) for line in own] == each * 40 + [Done]
        assert all(len(line.ids) == k for line in scores(own))
    for before, line in itertools.pairwise(lines):
        if isinstance(line, Logprobs):
            assert isinstance(before, Token)
            assert before.tag == line.tag
    # They take turns: nobody's tokens come as one run.
    order = [line.tag for line in lines if isinstance(line, Token)]
    assert all(order[i : i + 40] != [order[i]] * 40 for i in range(len(order)))


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
def test_drafts_change_no_line_but_the_counts_of_done(speak: Callable[..., Spoken], llm: LLM, overlap: str) -> None:
    """Several tokens of a step are lines one after the other, each with its scores."""
    few = SamplingParams(temperature=0.0, max_tokens=40, allowed_token_ids=(5, 6))  # so it repeats itself
    [reply] = llm.generate([PROMPTS[0]], few, LogprobParams(top_k=2))
    engine = speak(overlap, "--speculative", "ngram", "--draft-tokens", "4")
    engine.start()
    lines = engine.ask(gen("7", PROMPTS[0], 40, logprobs=2, allowed=(5, 6)))
    assert [type(line) for line in lines] == [Token, Logprobs] * 40 + [Done]
    assert tokens(lines) == reply.token_ids
    assert reply.logprobs is not None
    assert np.abs(np.array([line.logprob for line in scores(lines)]) - reply.logprobs.logprob).max() < 1e-4
    done = lines[-1]
    assert isinstance(done, Done)
    assert 0 < done.accepted <= done.offered


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
def test_stop_ends_a_running_request_at_once(speak: Callable[..., Spoken], llm: LLM, overlap: str) -> None:
    engine = speak(overlap)
    engine.start()
    engine.send(gen("a", PROMPTS[0], LONG, logprobs=2), gen("b", PROMPTS[1], 40))
    lines: list[AnswerLine] = []
    while len(tokens(of(lines, "a"))) < 3:
        lines.append(engine.read())
    # The same name again at once: nothing of the first may end up in the second.
    engine.send(Stop("a"), Stop("never"), gen("a", PROMPTS[2], logprobs=0))
    lines += engine.until_ended(3)
    own = of(lines, "a")
    ends = [place for place, line in enumerate(own) if isinstance(line, Done)]
    first, second = own[: ends[0] + 1], own[ends[0] + 1 :]
    assert timeless(first[-1:]) == [Done(len(tokens(first)), 9, 0, 0, "cancel", tag="a")]
    assert [type(line) for line in first] == [Token, Logprobs] * len(tokens(first)) + [Done]
    assert 3 <= len(tokens(first)) < LONG
    assert tokens(first) == greedy_tokens(llm, PROMPTS[0], len(tokens(first)))
    assert tokens(second) == greedy_tokens(llm, PROMPTS[2], 8)
    assert timeless(second[-1:]) == [Done(8, 9, 0, 0, "length", tag="a")]
    assert all(line.ids == [] for line in scores(second))
    assert tokens(of(lines, "b")) == greedy_tokens(llm, PROMPTS[1], 40)


def test_stop_ends_a_request_that_waits(speak: Callable[..., Spoken], llm: LLM) -> None:
    engine = speak(slots=2)
    engine.start()
    engine.send(*(gen(tag, PROMPTS[0], LONG) for tag in "ab"), gen("c", PROMPTS[1]), Stop("c"))
    while not isinstance(line := engine.read(), Done):
        assert line.tag != "c"
    assert line == Done(0, 9, line.prompt_ms, 0.0, "cancel", tag="c")
    engine.send(Stop("a"), Stop("b"))
    ended = [line for line in engine.until_ended(2) if isinstance(line, Done)]
    assert {line.tag: line.finish for line in ended} == {"a": "cancel", "b": "cancel"}
    assert tokens(engine.ask(gen("c", PROMPTS[1]))) == greedy_tokens(llm, PROMPTS[1], 8)


def test_without_slots_requests_have_no_names_and_take_turns(speak: Callable[..., Spoken], llm: LLM) -> None:
    engine = speak(slots=1)
    engine.start()
    assert engine.ready == ReadyLine(CONTEXT, True, 0)
    # Whatever is wrong is said in its turn: earlier it would be taken for the end of the one that runs.
    engine.send(
        gen(None, PROMPTS[0], 6, logprobs=1), b"GEN 5\n", gen(None, [VOCAB]), gen(None, PROMPTS[1], 0),
        gen(None, PROMPTS[1], 5), gen(None, PROMPTS[2], LONG), gen(None, PROMPTS[3], 4),
    )  # fmt: skip
    lines = engine.until_ended(5)
    ends = [0, *(place + 1 for place, line in enumerate(lines) if isinstance(line, Done | Failed))]
    one, two, three, four, five = (lines[begin:end] for begin, end in itertools.pairwise(ends))
    assert [type(line) for line in one] == [Token, Logprobs] * 6 + [Done]
    assert tokens(one) == greedy_tokens(llm, PROMPTS[0], 6)
    assert [type(line) for line in two + three] == [Failed, Failed]
    assert timeless(four) == [Done(0, 9, 0, 0, "length")]
    assert tokens(five) == greedy_tokens(llm, PROMPTS[1], 5)
    assert isinstance(engine.read(), Token)
    engine.send(Stop())
    cut, last = engine.until_ended(1), engine.until_ended(1)
    assert timeless(cut[-1:]) == [Done(len(tokens(cut)) + 1, 9, 0, 0, "cancel")]
    assert tokens(last) == greedy_tokens(llm, PROMPTS[3], 4)
    engine.send(Stop())
    assert tokens(engine.ask(gen(None, PROMPTS[0], 6))) == greedy_tokens(llm, PROMPTS[0], 6)


@pytest.mark.parametrize(
    ("line", "tag", "reason"),
    [
        (b"GEN x 5\n", "x", "GEN needs max_new and the prompt's ids"),
        (b"GEN x 5 temperature=hot 4,5\n", "x", "temperature is not a number"),
        (b"GEN x -1 4,5\n", "x", "max_new is not a whole number"),
        (b"GEN\n", "?", "it names no request"),
        (b"GEN \xff 5 4\n", "?", "not UTF-8"),
        (b"HELLO x 5 4\n", "?", "not GEN, STOP or QUIT"),
        (b"\n", "?", "not GEN, STOP or QUIT"),
        (b"GEN x 5 top_p=0 4,5\n", "x", "top_p must be above 0"),
        (b"GEN x 5 logprobs=21 4,5\n", "x", "0 to 20 can be listed"),
        (b"GEN x 5 4,%d\n" % VOCAB, "x", f"a token id is outside the vocabulary of {VOCAB}"),
        (b"GEN x 5 allowed=4,%d 4\n" % VOCAB, "x", f"a token id is outside the vocabulary of {VOCAB}"),
        (b"GEN x 5 %b4\n" % (b"4," * CONTEXT), "x", f"the prompt has {CONTEXT + 1} tokens, the context {CONTEXT}"),
    ],
)
def test_a_bad_request_is_answered_and_the_engine_lives(
    shared: Spoken, llm: LLM, line: bytes, tag: str, reason: str
) -> None:
    shared.send(gen("beside", PROMPTS[4], 16), line)
    lines = shared.until_ended(2)
    [failed] = of(lines, tag)
    assert isinstance(failed, Failed)
    assert reason in failed.message
    assert tokens(of(lines, "beside")) == greedy_tokens(llm, PROMPTS[4], 16)


def test_a_name_that_is_in_use_is_refused(shared: Spoken, llm: LLM) -> None:
    shared.send(gen("a", PROMPTS[4], 64), gen("a", PROMPTS[5]))
    lines = shared.until_ended(2)
    failures = [line for line in lines if isinstance(line, Failed)]
    assert failures == [Failed("a request of the name a is running", "?")]
    assert tokens(lines) == greedy_tokens(llm, PROMPTS[4], 64)


@pytest.mark.parametrize(
    ("prompt", "max_new", "generated"),
    [(PROMPTS[0] * 454, 100, 10), ([5] * CONTEXT, 4, 0), (PROMPTS[0], 0, 0)],
    ids=["up to the context", "no room", "none asked for"],
)
def test_lengths(shared: Spoken, prompt: list[int], max_new: int, generated: int) -> None:
    lines = shared.ask(gen("a", prompt, max_new, logprobs=0))
    assert timeless(lines[-1:]) == [Done(generated, len(prompt), 0, 0, "length", tag="a")]
    assert len(tokens(lines)) == len(scores(lines)) == generated


def test_what_was_not_computed_again_is_told(speak: Callable[..., Spoken]) -> None:
    engine = speak("--prefix-caching", "--block-size", "16")
    engine.start()
    prompt = prompts(1, 50, seed=8)[0]
    for reused in (0, 48):
        lines = engine.ask(gen("a", prompt, 3))
        assert timeless(lines[-1:]) == [Done(3, 50, 0, 0, "length", reused=reused, tag="a")]


def test_an_end_token_is_a_token_of_the_reply(tiny_dir: Callable[..., Path], tmp_path: Path, llm: LLM) -> None:
    end = greedy_tokens(llm, PROMPTS[0], 6)[5]
    assert end not in greedy_tokens(llm, PROMPTS[0], 5)
    model = tiny_dir("llama", vocab_size=VOCAB, max_position_embeddings=CONTEXT, eos_token_id=end)
    with Spoken(tmp_path / "log", model, "--max-num-seqs", "2") as engine:
        engine.start()
        lines = engine.ask(gen("a", PROMPTS[0], 50, logprobs=1))
    assert tokens(lines) == greedy_tokens(llm, PROMPTS[0], 6)
    assert len(scores(lines)) == 6
    assert timeless(lines[-1:]) == [Done(6, 9, 0, 0, "stop", tag="a")]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("k", [None, 0, 9])
@pytest.mark.parametrize("count", [1, 3, 40, 1100, VOCAB])
def test_an_allowed_set_is_listed_whole_and_sums_to_1(
    shared: Spoken, llm: LLM, count: int, k: int | None, temperature: float
) -> None:
    allowed = np.random.default_rng(count).permutation(VOCAB)[:count].tolist()
    lines = shared.ask(
        gen("a", PROMPTS[6], 5, logprobs=k, allowed=[*allowed, allowed[0]], temperature=temperature, seed=1)
    )
    assert len(tokens(lines)) == 5
    assert set(tokens(lines)) <= set(allowed)
    assert len(scores(lines)) == (0 if k is None else 5)
    sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=5, allowed_token_ids=tuple(allowed))
    [reply] = llm.generate([PROMPTS[6]], sampling)
    assert tokens(lines) == reply.token_ids
    for token_id, line in zip(tokens(lines), scores(lines), strict=False):
        assert sorted(line.ids) == sorted(allowed)
        assert line.logprobs == sorted(line.logprobs, reverse=True)
        assert abs(math.fsum(map(math.exp, line.logprobs)) - 1) < 1e-6
        assert line.logprobs[line.ids.index(token_id)] == line.logprob


@pytest.mark.slow
@pytest.mark.parametrize(
    ("farewell", "close"),
    [(b"QUIT\n", False), (b"QUIT\r\n", False), (b"", True), (b"GEN c 5 4,5", True), (b"QUIT\nGEN c 5 4,5\n", True)],
    ids=["QUIT", "CR LF", "end of file", "half a line", "lines after QUIT"],
)
@pytest.mark.parametrize("running", [True, False])
def test_it_ends_when_told_to(speak: Callable[..., Spoken], farewell: bytes, close: bool, running: bool) -> None:
    engine = speak()
    engine.start()
    if running:
        engine.send(gen("a", PROMPTS[0], LONG), gen("b", PROMPTS[0], LONG))
        assert isinstance(engine.read(), Token)
    engine.send(farewell)
    if close:
        assert engine.process.stdin is not None
        engine.process.stdin.close()
    assert engine.finish() == 0
    assert b"#c" not in engine.stdout
    assert "Error" not in engine.stderr
    assert "Traceback" not in engine.stderr


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, SLOTS])
def test_what_is_answered_is_said_before_it_ends(speak: Callable[..., Spoken], slots: int) -> None:
    engine = speak(slots=slots)
    engine.start()
    engine.send(b"GEN a 3 bad\nQUIT\n")
    assert engine.finish() == 0
    assert engine.stdout.splitlines()[-1].startswith(b"ERR ")


@pytest.mark.slow
def test_an_interrupt_ends_it(speak: Callable[..., Spoken]) -> None:
    busy, idle = speak(), speak()
    for engine in (busy, idle):
        engine.start()
    busy.send(gen("a", PROMPTS[0], LONG))
    assert isinstance(busy.read(), Token)
    for engine in (busy, idle):
        engine.process.send_signal(signal.SIGINT)
        assert engine.finish() == 130
        assert "Traceback" not in engine.stderr


def test_a_reader_that_goes_away_ends_it(speak: Callable[..., Spoken]) -> None:
    reader, writer = os.pipe()
    engine = speak(on_stdout=writer)
    os.close(writer)
    with open(reader, "rb") as stdout:
        for line in stdout:
            if line.startswith(b"READY"):
                break
        engine.send(gen("a", PROMPTS[0], LONG))
        assert stdout.readline().startswith(b"T ")
    assert engine.finish() == 141
    assert "Traceback" not in engine.stderr
    assert "Exception" not in engine.stderr


def test_a_model_that_is_not_there_is_an_error_of_the_command(tmp_path: Path) -> None:
    with Spoken(tmp_path / "log", tmp_path / "nothing") as engine:
        assert engine.finish() == 1
        assert re.match(r"neper: error: no model '.*nothing'", engine.stderr.splitlines()[-1])
        assert "Traceback" not in engine.stderr
        assert b"READY" not in engine.stdout


PRINTS = """
import os
from neper.engine.core import EngineCore
step, start = EngineCore.step, EngineCore.__init__
def loud_step(core):
    print("a step")
    os.write(1, b"READY 1\\n")
    return step(core)
def loud_start(core, *arguments):
    print("a start")
    start(core, *arguments)
EngineCore.step, EngineCore.__init__ = loud_step, loud_start
"""


def test_nothing_but_lines_comes_on_stdout(speak: Callable[..., Spoken], llm: LLM) -> None:
    engine = speak(patch=PRINTS)
    engine.start()
    lines = engine.ask(gen("a", PROMPTS[0], logprobs=1))
    assert [type(line) for line in lines] == [Token, Logprobs] * 8 + [Done]
    assert tokens(lines) == greedy_tokens(llm, PROMPTS[0], 8)
    engine.send(b"QUIT\n")
    assert engine.finish() == 0
    heads = {line.split()[0] for line in engine.stdout.splitlines()}
    assert heads == {b"INFO", b"READY", b"T", b"LP", b"DONE"}
    assert engine.stdout.count(b"READY") == 1
    assert engine.stderr.count("a start\n") == 1
    assert engine.stderr.count("a step\n") == engine.stderr.count("READY 1\n") >= 8


def test_scores_of_others_change_no_line_of_a_request_without(speak: Callable[..., Spoken]) -> None:
    engine = speak("--max-num-batched-tokens", "16")
    engine.start()
    prompt = prompts(1, 50, seed=8)[0]
    alone = timeless(engine.ask(gen("a", prompt, 12)))
    assert [type(line) for line in alone] == [Progress] * 3 + [Token] * 12 + [Done]
    for k in (None, 0, 20):
        beside = gen("b", prompts(1, 3, seed=9)[0], LONG, logprobs=k)
        engine.send(beside)
        first = engine.read()
        engine.send(gen("a", prompt, 12))
        lines = [first, *engine.until_ended(1)]
        engine.send(Stop("b"))
        engine.until_ended(1)
        # One token of each step is the other's, whatever is listed of it.
        progress = [Progress(15, 50, "a"), Progress(30, 50, "a"), Progress(45, 50, "a")]
        assert timeless(of(lines, "a")) == progress + alone[3:]


def test_a_long_prompt_tells_how_far_it_is(speak: Callable[..., Spoken]) -> None:
    engine = speak("--max-num-batched-tokens", "16")
    engine.start()
    for k in (None, 3):
        lines = engine.ask(gen("a", prompts(1, 50, seed=8)[0], 2, logprobs=k))
        assert [line for line in lines if isinstance(line, Progress)] == [
            Progress(16, 50, "a"), Progress(32, 50, "a"), Progress(48, 50, "a"),
        ]  # fmt: skip
        assert [type(line) for line in lines[:3]] == [Progress] * 3


def test_a_request_that_waits_shows_that_it_lives(speak: Callable[..., Spoken]) -> None:
    engine = speak(slots=2, patch="import neper.wire.speak\nneper.wire.speak.HEARTBEAT = 0.1")
    engine.start()
    engine.send(gen("a", PROMPTS[0], LONG), gen("b", PROMPTS[0], LONG), gen("c", PROMPTS[1], 3))
    lines: list[AnswerLine] = []
    began = time.monotonic()
    while len(of(lines, "c")) < 3:
        lines.append(engine.read())
    assert of(lines, "c") == [Progress(0, 9, "c")] * 3
    assert time.monotonic() - began >= 0.2
    assert not [line for line in of(lines, "a") if not isinstance(line, Token)]


FAILS = """
from neper.engine.core import EngineCore
step = EngineCore.step
def failing_step(core):
    if any(13 in seq.token_ids[:1] for seq in core.scheduler.running):
        raise RuntimeError("thirteen")
    return step(core)
EngineCore.step = failing_step
EngineCore.device_usable = lambda core: USABLE
"""


@pytest.mark.parametrize("slots", [1, 2])
def test_a_step_that_raises_ends_its_requests_and_no_others(speak: Callable[..., Spoken], llm: LLM, slots: int) -> None:
    engine = speak(slots=slots, patch=FAILS.replace("USABLE", "True"))
    engine.start()
    tag = "a" if slots > 1 else None
    lines = engine.ask(gen(tag, [13, 5, 6], LONG, logprobs=0))
    assert lines[-1] == Failed("the engine failed in a step; its log says why", tag)
    assert tokens(engine.ask(gen(tag, PROMPTS[0]))) == greedy_tokens(llm, PROMPTS[0], 8)
    assert "Traceback" in engine.stderr


def test_a_lost_device_ends_it(speak: Callable[..., Spoken]) -> None:
    engine = speak(patch=FAILS.replace("USABLE", "False"))
    engine.start()
    engine.send(gen("a", [13, 5, 6], LONG))
    assert isinstance(engine.until_ended(1)[-1], Failed)
    assert engine.finish() == 1
