"""A connection: uvicorn's, with limits on the bytes that its client may send, and on the time.

uvicorn reads headers of any length for any time, and writes errors of its own form.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from neper.config import ServerConfig
from neper.errors import HeadersTooLargeError, MalformedRequestError, NeperError, OverloadedError, ReceiveTimeoutError
from neper.server.transport.asgi import error_headers, error_json
from neper.server.transport.connections import Connections

# Time for the client to read the error. Closing at once, with bytes of it unread, would take the answer back.
_FAREWELL_SECONDS = 2.0
_FAREWELL_BYTES = 2**20
# Requests that may be sent ahead of the answers to earlier ones.
_MOST_AHEAD = 64
# Room around a byte of a body: a chunk of one byte takes five more.
_MOST_FRAMING = 16


class Connection(HttpToolsProtocol):
    """Answers malformed requests with a 431, 408 or 400, and closes silent connections.

    Once its headers are there, the gate limits the time of a request.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ServerConfig,
        connections: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._refused = False
        self._error: NeperError | None = None
        self._in_message = self._in_head = False
        self._head_size = 0  # bytes of this head that the parser has handed out
        self._fed = self._body_size = 0  # bytes since the head or the body began, and those of them that are body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._connections.enter(self, self.client[0] if self.client else ""):
            self._start_deadline()
        else:
            self._write_error(OverloadedError("the server has as many connections as it takes", retry_after=1))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._unset_keepalive_if_required()
        self._connections.leave(self)
        super().connection_lost(exc)

    def cut(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._refused:
            self._fed += len(data)
            if self._fed > _FAREWELL_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self._fed += len(data)
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._stay(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(self._error or MalformedRequestError(f"this is no HTTP/1.1 request: {error}"))
            return
        limit = self._limits.max_header_bytes
        if self._in_head and self._fed > limit:
            self._refuse(self._headers_too_large())
        elif (
            self._in_message
            and not self._in_head
            and self._fed - self._body_size > limit + (_MOST_FRAMING * self._body_size)
        ):
            self._refuse(MalformedRequestError("the body has more chunk headers and trailers than content"))
        elif self._deadline is None and (self._in_head or not (self._in_message or self._answering)):
            self._start_deadline()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = self._in_head = True
        self._head_size = self._fed = 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if self._in_head:  # nobody reads trailers after the body
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # data_received goes on
        self._in_head = False
        self._fed = self._body_size = 0
        self._stop_deadline()
        if len(self.pipeline) >= _MOST_AHEAD:
            self._fail(MalformedRequestError("too many requests were sent ahead of their answers"))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_message = False
        self._stop_deadline()
        if self._answering:
            self._connections.busy(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._answering and not self.transport.is_closing():
            self._connections.wait(self)
            if self._in_message:  # refused before it had arrived: the rest is read, for a while
                self._start_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connections.wait(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._answering and not self._in_message:
            self._connections.busy(self)

    def _stay(self, rest: bytes) -> None:
        """Read a request that offers another protocol, HTTP/2 for example, without that offer.

        The parser takes all bytes after such headers, even the request's own body, for that protocol.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._fail(MalformedRequestError("CONNECT is for proxies"))
        kept = [(name, value) for name, value in self.headers if name not in (b"upgrade", b"connection")]
        head = b"".join(b"%b: %b\r\n" % header for header in kept)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"%b %b HTTP/1.1\r\n%b\r\n" % (method, self.url, head))
        self.parser.feed_data(rest)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _count(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self._limits.max_header_bytes:
            self._fail(self._headers_too_large())

    def _headers_too_large(self) -> HeadersTooLargeError:
        return HeadersTooLargeError(f"the headers are larger than {self._limits.max_header_bytes} bytes")

    def _fail(self, error: NeperError) -> None:
        """Stop the parser, from one of its calls or beside it."""
        self._error = error
        raise httptools.HttpParserError

    def _start_deadline(self) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(self._limits.receive_timeout, self._late)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self._in_head:
            seconds = self._limits.receive_timeout
            self._refuse(ReceiveTimeoutError(f"the request's headers did not come within {seconds:g} seconds"))
        else:
            self._connections.note("silent")
            self.transport.abort()

    def _refuse(self, error: NeperError) -> None:
        """Answer a request that cannot be read on, if that is possible, and close."""
        self._refused = True
        self._fed = 0
        self._stop_deadline()
        self._connections.note((error.code or error.type).replace("_", " "))
        cycle = self.cycle
        if self._answering and (self._in_head or self.pipeline):
            cycle.keep_alive = False  # an earlier answer is under way, which this must not touch
            for queued, _ in self.pipeline:
                queued.keep_alive = False
            return
        if self._answering:
            if cycle.response_started:
                self.transport.abort()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        self._write_error(error)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._deadline = self.loop.call_later(_FAREWELL_SECONDS, self.transport.abort)

    def _write_error(self, error: NeperError) -> None:
        body = error_json(error)
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", secrets.token_hex(16).encode()),
            *((name, value) for name, value in error_headers(error) if name != b"connection"),
            (b"connection", b"close"),
        ]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)


def protocol(limits: ServerConfig, connections: Connections) -> type[asyncio.Protocol]:
    """The factory of connections that uvicorn calls (its `http`)."""
    return cast("type[asyncio.Protocol]", functools.partial(Connection, limits=limits, connections=connections))
