"""The asyncio side of the engine process: starts it, hands out its chunks, and starts it again if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from neper.config import EngineConfig
from neper.engine.interface import Capabilities, EngineStats
from neper.engine.messages import (
    Abort,
    Loading,
    Ready,
    Shutdown,
    Start,
    StartFailed,
    Step,
    Submit,
    ToEngine,
    decode_from_engine,
    encode,
)
from neper.errors import EngineDeadError, OverloadedError, StartupError
from neper.models.source import ModelSource
from neper.types import Progress, Request, TokenChunk

logger = logging.getLogger("neper.engine")

_FIRST_BACKOFF = 1.0
_LONGEST_BACKOFF = 30.0
_HEALTHY_SECONDS = 60.0
_EXIT_SECONDS = 10.0
_LAST_MESSAGE_MS = 100  # a message sent just before the process exited may still be on its way


class EngineClient:
    """An Engine (see neper.engine.interface) in a process of its own.

    The process's death is an EngineDeadError for the requests it had. It is started again, after 1 s, then 2 s, and so
    on to 30 s while it keeps dying; until it is ready, `submit` raises OverloadedError.
    """

    def __init__(
        self, config: EngineConfig, source: ModelSource, *, log_level: str = "info", progress: Progress | None = None
    ) -> None:
        self._config = dataclasses.replace(config, model=str(source.path))
        self._log_level = log_level
        self._progress = progress
        self._streams: dict[str, EngineStream] = {}
        self._stats = EngineStats()
        self._restarts = 0
        self._capabilities: Capabilities | None = None
        self._alive = False
        self._connection: _Connection | None = None
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise RuntimeError("the engine has not been started")
        return self._capabilities

    @property
    def alive(self) -> bool:
        return self._alive

    async def start(self) -> None:
        """Start the process and wait until it is ready.

        Raises:
            StartupError: it cannot start as configured, or it died while loading.
        """
        connection = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise(connection))

    async def close(self) -> None:
        """End the process. Requests still running end with EngineDeadError. To end a `start` under way, cancel it."""
        self._alive = False
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))  # however it ended, the process must be ended too
            self._supervisor = None
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        self._fail_streams("the server is shutting down")

    def submit(self, request: Request) -> EngineStream:
        if not self._alive:
            raise OverloadedError("the engine is being started again; try again shortly", retry_after=5)
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is in use")  # its chunks would be another stream's
        self._send(Submit(request))  # first: what cannot be encoded raises, and must leave nothing behind
        stream = self._streams[request.request_id] = EngineStream(self, request.request_id)
        return stream

    def stats(self) -> EngineStats:
        return self._stats

    def forget(self, request_id: str) -> None:
        """Stop the work of a stream that was closed before its end."""
        if self._streams.pop(request_id, None) is not None and self._alive:
            self._send(Abort(request_id))

    def _send(self, message: ToEngine) -> None:
        assert self._connection is not None
        self._connection.send(message)

    async def _launch(self) -> _Connection:
        connection = _Connection()
        try:
            await connection.open()
            connection.send(Start(self._config, self._log_level))
            while True:
                message = await connection.receive()
                if isinstance(message, Ready):
                    break
                if isinstance(message, StartFailed):
                    raise StartupError(message.message)
                if isinstance(message, Loading) and self._progress is not None:
                    self._progress(message.done, message.total, message.what)
                if message is None:
                    raise StartupError(f"the engine process died while loading (exit status {connection.status})")
        except BaseException:
            await connection.close(kill=True)
            raise
        self._connection = connection
        self._capabilities = message.capabilities
        self._stats = self._with_restarts(message.stats)
        self._alive = True
        return connection

    async def _supervise(self, connection: _Connection) -> None:
        """Hand out chunks for as long as the process lives, then start the next one."""
        backoff = _FIRST_BACKOFF
        while True:
            started = time.monotonic()
            try:
                await self._dispatch(connection)
                logger.error("the engine process died (exit status %s)", connection.status)
            except Exception:  # a message that cannot be read: the two sides no longer agree on anything
                logger.exception("lost touch with the engine process")
            self._alive = False
            self._fail_streams("the engine process died while it served this request")
            await connection.close(kill=True)
            if time.monotonic() - started > _HEALTHY_SECONDS:
                backoff = _FIRST_BACKOFF
            while not self._alive:
                logger.info("starting the engine again in %.0f s", backoff)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _LONGEST_BACKOFF)
                self._restarts += 1
                try:
                    connection = await self._launch()
                except Exception as error:  # no memory, no files, ...: whatever it was may have passed at the next try
                    logger.error("the engine did not start: %s", error, exc_info=not isinstance(error, StartupError))

    async def _dispatch(self, connection: _Connection) -> None:
        while (message := await connection.receive()) is not None:
            if not isinstance(message, Step):
                continue
            self._stats = self._with_restarts(message.stats)
            for chunk in message.chunks:
                stream = self._streams.get(chunk.request_id)
                if stream is None:  # closed a moment ago; its Abort is on the way
                    continue
                if chunk.finish_reason is not None:
                    del self._streams[chunk.request_id]
                stream.put(chunk)

    def _with_restarts(self, stats: EngineStats) -> EngineStats:
        return msgspec.structs.replace(stats, restarts=self._restarts)

    def _fail_streams(self, message: str) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(EngineDeadError(message))


class EngineStream:
    """The chunks of one request (a TokenStream)."""

    def __init__(self, client: EngineClient, request_id: str) -> None:
        self._client = client
        self._request_id = request_id
        self._chunks: asyncio.Queue[TokenChunk | EngineDeadError | None] = asyncio.Queue()
        self._ended = False

    def put(self, chunk: TokenChunk | EngineDeadError) -> None:
        self._chunks.put_nowait(chunk)

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        return self

    async def __anext__(self) -> TokenChunk:
        if self._ended:
            raise StopAsyncIteration
        chunk = await self._chunks.get()
        if self._ended or chunk is None:  # closed while it waited
            raise StopAsyncIteration
        if isinstance(chunk, EngineDeadError):
            self._ended = True
            raise chunk
        self._ended = chunk.finish_reason is not None
        return chunk

    def close(self) -> None:
        self._ended = True
        self._chunks.put_nowait(None)  # wakes a task that waits for the next chunk
        self._client.forget(self._request_id)


class _Connection:
    """One engine process and the two sockets to it, in a private directory."""

    def __init__(self) -> None:
        self._context: zmq.asyncio.Context | None = None
        self._directory: Path | None = None
        self._process: Process | None = None
        self._exited: asyncio.Task[int] | None = None

    @property
    def status(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def open(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="neper-"))
        self._context = zmq.asyncio.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        for socket in (self._outbox, self._inbox):
            socket.set_hwm(0)  # bounded by the requests in flight, which the server bounds
            socket.setsockopt(zmq.LINGER, 0)
        self._outbox.bind(f"ipc://{self._directory}/to-engine")
        self._inbox.bind(f"ipc://{self._directory}/from-engine")
        # Nothing but errors goes to the process's own stdout; a server's stdout is for its caller.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "neper.engine.process",
            str(self._directory),
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
        )
        self._exited = asyncio.create_task(self._process.wait())

    def send(self, message: ToEngine) -> None:
        # The queue has no bound, so this completes at once; the future is only the library's way of saying so.
        self._outbox.send(encode(message))

    async def receive(self) -> Loading | Ready | StartFailed | Step | None:
        """The next message; None once the process is gone and its last message read."""
        assert self._exited is not None
        while True:
            if self._exited.done():
                if not await self._inbox.poll(_LAST_MESSAGE_MS):
                    return None
                return decode_from_engine(await self._inbox.recv())
            receive = asyncio.ensure_future(self._inbox.recv())
            await asyncio.wait((receive, self._exited), return_when=asyncio.FIRST_COMPLETED)
            if receive.done():
                return decode_from_engine(receive.result())
            receive.cancel()

    async def close(self, *, kill: bool = False) -> None:
        """End the process, unless `kill` by asking it first, and remove the sockets."""
        if self._process is not None and self._exited is not None and not self._exited.done():
            if not kill:
                self.send(Shutdown())
                await asyncio.wait((self._exited,), timeout=_EXIT_SECONDS)
                if not self._exited.done():
                    logger.warning("the engine process did not exit in %.0f s; killing it", _EXIT_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._exited
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
