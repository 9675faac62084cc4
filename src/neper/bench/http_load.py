"""The load on a server: requests at once, each on a connection of its own, with as little work as a client can do.

While a batch runs, bytes are only kept. They are taken apart when the clock has stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import orjson

from neper.errors import NeperError

_PATH = b"/v1/chat/completions"


class Reply(NamedTuple):
    """An HTTP reply. `headers`: by lower-case name."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


@dataclass(frozen=True)
class Batch:
    """The times and the replies of a batch.

    Attributes:
        seconds: from opening the first stream's connection to the end of the last stream.
        client_seconds: CPU time of this process, from beginning to end.
        replies: of the streams.
        flood: replies to the requests beyond them. flood_seconds: until the last of these; 0 without any.
    """

    seconds: float
    client_seconds: float
    replies: list[Reply]
    flood: list[Reply]
    flood_seconds: float


class _Exchange(asyncio.Protocol):
    """One request and the bytes of its reply, until the server closes the connection.

    Attributes:
        begun, ended: done at the first byte, and at any kind of end. ended_at: the end, by time.perf_counter.
    """

    def __init__(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.ended_at = 0.0
        self.parts: list[bytes] = []
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.WriteTransport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.parts:
            self.begun.set_result(None)
        self.parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended_at = time.perf_counter()
        for future in (self.begun, self.ended):
            if not future.done():
                future.set_result(None)


def run(port: int, streams: Sequence[bytes], flood: Sequence[bytes] = ()) -> Batch:
    """Send the bodies in `streams` to 127.0.0.1 at once and, when all of them are being answered, those in `flood`."""
    try:
        import uvloop  # costs the client less
    except ImportError:
        return asyncio.run(_batch(port, streams, flood))
    return uvloop.run(_batch(port, streams, flood))


def check_stream(reply: Reply, *, tokens: int, top_k: int | None) -> None:
    """Check that a streamed reply has so many tokens, and an entry for each with `top_k` alternatives.

    Raises:
        NeperError: it has not.
    """
    if reply.status != 200:
        raise NeperError(f"bench http: a stream was answered with {reply.status}: {reply.body[:500].decode()}")
    *events, done, rest = reply.body.split(b"\n\n")
    if (done, rest) != (b"data: [DONE]", b""):
        raise NeperError(f"bench http: a stream was cut off: {reply.body[-200:]!r}")
    chunks = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
    if failure := next((chunk["error"] for chunk in chunks if "error" in chunk), None):
        raise NeperError(f"bench http: a stream ended with an error: {failure['message']}")
    sampled = chunks[-1]["usage"]["completion_tokens"]
    entries = []
    for chunk in chunks[:-1]:
        entries += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    found = {len(entry["top_logprobs"]) for entry in entries}
    if sampled != tokens or len(entries) != (0 if top_k is None else tokens) or found - {top_k}:
        raise NeperError(
            f"bench http: a stream has {sampled} tokens and {len(entries)} entries with {sorted(found)} alternatives; "
            f"{tokens} tokens and {top_k} alternatives were asked for"
        )


def refused(reply: Reply) -> bool:
    """True where a reply says that there is no room, and when to come again."""
    return reply.status in (429, 503) and reply.headers.get(b"retry-after", b"").isdigit()


async def _batch(port: int, streams: Sequence[bytes], flood: Sequence[bytes]) -> Batch:
    cpu, start = time.process_time(), time.perf_counter()
    running = await _open(port, streams)
    beyond: list[_Exchange] = []
    flood_seconds = 0.0
    if flood:
        await asyncio.gather(*(exchange.begun for exchange in running))
        flood_start = time.perf_counter()
        beyond = await _open(port, flood)
        await asyncio.gather(*(exchange.ended for exchange in beyond))
        flood_seconds = max(exchange.ended_at for exchange in beyond) - flood_start
    await asyncio.gather(*(exchange.ended for exchange in running))
    return Batch(
        seconds=max(exchange.ended_at for exchange in running) - start,
        client_seconds=time.process_time() - cpu,
        replies=[_read(b"".join(exchange.parts)) for exchange in running],
        flood=[_read(b"".join(exchange.parts)) for exchange in beyond],
        flood_seconds=flood_seconds,
    )


async def _open(port: int, bodies: Sequence[bytes]) -> list[_Exchange]:
    loop = asyncio.get_running_loop()
    exchanges = [_Exchange(_request(body)) for body in bodies]
    await asyncio.gather(
        *(loop.create_connection(lambda one=one: one, "127.0.0.1", port) for one in exchanges)  # type: ignore[misc]
    )
    return exchanges


def _request(body: bytes) -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" % _PATH
    return b"%bContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (head, len(body), body)


def _read(data: bytes) -> Reply:
    """The reply in all the bytes of a connection. Raises NeperError when there is none."""
    head, end, body = data.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    if not end or not first.startswith(b"HTTP/1.1 "):
        raise NeperError(f"bench http: the server closed a connection without an answer: {data[:200]!r}")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    if headers.get(b"transfer-encoding") == b"chunked":
        body = _joined(body)
    return Reply(int(first.split()[1]), headers, body)


def _joined(chunked: bytes) -> bytes:
    """The body in a chunked transfer coding, or the part that is there where it was cut off."""
    parts, place = [], 0
    while (end := chunked.find(b"\r\n", place)) >= 0 and (size := int(chunked[place:end], 16)):
        parts.append(chunked[end + 2 : end + 2 + size])
        place = end + 2 + size + 2
    return b"".join(parts)
