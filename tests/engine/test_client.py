"""The engine in its own process, through its asyncio client."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from transformers import LlamaForCausalLM

from neper.config import EngineConfig, WatchConfig
from neper.engine import memory
from neper.engine.interface import Engine
from neper.engine.remote.client import EngineClient, _Connection
from neper.engine.remote.heartbeat import Heartbeat, Pulse
from neper.engine.remote.messages import Beat, Prompts, Submit, decode_from_engine, decode_to_engine
from neper.errors import EngineDeadError, OverloadedError, StartupError
from neper.models.source import resolve
from neper.types import FinishReason, Request, SamplingParams, TokenChunk
from tests.helpers.engine import join, make_core, prompts, request, run
from tests.models.gguf_files import write_gguf

LONG = SamplingParams(temperature=0, max_tokens=400)


@pytest.fixture(scope="module")
def directory(tiny_dir: Callable[..., Path]) -> Path:
    return tiny_dir("llama")


@asynccontextmanager
async def engine(directory: Path, **config: Any) -> AsyncIterator[EngineClient]:
    values = {"device": "cpu", "dtype": "float32", "num_threads": 1} | config
    client = EngineClient(EngineConfig(model=str(directory), **values), resolve(str(directory)), log_level="warning")
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def collect(client: Engine, item: Request) -> list[TokenChunk]:
    stream = client.submit(item)
    try:
        return [chunk async for chunk in stream]
    finally:
        stream.close()


async def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        await asyncio.sleep(0.02)


def pid_of(client: EngineClient) -> int:
    assert client._supervisor.connection is not None
    assert client._supervisor.connection._process is not None
    return client._supervisor.connection._process.pid


def go(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


def test_the_same_rows_as_in_process(directory: Path) -> None:
    texts = prompts(8, 20)
    sampling = [SamplingParams(temperature=float(i % 2), seed=i, max_tokens=5 + i) for i in range(8)]
    items = [
        request(str(i), t, s, top_k=i, prompt_top_k=2) for i, (t, s) in enumerate(zip(texts, sampling, strict=True))
    ]
    want = {item.request_id: run(make_core(directory), [item])[item.request_id] for item in items}

    async def test() -> None:
        async with engine(directory) as client:
            assert client.capabilities.vocab_size == 384
            for item in items:
                chunks = await collect(client, item)
                name = item.request_id
                assert b"".join(c.tokens.data for c in chunks if c.tokens) == want[name].tokens.data
                assert b"".join(c.prompt.data for c in chunks if c.prompt) == want[name].prompt.data
                assert chunks[-1].finish_reason is FinishReason.LENGTH
            together = await asyncio.gather(*(collect(client, item) for item in items))
            for item, chunks in zip(items, together, strict=True):
                assert [t for c in chunks if c.tokens for t in c.tokens.token_ids] == want[item.request_id].token_ids
            assert client.stats().generated_tokens == 2 * sum(5 + i for i in range(8))

    go(test())


@pytest.mark.slow
def test_case_77_the_process_reads_a_gguf_files_own_values(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copy(directory / "tokenizer.json", tmp_path)
    write_gguf(tmp_path / "tiny.gguf", LlamaForCausalLM.from_pretrained(directory))
    item = request("a", prompts(1, 20)[0], SamplingParams(temperature=0, max_tokens=5), top_k=3)
    want = run(make_core(directory), [item])["a"]

    async def test() -> None:
        async with engine(tmp_path / "tiny.gguf") as client:
            chunks = await collect(client, item)
            assert b"".join(c.tokens.data for c in chunks if c.tokens) == want.tokens.data

    go(test())


@pytest.mark.slow
def test_a_closed_stream_stops_the_work(directory: Path) -> None:
    async def test() -> None:
        async with engine(directory) as client:
            [text] = prompts(1, 20)
            streams = [client.submit(request(str(i), text, LONG)) for i in range(4)]
            await streams[0].__anext__()
            streams[1].close()  # never iterated
            for stream in streams:
                stream.close()
                stream.close()
            await until(lambda: client.stats().running == 0 and client.stats().waiting == 0)
            assert client.stats().free_blocks == client.stats().total_blocks
            assert client.stats().generated_tokens < 400
            assert (await collect(client, request("again", text)))[-1].finish_reason is FinishReason.LENGTH

    go(test())


@pytest.mark.slow
def test_a_bad_request_is_an_error_and_the_next_one_works(directory: Path) -> None:
    async def test() -> None:
        async with engine(directory) as client:
            [bad] = await collect(client, request("bad", [5, 9999]))
            assert bad.finish_reason is FinishReason.ERROR
            assert "vocabulary" in (bad.error or "")
            assert (await collect(client, request("good", [5, 6])))[-1].finish_reason is FinishReason.LENGTH

    go(test())


def test_a_prompt_is_sent_once_for_all_of_its_choices() -> None:
    prompt, other = list(range(1000)), list(range(1000))
    sends, receives = Prompts(), Prompts()

    def sent(name: str, ids: list[int], predicted: tuple[int, ...] = ()) -> int:
        item = msgspec.structs.replace(
            request(name, ids, SamplingParams(seed=len(name))), prediction_token_ids=predicted
        )
        data = sends.encoded(item)
        message = decode_to_engine(data)
        assert isinstance(message, Submit)
        assert receives.request(message) == item
        return len(data)

    sizes = [sent(name, ids) for name, ids in (("a", prompt), ("b", prompt), ("c", other), ("d", other), ("e", prompt))]
    assert [size > 2000 for size in sizes] == [True, False, True, False, True]
    broken = [*prompt, 2**70]
    for _ in range(2):
        with pytest.raises(OverflowError):
            sends.encoded(request("f", broken))
    assert sent("g", prompt) < 2000  # still the last that was sent
    predicted = tuple(range(1000))
    sizes = [sent(name, prompt, ids) for name, ids in (("h", predicted), ("i", predicted), ("j", ()), ("k", predicted))]
    assert [size > 2000 for size in sizes] == [True, False, True, True]


def test_choices_of_one_prompt_are_computed_from_it_by_the_next_engine_too(directory: Path) -> None:
    [prompt] = prompts(1, 20)
    items = [request(name, prompt, top_k=2) for name in ("0", "1", "2")]
    expected = run(make_core(directory), items)

    async def test() -> None:
        async with engine(directory) as client:
            for restarts in range(2):
                if restarts:
                    os.kill(pid_of(client), signal.SIGKILL)
                    await until(lambda: client.stats().restarts > 0 and client.alive)
                for item, chunks in zip(items, await asyncio.gather(*[collect(client, i) for i in items]), strict=True):
                    found = join([chunk.tokens for chunk in chunks]).token_ids
                    assert found.tolist() == expected[item.request_id].token_ids

    go(test())


@pytest.mark.slow
def test_death_is_an_error_for_its_requests_and_the_next_engine_serves(directory: Path) -> None:
    async def test() -> None:
        async with engine(directory) as client:
            [text] = prompts(1, 20)
            want = [c.tokens.token_ids.tolist() for c in await collect(client, request("0", text)) if c.tokens]
            stream = client.submit(request("1", text, LONG))
            await stream.__anext__()
            first = pid_of(client)
            os.kill(first, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                async for _ in stream:
                    pass
            assert not client.alive
            with pytest.raises(OverloadedError) as refused:
                client.submit(request("2", text))
            assert refused.value.retry_after
            stream.close()
            await until(lambda: client.alive)
            assert pid_of(client) != first
            assert client.stats().restarts == 1
            got = [c.tokens.token_ids.tolist() for c in await collect(client, request("3", text)) if c.tokens]
            assert got == want

    go(test())


@pytest.mark.slow
def test_case_116_an_engine_that_hangs_takes_no_requests_and_is_started_again(directory: Path) -> None:
    async def test() -> None:
        async with engine(directory) as client:
            [text] = prompts(1, 20)
            first = pid_of(client)
            client._watch_config = WatchConfig(engine_unhealthy_after=2, engine_restart_after=1e6)
            stream = client.submit(request("0", text, LONG))
            await stream.__anext__()
            os.kill(first, signal.SIGSTOP)
            try:
                await until(lambda: not client.alive)
                with pytest.raises(OverloadedError, match="does not answer"):
                    client.submit(request("1", text))
            finally:
                os.kill(first, signal.SIGCONT)
            # It comes back, and its requests were only late.
            async for chunk in stream:
                last = chunk
            assert last.finish_reason is FinishReason.LENGTH
            stream.close()
            await until(lambda: client.alive)
            assert client.stats().restarts == 0

            stream = client.submit(request("2", text, LONG))
            await stream.__anext__()
            client._watch_config = WatchConfig(engine_unhealthy_after=1, engine_restart_after=2)
            os.kill(first, signal.SIGSTOP)
            with pytest.raises(EngineDeadError):
                async for _ in stream:
                    pass
            stream.close()
            # Nothing runs, and nothing is held, while there is no engine (case 120).
            assert (client.stats().running, client.stats().waiting) == (0, 0)
            assert client.stats().free_blocks == client.stats().total_blocks
            client._watch_config = WatchConfig()
            await until(lambda: client.alive)
            assert pid_of(client) != first
            assert client.stats().restarts == 1
            assert (await collect(client, request("3", text)))[-1].finish_reason is FinishReason.LENGTH

    go(test())


def test_case_116_a_long_step_is_no_hang_and_a_loop_that_stands_still_is_one() -> None:
    pulse = Pulse()
    for turn in range(3):
        pulse.beat(turn)
        for _ in range(100):  # beats come, the loop is in one step
            pulse.tick()
            pulse.heard()
            pulse.beat(turn)
        assert (pulse.silent, pulse.stuck) == (0, 100)
    for _ in range(7):
        pulse.tick()
    assert (pulse.silent, pulse.stuck) == (7, 107)
    pulse.heard()  # chunks count as a sign of life, but only beats say that the loop turns
    assert (pulse.silent, pulse.stuck) == (0, 107)


def test_case_116_beats_come_while_the_loop_s_thread_computes(tmp_path: Path) -> None:
    context = zmq.Context()
    with context.socket(zmq.PULL) as inbox:
        inbox.bind(f"ipc://{tmp_path}/beats")
        heartbeat = Heartbeat(context, f"ipc://{tmp_path}/beats")
        heartbeat.start()
        ones = torch.ones(300, 300)
        while not inbox.poll(0):
            ones @ ones
            heartbeat.turns += 1
        beat = decode_from_engine(inbox.recv())
        assert isinstance(beat, Beat)
        assert 0 < beat.turns <= heartbeat.turns
        heartbeat.stop()
        heartbeat.stop()
    context.term()  # would wait for a socket that was left open


def test_case_120_what_the_allocator_says_stays_in_the_log() -> None:
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 1 bytes"),
        MemoryError("Unable to allocate 3.00 GiB"),
    ):
        assert memory.step_failure(error).startswith("the engine ran out of memory in a step")
        assert not any(word in memory.step_failure(error) for word in ("GiB", "alloc", "bytes"))
    assert memory.step_failure(KeyError("/home/someone")) == "the engine failed in a step; its log says why"


def test_close_ends_the_process_and_open_streams(directory: Path) -> None:
    async def test() -> None:
        async with engine(directory) as client:
            pid = pid_of(client)
            stream = client.submit(request("0", prompts(1, 20)[0], LONG))
            await stream.__anext__()
            await client.close()
            with pytest.raises(EngineDeadError):
                async for _ in stream:
                    pass
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    go(test())


@pytest.mark.slow
def test_closing_a_stream_wakes_the_task_that_waits_for_it(directory: Path) -> None:
    async def test() -> None:
        async with engine(directory) as client:
            stream = client.submit(request("0", prompts(1, 20)[0], LONG))

            async def read() -> None:
                async for _ in stream:
                    pass

            reader = asyncio.create_task(read())
            await asyncio.sleep(0.05)
            stream.close()
            await asyncio.wait_for(reader, 10)

    go(test())


@pytest.mark.slow
def test_a_request_that_cannot_be_sent_leaves_nothing(directory: Path) -> None:
    async def test() -> None:
        async with engine(directory) as client:
            [text] = prompts(1, 20)
            with pytest.raises(OverflowError):
                client.submit(request("0", text, SamplingParams(seed=2**70)))
            first = asyncio.create_task(collect(client, request("0", text)))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="in use"):
                client.submit(request("0", text))
            assert (await first)[-1].finish_reason is FinishReason.LENGTH

    go(test())


@pytest.mark.slow
def test_it_starts_again_after_a_start_that_could_not_even_begin(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neper.engine.remote.supervisor._FIRST_BACKOFF", 0.05)
    open_connection, opened = _Connection.open, 0

    async def fail_once(connection: _Connection) -> None:
        nonlocal opened
        opened += 1
        if opened == 1:
            raise OSError("too many open files")
        await open_connection(connection)

    async def test() -> None:
        async with engine(directory) as client:
            monkeypatch.setattr(_Connection, "open", fail_once)
            os.kill(pid_of(client), signal.SIGKILL)
            await until(lambda: opened == 2 and client.alive)

    go(test())


def test_it_can_be_closed_while_it_waits_to_start_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("neper.engine.remote.supervisor._FIRST_BACKOFF", 60.0)

    async def test() -> None:
        async with engine(directory) as client:
            os.kill(pid_of(client), signal.SIGKILL)
            await until(lambda: "starting the engine again" in caplog.text)
            await client.close()
            assert not client.alive

    with caplog.at_level("INFO"):
        go(test())


@pytest.mark.slow
def test_settings_that_do_not_fit_are_start_up_errors(directory: Path) -> None:
    async def start(**config: Any) -> None:
        async with engine(directory, **config):
            pass

    with pytest.raises(StartupError, match="kv_cache_memory"):
        go(start(kv_cache_memory=1000))
    with pytest.raises(StartupError, match="max_model_len 100000"):
        go(start(max_model_len=100_000))
    with pytest.raises(StartupError, match="cuda"):
        go(start(device="cuda:7"))


@pytest.mark.slow
@pytest.mark.parametrize("ready", [True, False])
def test_the_engine_ends_when_its_parent_is_killed(directory: Path, ready: bool) -> None:
    script = f"""
import asyncio
from neper.config import EngineConfig
from neper.engine.remote.client import EngineClient, _Connection
from neper.models.source import resolve

async def main():
    client = EngineClient(EngineConfig(model={str(directory)!r}, dtype="float32"), resolve({str(directory)!r}))
    if {ready}:
        await client.start()
        connection = client._supervisor.connection
    else:  # killed before the child has got through its imports
        connection = _Connection()
        await connection.open()
    print(connection._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
    end = time.monotonic() + 120
    while Path(f"/proc/{child}").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < end, "the engine outlived its parent"
        time.sleep(0.1)
