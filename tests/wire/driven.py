"""A LineEngine over the scripted engine: starts both, asks, gathers replies, and knows what they must be."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from neper.config import LineEngineConfig
from neper.engine.interface import TokenStream
from neper.errors import EngineDeadError
from neper.types import FinishReason, LogprobParams, Request, SamplingParams, TokenChunk
from neper.wire.drive import LineEngine
from neper.wire.lines import parse_answer
from tests.helpers import line_engine
from tests.helpers.line_engine import made_up

VOCAB_SIZE = 97
EOS = VOCAB_SIZE - 1
PROGRAM = Path(line_engine.__file__)
FORMS = ["READY 512", "READY 512 stop", "READY 512 slots=3", "READY 512 stop slots=3"]
"""Whether it honours STOP, and whether it names requests."""

SECONDS = 300.0
"""A limit for what comes soon: far away, since a test that passes does not wait for it, and machines can be slow."""

Row = tuple[int, int, float, tuple[tuple[int, float], ...]]
"""Id, rank, logprob, and the alternatives."""


SILENCE = 0.1
"""A silence timeout for tests with a Clock: the driver looks at that four times as often, in real time."""


class Clock:
    """The driver's clock, stopped: time passes where a test says so, and with lines of the engine.

    Attributes:
        now: seconds.
        a_line: seconds that a line of the engine takes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.a_line = 0.0
        monkeypatch.setattr("neper.wire.drive.time", self)
        monkeypatch.setattr("neper.wire.handshake.time", self)
        monkeypatch.setattr("neper.wire.drive.parse_answer", self._parse_answer)

    def monotonic(self) -> float:
        return self.now

    def _parse_answer(self, line: bytes, *, tagged: bool) -> Any:
        self.now += self.a_line
        return parse_answer(line, tagged=tagged)


class Reply(msgspec.Struct):
    """The chunks of a request as one; `rows` has None in place of a row without scores."""

    token_ids: list[int]
    rows: list[Row | None]
    finish_reason: FinishReason | None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0


class Driven:
    """A LineEngine that has been started, and what its child received."""

    def __init__(self, engine: LineEngine, record: Path, vocab_size: int) -> None:
        self.engine = engine
        self.record = record
        self.vocab_size = vocab_size

    async def ask(self, request: Request) -> Reply:
        return await gather(self.engine.submit(request))

    async def asks_right(self, request: Request) -> None:
        assert await self.ask(request) == expected(request, self.vocab_size)

    async def next_is_right(self, scores: bool = True) -> None:
        """Whatever happened before: the requests after it, some of them at a time, are as on an undisturbed engine.

        `scores`: what is asked for is had.
        """
        asked = [request(f"next-{k}", [3, 1, k], 5, listed=k if scores else None) for k in (3, 0, 20)]
        await asyncio.gather(*map(self.asks_right, [*asked, request("next-plain", [2, 2], 3)]))
        await self.asks_right(request("last", [8, 8, 8], 4, listed=2 if scores else None))

    def notes(self, word: str) -> list[str]:
        """Lines of the record that begin so, of both kinds, without the word."""
        lines = self.record.read_text().splitlines()
        return [line.removeprefix(word).strip() for line in lines if line.split(" ")[0] == word]

    @property
    def received(self) -> list[str]:
        return [line for line in self.record.read_text().splitlines() if not line.startswith("#")]

    @property
    def pids(self) -> list[int]:
        """Of the processes so far."""
        return [json.loads(note)[0] for note in self.notes("#start")]


@asynccontextmanager
async def driven(
    directory: Path,
    ready: str = "READY 512 stop",
    *,
    infos: Sequence[str] = (),
    vocab_size: int = VOCAB_SIZE,
    engine_log: str | None = None,
    start_timeout: float = SECONDS,
    silence_timeout: float = SECONDS,
    **script: Any,
) -> AsyncIterator[Driven]:
    """`script`: as tests/helpers/line_engine says; `starts` made of `infos` and `ready` where it has none."""
    record = directory / "record"
    script = {"record": str(record), "starts": [[{"print": [*infos, ready]}]]} | script
    file = directory / "script.json"
    file.write_text(json.dumps(script))
    config = LineEngineConfig(
        engine_command=shlex.join([sys.executable, "-I", "-S", str(PROGRAM), str(file)]),
        tokenizer="none",
        engine_log=engine_log or str(directory / "log"),
        engine_start_timeout=start_timeout,
        engine_silence_timeout=silence_timeout,
    )
    engine = LineEngine(config, vocab_size=vocab_size)
    await engine.start()
    found = Driven(engine, record, engine.capabilities.vocab_size)
    try:
        yield found
    finally:
        await engine.close()
        assert not found.notes("#overlap"), "a GEN was sent before the DONE of the one before"


def request(
    name: str,
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int | None = 4,
    *,
    listed: int | None = None,
    **sampling: Any,
) -> Request:
    """`listed`: alternatives of each token; None = no scores."""
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0} | sampling),
        logprobs=LogprobParams(top_k=listed),
        eos_token_ids=(EOS,),
    )


def expected(request: Request, vocab_size: int = VOCAB_SIZE) -> Reply:
    """What the scripted engine makes up for it."""
    count, allowed = request.sampling.max_tokens, request.sampling.allowed_token_ids
    assert count is not None
    made = [made_up(request.prompt_token_ids, place, vocab_size, allowed) for place in range(count)]
    places = request.num_listed(vocab_size)
    rows = [None if places is None else row(token_id, pairs, places, bool(allowed)) for token_id, pairs in made]
    return Reply([token_id for token_id, _ in made], rows, FinishReason.LENGTH)


def row(token_id: int, pairs: Sequence[tuple[int, float]], places: int, whole: bool = False) -> Row:
    """`pairs`: all there are, best first; `whole`: the line has them all, whatever its row has room for."""
    own = dict(pairs)[token_id]
    listed = pairs if whole else pairs[:places]
    padding = [(-1, -float("inf"))] * (places - len(listed))
    return token_id, 1 + sum(value > own for _, value in listed), own, (*listed[:places], *padding)


async def gather(stream: TokenStream) -> Reply:
    """All the chunks of a request."""
    try:
        return folded([chunk async for chunk in stream])
    finally:
        stream.close()


def folded(chunks: Sequence[TokenChunk]) -> Reply:
    reply = Reply([], [], None)
    for number, chunk in enumerate(chunks, 1):
        assert (chunk.finish_reason is not None) == (number == len(chunks))
        if chunk.tokens is not None:
            reply.token_ids += chunk.tokens.token_ids.tolist()
            reply.rows += rows_of(chunk)
        reply.num_cached_tokens = max(reply.num_cached_tokens, chunk.num_cached_tokens)
    if chunks:
        last = chunks[-1]
        reply.finish_reason, reply.stop_token_id, reply.error = last.finish_reason, last.stop_token_id, last.error
    return reply


def rows_of(chunk: TokenChunk) -> list[Row | None]:
    packed = chunk.tokens
    if packed is None:
        return []
    if packed.top_k is None:
        assert packed.words[:, 1].all()
        return [None] * len(packed)
    listed = [
        tuple(zip(ids, values, strict=True))
        for ids, values in zip(packed.top_ids.tolist(), packed.top_logprobs.tolist(), strict=True)
    ]
    own = (packed.token_ids.tolist(), packed.rank.tolist(), packed.logprob.tolist())
    return list(zip(*own, listed, strict=True))


async def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.002)


def go(test: Coroutine[Any, Any, None], run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run) -> None:
    """`run`: of which event loop; a server runs on uvloop where there is one."""

    async def within() -> None:
        await asyncio.wait_for(test, 2 * SECONDS)

    run(within())


def gone(pid: int) -> bool:
    """Whether a process has ended (what nobody waited for is a zombie)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


UNTAGGED, TAGGED = "READY 512 stop", "READY 512 stop slots=3"
BOTH = pytest.mark.parametrize("ready", [UNTAGGED, TAGGED])
LOOPS = pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
ALL_FORMS = pytest.mark.parametrize("ready", FORMS)
RAW = "INFO logprobs=raw-v1"

DONE = "DONE 2 3 1 2 length"
CANCEL = "DONE 2 3 1 2 cancel"
TWO = ["T 5", "LP -0.5 5:-0.5 7:-2", "T 6", "LP -1 7:-0.25 6:-1"]
"""Two tokens, of a request with two alternatives."""

TWO_ROWS = [(5, 1, -0.5, ((5, -0.5), (7, -2.0))), (6, 2, -1.0, ((7, -0.25), (6, -1.0)))]


def steps(*lines: str) -> list[dict[str, Any]]:
    return [{"print": list(lines)}]


def stopped(*lines: str, ready: str) -> list[dict[str, Any]]:
    """Lines that make the driver end the request, and those that come late: another token, its scores, the end."""
    wait = {"wait": "STOP"} if "stop" in ready else {"sleep": 0.02}
    return [*steps(*lines), wait, *steps("T 9", "LP -1 9:-1 8:-2", CANCEL)]


async def error_of(stream: TokenStream) -> tuple[list[TokenChunk], str]:
    """The chunks before the death of the engine, and what that is called."""
    chunks: list[TokenChunk] = []

    async def read() -> None:
        while True:
            chunks.append(await stream.__anext__())

    try:
        with pytest.raises(EngineDeadError) as dead:
            await read()
    finally:
        stream.close()
    return chunks, str(dead.value)


async def another_process(child: Driven, count: int = 2) -> None:
    await until(lambda: len(child.pids) == count and child.engine.alive)


async def is_broken(child: Driven, reply: Reply, right: int, says: str) -> None:
    assert reply.finish_reason is FinishReason.ERROR
    assert reply.rows == TWO_ROWS[:right]
    assert reply.error
    assert says in reply.error
    await child.next_is_right()
    assert len(child.pids) == 1
