"""What the server bounds: requests, choices, bodies and time; a flood is refused and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest

from neper.config import ServerConfig
from neper.errors import StartupError
from neper.server import gate
from neper.server.app import create_app
from neper.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL, SECONDS, Client, new_engine, running, until
from tests.server.test_errors import CHAT, COMPLETIONS, check
from tests.server.test_failures import body


def computes(client: Client, num_seqs: int) -> None:
    client.engine.capabilities = msgspec.structs.replace(client.engine.capabilities, max_num_seqs=num_seqs)


def test_only_so_many_choices_wait(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(max_waiting=2)) as client:
        computes(client, 2)
        client.say("Hello")
        client.engine.hang_after = 1
        with client.http.stream("POST", CHAT, json=body(CHAT, n=3, stream=True)):
            until(lambda: client.server.service.num_choices == 3)
            for stream in (False, True):
                response = client.http.post(CHAT, json=body(CHAT, n=2, stream=stream))
                check(response, 429, None, "rate_limit_exceeded")
                assert response.json()["error"]["type"] == "requests"
                assert int(response.headers["retry-after"]) > 0
            client.engine.hang_after = None
            assert client.http.post(CHAT, json=body(CHAT)).status_code == 200
        until(lambda: client.server.service.num_choices == 0)
        assert client.http.post(CHAT, json=body(CHAT, n=4)).status_code == 200
        # What never fits is no matter of waiting (case 92).
        message = check(client.http.post(CHAT, json=body(CHAT, n=5)), 400, "n", "invalid_value")
        assert "5 choices" in message
        assert "more than 4" in message


def test_an_engine_that_does_not_tell_its_size_leaves_the_queue_alone_as_the_bound(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(max_waiting=3)) as client:
        assert client.http.post(CHAT, json=body(CHAT, n=3)).status_code == 200
        check(client.http.post(CHAT, json=body(CHAT, n=4)), 400, "n", "invalid_value")


def test_a_full_queue_is_told_before_the_body_is_read(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(max_waiting=1)) as client:
        client.say("Hello")
        client.engine.hang_after = 1
        with client.http.stream("POST", CHAT, json=body(CHAT, stream=True)):
            until(lambda: client.server.service.num_choices == 1)
            with socket.create_connection(client.server._socket.getsockname(), timeout=SECONDS) as raw:
                raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
                raw.sendall(b"content-length: 1000000\r\n\r\n{")
                assert raw.recv(100).startswith(b"HTTP/1.1 429 ")
            # The same connection goes on to serve after a refusal.
            for _ in range(2):
                refused = client.http.post(COMPLETIONS, json={"prompt": "x" * 500_000})
                check(refused, 429, None, "rate_limit_exceeded")


def test_only_so_many_requests_at_once(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(max_requests=1)) as client:
        client.say("Hello")
        client.engine.hang_after = 1
        with client.http.stream("POST", CHAT, json=body(CHAT, stream=True)):
            for refused in (client.http.post(CHAT, json=body(CHAT)), client.http.get("/v1/models")):
                check(refused, 503, None, "overloaded")
                assert refused.headers["retry-after"] == "1"
            assert client.http.get("/health").status_code == 200
            assert client.http.get("/metrics").status_code == 200
        until(lambda: client.server.service.num_requests == 0)
        client.engine.hang_after = None
        for _ in range(3):
            client.chat()


async def post(app: Any, content: Any, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=SECONDS) as http:
        headers |= {"content-type": "application/json"}
        return await http.post(COMPLETIONS, content=content, headers=headers)


def padded(size: int) -> bytes:
    """The body of a request, of so many bytes."""
    return json.dumps(body(COMPLETIONS)).encode().ljust(size)


@pytest.fixture
def small_app(tokenizer: Tokenizer) -> Any:
    """An app that holds 16,000 bytes of bodies at once, and whose requests with a body wait for their engine."""
    engine = new_engine()
    engine.hang_after = 0
    return create_app(engine, tokenizer, ServerConfig(max_body_bytes=1000), model_name=MODEL)


def test_only_so_many_bytes_of_bodies_are_held(small_app: Any) -> None:
    service = small_app.state.service

    async def parts(asked: list[int]) -> AsyncIterator[bytes]:
        for begin in range(0, 600, 100):
            asked.append(begin)
            yield padded(600)[begin : begin + 100]

    async def run() -> None:
        held = [asyncio.create_task(post(small_app, padded(1000))) for _ in range(15)]
        held.append(asyncio.create_task(post(small_app, padded(700))))
        while service.num_choices < 16:
            await asyncio.sleep(0)
        # 300 bytes are left. A body that says its size is not begun, another one is read up to there.
        for size, headers in ((0, {"content-length": "600"}), (400, {})):
            asked: list[int] = []
            refused = await post(small_app, parts(asked), **headers)
            check(refused, 503, None, "overloaded")
            assert "15700 bytes" in refused.text
            assert refused.headers["retry-after"] == "1"
            assert len(asked) * 100 == size
        last = asyncio.create_task(post(small_app, padded(300)))
        while service.num_choices < 17:
            await asyncio.sleep(0)
        service.engine.hang_after = None
        assert {response.status_code for response in await asyncio.gather(*held, last)} == {200}
        assert (await post(small_app, padded(1000))).status_code == 200

    asyncio.run(run())


def test_bodies_that_do_not_come_make_room_for_one_that_does(small_app: Any) -> None:
    service = small_app.state.service
    service.engine.hang_after = None
    gone = asyncio.Event()

    async def stalled(begun: list[int]) -> AsyncIterator[bytes]:
        yield padded(1000)[:999]
        begun.append(1)
        await gone.wait()
        yield b" "

    async def run() -> None:
        begun: list[int] = []
        waiting = [asyncio.create_task(post(small_app, stalled(begun))) for _ in range(16)]
        while len(begun) < 16:
            await asyncio.sleep(0)
        assert (await post(small_app, padded(500))).status_code == 200
        cut, *others = waiting
        check(await cut, 503, None, "overloaded")
        gone.set()
        assert {response.status_code for response in await asyncio.gather(*others)} == {200}
        assert service.num_requests == 0

    asyncio.run(run())


def test_a_flood_is_refused_and_running_streams_do_not_notice(tokenizer: Tokenizer) -> None:
    async def stream(http: httpx.AsyncClient) -> str:
        response = await http.post(COMPLETIONS, json=body(COMPLETIONS, stream=True, max_tokens=60, logprobs=2))
        return response.text

    async def run(client: Client) -> None:
        async with httpx.AsyncClient(base_url=client.server.url, limits=httpx.Limits(), timeout=SECONDS) as http:
            alone = content(await stream(http))
            client.engine.hang_after = 7  # in the middle, until the flood is over
            streams = [asyncio.create_task(stream(http)) for _ in range(4)]
            while client.server.service.num_choices < 4:
                await asyncio.sleep(0.001)
            flood = await asyncio.gather(*(http.post(COMPLETIONS, json=body(COMPLETIONS)) for _ in range(200)))
            assert [response.status_code for response in flood] == [429] * 200
            assert all(int(response.headers["retry-after"]) > 0 for response in flood)
            assert not any(task.done() for task in streams)
            client.engine.hang_after = None
            assert [content(await task) for task in streams] == [alone] * 4
        assert len(client.engine.submitted) == 5

    with running(tokenizer, ServerConfig(max_waiting=2)) as client:
        computes(client, 2)
        client.engine.reply = lambda request: client.tokenizer.encode("the quick brown fox " * 20)
        asyncio.run(run(client))


def content(events: str) -> list[Any]:
    *chunks, done, rest = events.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: "))["choices"] for chunk in chunks]


def test_requests_that_take_too_long(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(request_timeout=0.2)) as client:
        client.say("Hello there")
        client.engine.hang_after = 0
        late = client.http.post(CHAT, json=body(CHAT))
        check(late, 500, None, "timeout")
        assert late.headers["x-should-retry"] == "false"
        client.engine.hang_after = 1
        text = client.http.post(CHAT, json=body(CHAT, stream=True)).text
        assert '"code":"timeout"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert all(stream.closed for stream in client.engine.streams)
        client.engine.hang_after = None
        client.complete()


def test_a_body_that_does_not_arrive_is_not_waited_for(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "CUT_SECONDS", 0.1)
    with running(tokenizer, ServerConfig(request_timeout=0.1)) as client:
        with socket.create_connection(client.server._socket.getsockname(), timeout=SECONDS) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
            raw.sendall(b'content-length: 100\r\n\r\n{"prompt": ')
            reply = b""
            while b'"code"' not in reply:
                reply += raw.recv(1000)
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"receive_timeout"' in reply
        until(lambda: client.server.service.num_requests == 0)
        client.complete()


def test_a_client_that_never_reads_is_cut_off(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "CUT_SECONDS", 0.2)
    with running(tokenizer, ServerConfig(request_timeout=0.3)) as client:
        client.engine.reply = lambda request: [300] * 120
        content = json.dumps(body(COMPLETIONS, stream=True, max_tokens=120, n=128, logprobs=20)).encode()
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect(client.server._socket.getsockname())
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
            raw.sendall(b"content-length: %d\r\n\r\n" % len(content) + content)
            until(lambda: client.server.service.num_requests == 1)
            until(lambda: client.server.service.num_requests == 0)
        assert all(stream.closed for stream in client.engine.streams)


def test_a_default_view_that_the_engine_lacks_is_a_start_up_error(tokenizer: Tokenizer) -> None:
    engine = new_engine()
    engine.capabilities = msgspec.structs.replace(engine.capabilities, logprobs_modes=("raw_logprobs",))
    with pytest.raises(StartupError, match="logprobs_mode 'tempered_logprobs'"):
        create_app(engine, tokenizer, ServerConfig(logprobs_mode="tempered_logprobs"), model_name=MODEL)


@pytest.mark.parametrize(("field", "says"), [("tool_call_parser", "hermes"), ("reasoning_parser", "think")])
def test_a_parser_that_is_none_is_a_start_up_error(tokenizer: Tokenizer, field: str, says: str) -> None:
    with pytest.raises(StartupError, match=rf"{field} must be one of .*{says}.*none"):
        create_app(new_engine(), tokenizer, ServerConfig(**{field: "other"}), model_name=MODEL)


def test_only_so_many_alternatives_are_listed_in_all(tokenizer: Tokenizer) -> None:
    """Whole vocabularies of many tokens would not fit into memory."""
    places = new_engine().capabilities.vocab_size
    with running(tokenizer, ServerConfig(max_listed=10 * places)) as client:
        client.engine.capabilities = msgspec.structs.replace(client.engine.capabilities, max_logprobs=-1)
        asked = {"prompt": list(range(3, 8)), "n": 2}
        assert client.http.post(COMPLETIONS, json={**asked, "logprobs": -1, "max_tokens": 5}).status_code == 200
        message = check(client.http.post(COMPLETIONS, json={**asked, "logprobs": -1, "max_tokens": 6}), 400, "logprobs")
        assert str(12 * places) in message
        prompts = {"prompt_logprobs": -1, "max_tokens": 1}
        assert client.http.post(COMPLETIONS, json={**asked, **prompts}).status_code == 200
        asked = {"prompt": [list(range(3, 8))] * 3}
        check(client.http.post(COMPLETIONS, json={**asked, **prompts}), 400, "prompt_logprobs")
        # Ordinary lists are bounded by choices and tokens.
        assert client.http.post(COMPLETIONS, json={**asked, "logprobs": 20, "max_tokens": 100}).status_code == 200


@contextlib.contextmanager
def half_sent(client: Client) -> Iterator[socket.socket]:
    """A connection on which a request's body stops on the way."""
    with socket.create_connection(client.server._socket.getsockname(), timeout=60) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        raw.sendall(b'content-length: 100\r\n\r\n{"prompt": ')
        yield raw


def everything(raw: socket.socket) -> bytes:
    """What comes on a connection until its other end is closed."""
    return b"".join(iter(lambda: raw.recv(10_000), b""))


def test_case_92_a_body_that_stops_is_a_408_and_the_connection_ends(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(receive_timeout=0.1)) as client, half_sent(client) as raw:
        reply = everything(raw)
        assert reply.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"receive_timeout"' in reply
        assert b"\r\nconnection: close\r\n" in reply
        assert b"x-should-retry" not in reply
        until(lambda: client.server.service.num_requests == 0)


@pytest.mark.parametrize("name", ["content-encoding", "transfer-encoding"])
def test_case_92_encoded_bodies_are_told_apart_from_broken_ones(client: Client, name: str) -> None:
    value = "gzip" if name == "content-encoding" else "gzip, chunked"
    with socket.create_connection(client.server._socket.getsockname(), timeout=60) as raw:
        length = "content-length: 2\r\n" if name == "content-encoding" else ""
        raw.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"{length}{name}: {value}\r\n\r\n".encode()
            + (b"{}" if length else b"2\r\n{}\r\n0\r\n\r\n")
        )
        reply = everything(raw)
    assert reply.startswith(b"HTTP/1.1 415 ")
    assert b"gzip" in reply
    assert client.http.post(COMPLETIONS, json=body(COMPLETIONS), headers={"content-encoding": "identity"}).is_success


def test_case_92_the_sdk_does_not_repeat_what_ran_too_long(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(request_timeout=0.1)) as client:
        client.say("Hello")
        client.engine.hang_after = 0
        with pytest.raises(openai.InternalServerError, match="longer than"):
            client.sdk.with_options(max_retries=3).completions.create(model=MODEL, prompt="Hello")
        assert len(client.engine.submitted) == 1


def test_case_117_requests_that_do_not_arrive_do_not_keep_out_those_that_have(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(max_requests=2)) as client, half_sent(client) as first:
        until(lambda: client.server.service.num_requests == 1)
        with half_sent(client) as second:
            until(lambda: client.server.service.num_requests == 2)
            client.complete()
            until(lambda: client.server.service.num_requests == 1)
            assert first.recv(1000).startswith(b"HTTP/1.1 503 ")
            client.complete()
            second.sendall(b" " * 88 + b"}")
            assert second.recv(1000).startswith(b"HTTP/1.1 400 ")  # not cut: it arrived, and is no JSON
