"""Connections: what a client may send before it is known, for how long it may be silent, and how many there may be."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from neper.config import ServerConfig
from neper.errors import StartupError
from neper.server.transport import connections
from neper.server.transport.connection import Connection
from neper.server.transport.connections import Connections, choose_limits, client_of
from neper.text.tokenizer import Tokenizer
from tests.server.conftest import Client, running, until
from tests.server.test_errors import CHAT, COMPLETIONS
from tests.server.test_failures import body

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
SHORT = ServerConfig(receive_timeout=0.2, api_key="secret")


@contextlib.contextmanager
def connected(client: Client) -> Iterator[socket.socket]:
    with socket.create_connection(client.server._socket.getsockname(), timeout=60) as raw:
        yield raw


def everything(raw: socket.socket) -> bytes:
    """What comes until the server closes."""
    return b"".join(iter(lambda: raw.recv(100_000), b""))


def answer(raw: socket.socket) -> bytes:
    """One answer on a connection that stays open."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += raw.recv(10_000)
    head, _, rest = data.partition(b"\r\n\r\n")
    length = int(next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")).split()[1])
    while len(rest) < length:
        rest += raw.recv(10_000)
    assert len(rest) == length
    return head + b"\r\n\r\n" + rest


def check_error(reply: bytes, status: int, code: str) -> str:
    head, _, text = reply.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert reply.startswith(b"HTTP/1.1 %d " % status), reply
    assert b"content-type: application/json" in lines
    assert b"connection: close" in lines
    assert any(line.startswith(b"x-request-id: ") for line in lines)
    error = json.loads(text)["error"]
    assert error["code"] == code
    return str(error["message"])


@pytest.fixture(scope="module")
def short(tokenizer: Tokenizer) -> Iterator[Client]:
    with running(tokenizer, SHORT) as client:
        yield client


def test_case_90_headers_without_end_are_cut_before_the_key_is_looked_at(short: Client) -> None:
    for line in (b"a" * 1000, b"a: " + b"b" * 100 + b"\r\n"):  # one header, and many
        with connected(short) as raw:
            raw.sendall(b"GET /v1/models HTTP/1.1\r\n" + (b"x: " if b":" not in line else b""))
            sent = 0
            with contextlib.suppress(OSError):
                while sent < 40_000_000:
                    sent += raw.send(line * 100)
            assert sent < 20_000_000  # what was under way when it was cut
            with contextlib.suppress(OSError):
                assert "65536 bytes" in check_error(everything(raw), 431, "headers_too_large")


def test_case_90_headers_up_to_the_limit_are_read(short: Client) -> None:
    for size, status in ((65_000, 200), (66_000, 431), (200_000, 431)):
        with connected(short) as raw:
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: " + b"a" * size + b"\r\n\r\n")
            assert everything(raw).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize("first", [b"", GET], ids=["new", "kept"])
@pytest.mark.parametrize("sent", [b"G", b"GET /v1/models HTTP/1.1\r\nauth"])
def test_case_90_half_a_head_is_a_408_in_time(short: Client, first: bytes, sent: bytes) -> None:
    with connected(short) as raw:
        if first:
            raw.sendall(first)
            answer(raw)
        raw.sendall(sent)
        assert "headers" in check_error(everything(raw), 408, "receive_timeout")


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n"])
def test_case_90_silence_is_cut(short: Client, sent: bytes) -> None:
    with connected(short) as raw:
        raw.sendall(sent)
        assert everything(raw) == b""
    assert short.server.service.connections.ended["silent"] > 0
    assert 'reason="silent"' in short.http.get("/metrics").text


def test_case_90_a_body_nobody_wants_is_not_read_for_ever(short: Client) -> None:
    with connected(short) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n{")
        assert answer(raw).startswith(b"HTTP/1.1 401 ")
        with contextlib.suppress(ConnectionResetError):
            assert everything(raw) == b""


@pytest.mark.parametrize("rest", [b"0\r\n" + b"a: b\r\n" * 40_000, b"1;" + b"x" * 200_000], ids=["trailers", "chunk"])
def test_case_90_what_stands_around_a_body_has_limits_too(client: Client, rest: bytes) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    with connected(client) as raw:
        raw.sendall(head)
        until(lambda: client.server.service.num_requests == 1)
        raw.sendall(rest)
        check_error(everything(raw), 400, "malformed_request")


def test_case_90_small_chunks_are_a_body_like_any_other(client: Client) -> None:
    text = json.dumps({"prompt": "a" * 50_000}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    with connected(client) as raw:
        raw.sendall(head + b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\nauthorization: x\r\n\r\n")
        assert answer(raw).startswith(b"HTTP/1.1 200 ")


MALFORMED = (
    *(
        b"\x16\x03\x01\x02\x00",
        b"HELLO\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\0" * 100,
    ),
    *(b"GET / HTTP/1.1\r\na b: c\r\n\r\n", b"GET / HTTP/1.1\r\nx: a\rb\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n"),
    *(
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\n" + b"content-length: 1\r\n" * 2 + b"\r\n",
    ),
    *(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"),
)


@pytest.mark.parametrize("sent", MALFORMED, ids=repr)
def test_case_92_what_is_no_http_is_told_in_the_api_s_form(client: Client, sent: bytes) -> None:
    with connected(client) as raw:
        raw.sendall(sent)
        check_error(everything(raw), 400, "malformed_request")


def test_case_92_a_broken_chunk_ends_its_request(client: Client) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    with connected(client) as raw:
        raw.sendall(head + b"2\r\n{}\r\n")
        until(lambda: client.server.service.num_requests == 1)
        raw.sendall(b"zz\r\n")
        check_error(everything(raw), 400, "malformed_request")
    until(lambda: client.server.service.num_requests == 0)


def test_case_92_what_follows_a_request_does_not_spoil_its_answer(client: Client) -> None:
    client.say("the quick brown fox")
    client.engine.delay = 0.01
    for stream in (False, True):
        text = json.dumps(body(COMPLETIONS, stream=stream)).encode()
        with connected(client) as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(text), text)
            )
            until(lambda: client.server.service.num_choices == 1)
            raw.sendall(b"NONSENSE\r\n\r\n")
            reply = everything(raw)
        assert reply.startswith(b"HTTP/1.1 200 ")
        assert reply.count(b"HTTP/1.1") == 1
        assert reply.endswith(b"0\r\n\r\n" if stream else b"}")


def test_case_92_an_upgrade_that_is_not_taken_leaves_the_request_alone(client: Client) -> None:
    """Some clients offer HTTP/2 with their first request."""
    client.say("Hello")
    text = json.dumps(body(COMPLETIONS)).encode()
    with connected(client) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
            b"http2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(text), text)
        )
        assert answer(raw).startswith(b"HTTP/1.1 200 ")
        raw.sendall(GET)
        assert answer(raw).startswith(b"HTTP/1.1 200 ")


def test_requests_cut_anywhere_are_the_same_requests(client: Client) -> None:
    client.say("Hello")
    rng = random.Random(0)
    text = json.dumps(body(COMPLETIONS)).encode()
    one = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    both = GET + one % (len(text), text) + GET
    for _ in range(20):
        cuts = sorted(rng.randrange(len(both)) for _ in range(rng.randrange(4)))
        with connected(client) as raw:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start, end in zip([0, *cuts], [*cuts, len(both)], strict=True):
                raw.sendall(both[start:end])
            data = b""
            while data.count(b'{"status":"ok"}') < 2:
                data += raw.recv(10_000)
        assert data.count(b"HTTP/1.1 200 ") == 3


def hang(client: Client, raw: socket.socket) -> None:
    """Start a stream that does not end."""
    before = client.server.service.num_choices
    text = json.dumps(body(CHAT, stream=True)).encode()
    raw.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(text), text)
    )
    until(lambda: client.server.service.num_choices == before + 1)


def test_case_117_silent_connections_keep_nobody_out(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(max_connections=4, max_connections_per_client=4)
    with (
        running(tokenizer, config) as client,
        contextlib.ExitStack() as stack,
        caplog.at_level(logging.WARNING, logger="neper"),
    ):
        client.say("Hello")
        client.engine.hang_after = 0
        pool = client.server.service.connections
        working = stack.enter_context(connected(client))
        hang(client, working)
        silent = [stack.enter_context(connected(client)) for _ in range(20)]
        until(lambda: pool.ended["cut for another"] == 17)
        assert len(pool) == 4
        for raw in silent[:17]:  # the oldest first
            with contextlib.suppress(ConnectionResetError):
                assert everything(raw) == b""
        for sent in (b"G", b"POST /tokenize HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{"):
            silent[-1].sendall(sent)
        assert client.http.get("/health").status_code == 200
        assert client.server.service.num_choices == 1  # the one that works was never cut
    assert sum("connections ended" in record.message for record in caplog.records) == 1
    assert "1 cut for another (3 open, at most 4, 4 of a client)" in caplog.text


def test_case_117_where_all_work_a_new_one_is_refused(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(max_connections=2, max_connections_per_client=2)) as client:
        client.say("Hello")
        client.engine.hang_after = 0
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                hang(client, stack.enter_context(connected(client)))
            with connected(client) as raw:
                check_error(everything(raw), 503, "overloaded")
        until(lambda: len(client.server.service.connections) == 0)
        assert client.http.get("/health").status_code == 200


def test_case_117_a_client_that_does_not_read_waits_too(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(max_connections=1)) as client, connected(client) as raw:
        client.say("Hello")
        client.engine.hang_after = 0
        hang(client, raw)
        [member] = client.server.service.connections._members
        assert isinstance(member, Connection)
        client.server.call(member.pause_writing)  # as the transport does when its buffer is full
        client.server.call(member.resume_writing)
        with connected(client) as other:
            check_error(everything(other), 503, "overloaded")
        client.server.call(member.pause_writing)
        with connected(client) as other:
            other.sendall(GET)
            assert answer(other).startswith(b"HTTP/1.1 200 ")
        until(lambda: client.server.service.num_choices == 0)


class Fake:
    def __init__(self) -> None:
        self.was_cut = False

    def cut(self) -> None:
        self.was_cut = True


def test_case_117_the_bounds_hold_whatever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a list of (connection, client, waiting since) that is searched anew each time."""
    monkeypatch.setattr(Connections, "_tell", lambda self: None)
    for seed in range(200):
        rng = random.Random(seed)
        limit = rng.randint(1, 6)
        pool = Connections(ServerConfig(max_connections=limit, max_connections_per_client=rng.randint(1, 6)))
        model: dict[Fake, list[Any]] = {}
        for now in range(60):
            action = rng.choice(["enter", "enter", "wait", "busy", "leave"])
            if action == "enter":
                new, address = Fake(), rng.choice(["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2"])
                name = "v6" if ":" in address else address
                mine = [m for m, entry in model.items() if entry[0] == name]
                crowded = len(mine) >= pool.limit_per_client
                idle = [m for m in (mine if crowded else model) if model[m][1] is not None]
                full = crowded or len(model) >= limit
                assert pool.enter(new, address) is (bool(idle) or not full)
                if full and idle:
                    oldest = min(idle, key=lambda m: model[m][1])
                    assert oldest.was_cut
                    del model[oldest]
                if idle or not full:
                    model[new] = [name, now]
            elif model:
                member = rng.choice(list(model))
                getattr(pool, action)(member)
                if action == "leave":
                    del model[member]
                elif action == "busy":
                    model[member][1] = None
                elif model[member][1] is None:
                    model[member][1] = now
            assert len(pool) == len(model) <= limit
            assert not any(member.was_cut for member in model)
            assert list(pool._waiting) == sorted(
                (m for m in model if model[m][1] is not None), key=lambda m: model[m][1]
            )
        for member in list(model):
            pool.leave(member)
            pool.leave(member)
        assert not pool._clients
        assert not pool._waiting


def test_what_counts_as_one_client() -> None:
    assert client_of("10.1.2.3") == client_of("::ffff:10.1.2.3") == "10.1.2.3"
    assert client_of("2001:db8::1") == client_of("2001:db8::2:3") != client_of("2001:db8:0:1::1")
    assert client_of("fe80::1%eth0") == client_of("fe80::2")
    assert client_of("") == ""


def test_case_117_more_connections_than_open_files_are_a_start_up_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_free_files", lambda: 20)
    assert choose_limits(ServerConfig()) == (20, 10)
    assert choose_limits(ServerConfig(max_connections=7, max_connections_per_client=90)) == (7, 7)
    with pytest.raises(StartupError, match=r"leaves 20 for connections, max_connections is 21; raise it \(ulimit -n"):
        choose_limits(ServerConfig(max_connections=21))
    monkeypatch.setattr(connections, "_free_files", lambda: -3)
    with pytest.raises(StartupError, match="leaves 0 for connections; raise it"):
        choose_limits(ServerConfig())
    monkeypatch.setattr(connections, "_free_files", lambda: None)
    assert choose_limits(ServerConfig()) == (connections.MOST, connections.MOST // 2)


FEW_FILES = """
import asyncio, resource, sys
import uvloop
asyncio.run = uvloop.run  # as neper serve has it; asyncio's own loop takes all that wait in one go
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from neper.config import ServerConfig
from tests.server.conftest import Server, byte_level_tokenizer, new_engine
server = Server(new_engine(), byte_level_tokenizer(), ServerConfig())
server.start()
print(server.url.rpartition(":")[2], flush=True)
sys.stdin.read()
print(len(server.service.connections), server.service.connections.ended["cut for another"] > 0, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
def test_case_117_a_limit_of_64_open_files_and_200_silent_connections() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FEW_FILES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", int(process.stdout.readline()))
        for _ in range(200):
            stack.enter_context(socket.create_connection(address, timeout=60))
        for _ in range(3):
            with socket.create_connection(address, timeout=60) as raw:
                raw.sendall(GET)
                assert answer(raw).startswith(b"HTTP/1.1 200 ")
        said, _ = process.communicate("")
        size, cut = said.split()
        assert int(size) < 64
        assert cut == "True"
