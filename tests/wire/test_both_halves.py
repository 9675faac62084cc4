"""Neper drives neper over lines: the same requests give the same tokens and numbers as in process."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from neper.config import LineEngineConfig
from neper.engine.interface import Engine
from neper.text.tokenizer import Tokenizer
from neper.types import LogprobParams, PackedRows, Request, SamplingParams
from neper.wire.drive import LineEngine
from tests.cases.conftest import write_reasoning_model
from tests.helpers.engine import join, make_core, run
from tests.helpers.tiny import VOCAB_SIZE

T = TypeVar("T")
AT_ONCE = 8
EOS = (2,)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reasoning_model(tmp_path_factory.mktemp("both") / "tiny")


def command(directory: Path, *options: str) -> str:
    engine = f"{sys.executable} -m neper engine {directory} --device cpu --dtype float32 --num-threads 1"
    return " ".join([engine, "--max-num-seqs", str(AT_ONCE), *options, "--serve"])


def line_engine(directory: Path, tmp_path: Path, *options: str) -> LineEngine:
    config = LineEngineConfig(
        engine_command=command(directory, *options), tokenizer=str(directory), engine_log=str(tmp_path / "engine.log")
    )
    return LineEngine(config, vocab_size=Tokenizer.from_directory(directory).vocab_size)


def made_up(random: random.Random, number: int) -> Request:
    """A request of any kind that lines can carry."""
    allowed = tuple(random.sample(range(3, VOCAB_SIZE), random.randint(1, 60))) if random.random() < 0.2 else ()
    sampling = SamplingParams(
        max_tokens=random.randint(1, 24),
        temperature=random.choice([0.0, 0.0, 0.7, 1.3]),
        top_p=random.choice([1.0, 0.8]),
        top_k=random.choice([0, 7]),
        min_p=random.choice([0.0, 0.05]),
        seed=random.randrange(-(2**63), 2**63),
        presence_penalty=random.choice([0.0, 0.0, 0.5]),
        frequency_penalty=random.choice([0.0, 0.0, -0.25]),
        repetition_penalty=random.choice([1.0, 1.0, 1.2]),
        allowed_token_ids=allowed,
        stop_token_ids=tuple(random.sample(range(VOCAB_SIZE), random.choice([0, 0, 20]))),
    )
    return Request(
        request_id=f"r{number}-0",
        prompt_token_ids=[random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 60))],
        sampling=sampling,
        logprobs=LogprobParams(top_k=random.choice([None, 0, 1, 5, 20])),
        eos_token_ids=EOS,
    )


async def read(engine: Engine, request: Request, leave_after: int | None = None) -> tuple[list[PackedRows], Any]:
    """Rows of the chunks, and the last one; with `leave_after` only until so many tokens were there."""
    stream = engine.submit(request)
    rows, last = [], None
    try:
        async for last in stream:
            if last.tokens is not None:
                rows.append(last.tokens)
            if leave_after is not None and sum(map(len, rows)) >= leave_after:
                break
    finally:
        stream.close()
    return rows, last


def with_engine(engine: LineEngine, work: Callable[[LineEngine], Awaitable[T]]) -> T:
    """What `work` brings of an engine that is started for it, and did not die."""

    async def worked() -> T:
        await engine.start()
        try:
            found = await work(engine)
            assert engine.stats().restarts == 0
            return found
        finally:
            await engine.close()

    return asyncio.run(worked())


def numbers(rows: PackedRows) -> Any:
    """[n, 1 + k] of each row, 0 in unused places."""
    if rows.top_k is None:
        return np.zeros(0)
    return np.hstack([rows.logprob.reshape(-1, 1), np.where(rows.top_ids >= 0, rows.top_logprobs, 0.0)])


@pytest.mark.slow
def test_a_hundred_random_requests(directory: Path, tmp_path: Path) -> None:
    """Eight at a time, some left in the middle. Who shares a step can change a sum's last bits, and so near ties."""
    numbered = random.Random(1)
    requests = [made_up(numbered, number) for number in range(100)]
    leaving = {r.request_id: numbered.randint(1, 6) for r in requests if numbered.random() < 0.25}
    core = make_core(directory)
    expected = {request.request_id: run(core, [request])[request.request_id] for request in requests}

    async def asked(engine: LineEngine) -> list[tuple[list[PackedRows], Any]]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def ask(request: Request) -> tuple[list[PackedRows], Any]:
            async with slots:
                return await read(engine, request, leaving.get(request.request_id))

        return await asyncio.gather(*map(ask, requests))

    found = with_engine(line_engine(directory, tmp_path), asked)
    whole = 0
    for request, (rows, last) in zip(requests, found, strict=True):
        result = expected[request.request_id]
        tokens, same = join(rows), result.tokens
        count = len(tokens)
        assert tokens.top_k == same.top_k == request.num_listed(VOCAB_SIZE)
        assert tokens.token_ids.tolist() == same.token_ids[:count].tolist()
        assert tokens.top_k is None or tokens.top_ids.tolist() == same.top_ids[:count].tolist()
        np.testing.assert_allclose(numbers(tokens), numbers(same[:count]), rtol=0, atol=1e-5)
        if request.request_id not in leaving or last.finish_reason is not None:
            assert count == len(same)
            assert last.finish_reason is result.finish_reason
            assert last.stop_token_id == result.last.stop_token_id
            whole += 1
    assert whole >= 75


@pytest.mark.slow
def test_alone_every_bit_is_the_same(directory: Path, tmp_path: Path) -> None:
    """The shortest text of a float32 reads back as it was."""
    numbered = random.Random(2)
    core = make_core(directory, prefix_caching=False)
    requests = [made_up(numbered, number) for number in range(25)]

    async def asked(engine: LineEngine) -> list[tuple[list[PackedRows], Any]]:
        return [await read(engine, request) for request in requests]

    for request, (rows, last) in zip(
        requests, with_engine(line_engine(directory, tmp_path, "--no-prefix-caching"), asked), strict=True
    ):
        result = run(core, [request])[request.request_id]
        tokens = join(rows)
        assert tokens.token_ids.tolist() == result.token_ids
        assert last.finish_reason is result.finish_reason
        if tokens.top_k is not None:
            assert tokens.words[:, 2:].tolist() == result.tokens.words[:, 2:].tolist()


def test_one_request_at_a_time_in_the_untagged_form(directory: Path, tmp_path: Path) -> None:
    numbered = random.Random(3)
    requests = [made_up(numbered, number) for number in range(12)]
    core = make_core(directory)

    async def asked(engine: LineEngine) -> list[tuple[list[PackedRows], Any]]:
        assert engine.capabilities.max_num_seqs == 1
        leaving = [3 if i % 4 == 3 else None for i in range(len(requests))]
        return await asyncio.gather(*(read(engine, *asked) for asked in zip(requests, leaving, strict=True)))

    found = with_engine(line_engine(directory, tmp_path, "--max-num-seqs", "1"), asked)
    for i, (request, (rows, last)) in enumerate(zip(requests, found, strict=True)):
        result = run(core, [request])[request.request_id]
        tokens = join(rows)
        assert tokens.token_ids.tolist() == result.token_ids[: len(tokens)]
        assert i % 4 == 3 or last.finish_reason is result.finish_reason
        assert i % 4 == 3 or len(tokens) == len(result.token_ids)
