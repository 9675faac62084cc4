"""The asyncio side of the engine process: starts it, hands out its chunks, and starts it again if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
import tempfile
from asyncio.subprocess import Process
from pathlib import Path

import msgspec
import zmq

from neper.config import EngineConfig, WatchConfig
from neper.engine.interface import Capabilities, EngineStats
from neper.engine.remote import openmp
from neper.engine.remote.chunk_stream import ChunkStream
from neper.engine.remote.heartbeat import SECONDS, Pulse
from neper.engine.remote.messages import (
    Abort,
    Beat,
    EngineOutputs,
    FromEngine,
    Loading,
    Prompts,
    Ready,
    Shutdown,
    Start,
    StartFailed,
    ToEngine,
    decode_from_engine,
    encode,
)
from neper.engine.remote.supervisor import Supervisor
from neper.errors import EngineDeadError, OverloadedError, StartupError
from neper.models.source import ModelSource
from neper.scratch import ScratchDirectory
from neper.types import Progress, Request

logger = logging.getLogger("neper.engine")

_EXIT_SECONDS = 10.0
_PREFIX = "neper-sockets-"
# Paths of sockets have at most 103 bytes on some systems: the directory's name and a socket's take the rest.
_LONGEST_SOCKET_PARENT = 103 - len(f"/{_PREFIX}12345678/from-engine")
_CONNECTING_SECONDS = 0.01
_LAST_MESSAGE_SECONDS = 0.1  # a message sent just before the process exited may still be on its way


class EngineClient:
    """An Engine (see neper.engine.interface) in a process of its own.

    The process's death is an EngineDeadError for the requests it had. It is started again (see Supervisor); until it
    is ready, `submit` raises OverloadedError. So it does while nothing is heard of the process, whose requests go on if
    it comes back, and which is killed if it does not (see heartbeat).
    """

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        *,
        log_level: str = "info",
        progress: Progress | None = None,
        watch: WatchConfig | None = None,
    ) -> None:
        self._watch_config = watch or WatchConfig()
        self._hung = False
        self._start = Start(
            dataclasses.replace(config, model=str(source.path)),
            log_level,
            gguf=None if source.gguf is None else str(source.gguf),
        )
        self._progress = progress
        self._streams: dict[str, ChunkStream] = {}
        self._stats = EngineStats()
        self._capabilities: Capabilities | None = None
        self._supervisor = Supervisor(self._launch, self._serve, self._lost)

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise RuntimeError("the engine has not been started")
        return self._capabilities

    @property
    def alive(self) -> bool:
        return self._supervisor.alive and not self._hung

    async def start(self) -> None:
        """Start the process and wait until it is ready.

        Raises:
            StartupError: it cannot start as configured, or it died while loading.
        """
        await self._supervisor.start()

    async def close(self) -> None:
        """End the process. Requests still running end with EngineDeadError. To end a `start` under way, cancel it."""
        await self._supervisor.close()
        self._fail_streams("the server is shutting down")

    def submit(self, request: Request) -> ChunkStream:
        if not self.alive:
            state = "does not answer" if self._hung else "is being started again"
            raise OverloadedError(f"the engine {state}; try again shortly", retry_after=5)
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is in use")  # its chunks would be another stream's
        self._connection.submit(request)  # first: what cannot be encoded raises, and must leave nothing behind
        stream = self._streams[request.request_id] = ChunkStream(request.request_id, self._forget)
        return stream

    def stats(self) -> EngineStats:
        return self._stats

    def _forget(self, request_id: str) -> None:
        """Stop the work of a stream that was closed before its end."""
        if self._streams.pop(request_id, None) is not None and self._supervisor.alive:
            self._connection.send(Abort(request_id))

    @property
    def _connection(self) -> _Connection:
        connection = self._supervisor.connection
        assert connection is not None
        return connection

    async def _launch(self) -> _Connection:
        connection = _Connection()
        try:
            await connection.open()
            connection.send(self._start)
            ready = await self._load(connection)
        except BaseException:
            await connection.close(kill=True)
            raise
        self._capabilities = ready.capabilities
        self._stats = self._with_restarts(ready.stats)
        return connection

    async def _load(self, connection: _Connection) -> Ready:
        while messages := await connection.receive():
            for message in messages:
                if isinstance(message, Ready):
                    return message
                if isinstance(message, StartFailed):
                    raise StartupError(message.message)
                if isinstance(message, Loading) and self._progress is not None:
                    self._progress(message.done, message.total, message.what)
        raise StartupError(f"the engine process died while loading (exit status {connection.status})")

    async def _serve(self, connection: _Connection) -> None:
        """Hand out chunks for as long as the process lives.

        All steps that have come are handed out before any reader runs: where readers are slower than the engine, each
        takes several tokens at a time, and so gets faster.
        """
        pulse = Pulse()
        watcher = asyncio.create_task(self._watch(connection, pulse))
        try:
            while messages := await connection.receive():
                pulse.heard()
                for message in messages:
                    if isinstance(message, EngineOutputs):
                        self._hand_out(message)
                    elif isinstance(message, Beat):
                        pulse.beat(message.turns)
        finally:
            watcher.cancel()
            self._hung = False

    async def _watch(self, connection: _Connection, pulse: Pulse) -> None:
        """Take no requests while the process is silent, and kill it when it stays so."""
        while True:
            await asyncio.sleep(SECONDS)
            limits = self._watch_config
            pulse.tick()
            silent = pulse.silent * SECONDS
            if (silent >= limits.engine_unhealthy_after) is not self._hung:
                self._hung = not self._hung
                if self._hung:
                    logger.error("nothing was heard of the engine process for %g s; no requests are taken", silent)
                else:
                    logger.info("the engine process is heard of again")
            stuck = pulse.stuck * SECONDS
            if silent >= limits.engine_restart_after or stuck >= limits.engine_step_timeout:
                logger.error(
                    "the engine process hangs (silent for %g s, in one step for %g s); ending it", silent, stuck
                )
                connection.kill()
                return

    def _hand_out(self, step: EngineOutputs) -> None:
        self._stats = self._with_restarts(step.stats)
        for chunk in step.chunks:
            stream = self._streams.get(chunk.request_id)
            if stream is None:  # closed a moment ago; its Abort is on the way
                continue
            if chunk.finish_reason is not None:
                del self._streams[chunk.request_id]
            stream.put(chunk)

    def _with_restarts(self, stats: EngineStats) -> EngineStats:
        return msgspec.structs.replace(stats, restarts=self._supervisor.restarts)

    def _lost(self) -> None:
        self._stats = msgspec.structs.replace(self._stats, running=0, waiting=0, free_blocks=self._stats.total_blocks)
        self._fail_streams("the engine process died while it served this request")

    def _fail_streams(self, message: str) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(EngineDeadError(message))


class _Connection:
    """One engine process and the two sockets to it, in a private directory."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._readable = asyncio.Event()
        self._prompts = Prompts()
        self._directory: ScratchDirectory | None = None
        self._process: Process | None = None
        self._exited: asyncio.Task[int] | None = None

    @property
    def status(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def open(self) -> None:
        self._directory = _socket_directory()
        directory = self._directory.path
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        for socket in (self._outbox, self._inbox):
            socket.set_hwm(0)  # bounded by the requests in flight, which the server bounds
            socket.setsockopt(zmq.LINGER, 0)
        self._outbox.bind(f"ipc://{directory}/to-engine")
        self._inbox.bind(f"ipc://{directory}/from-engine")
        # Nothing but errors goes to the process's own stdout; a server's stdout is for its caller.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "neper.engine.remote.process",
            str(directory),
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            env=openmp.environment(),
            start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
        )
        self._exited = asyncio.create_task(self._process.wait())
        self._exited.add_done_callback(lambda _: self._readable.set())
        # The socket's descriptor says only that something has changed, so each time all messages are taken.
        asyncio.get_running_loop().add_reader(self._inbox.FD, self._readable.set)
        while not self._outbox.poll(0, zmq.POLLOUT) and not self._exited.done():
            await asyncio.sleep(_CONNECTING_SECONDS)

    def submit(self, request: Request) -> None:
        self._send(self._prompts.encoded(request))

    def send(self, message: ToEngine) -> None:
        self._send(encode(message))

    def _send(self, data: bytes) -> None:
        # The queue has no bound, so only where nobody is at its other end any more nothing can be sent.
        with contextlib.suppress(zmq.Again):
            self._outbox.send(data, zmq.NOBLOCK)

    async def receive(self) -> list[FromEngine]:
        """The messages that have come, at least one; none once the process is gone and its last message read."""
        assert self._exited is not None
        while True:
            gone = self._exited.done()
            self._readable.clear()
            if messages := self._take():
                return messages
            if gone:
                await asyncio.sleep(_LAST_MESSAGE_SECONDS)
                return self._take()
            await self._readable.wait()

    def _take(self) -> list[FromEngine]:
        messages = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(decode_from_engine(self._inbox.recv(zmq.NOBLOCK)))
        return messages

    def kill(self) -> None:
        """End the process at once; `receive` then returns."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self, *, kill: bool = False) -> None:
        """End the process, unless `kill` by asking it first, and remove the sockets."""
        if self._process is not None and self._exited is not None and not self._exited.done():
            if not kill:
                self.send(Shutdown())
                await asyncio.wait((self._exited,), timeout=_EXIT_SECONDS)
                if not self._exited.done():
                    logger.warning("the engine process did not exit in %.0f s; killing it", _EXIT_SECONDS)
            self.kill()
            await self._exited
        if self._context is not None:
            asyncio.get_running_loop().remove_reader(self._inbox.FD)
            self._context.destroy(linger=0)
            self._context = None
        if self._directory is not None:
            self._directory.close()


def _socket_directory() -> ScratchDirectory:
    """A private directory whose path leaves room for the name of a socket.

    Not sockets without a file, in Linux's abstract namespace: all users of the machine can connect to those.
    """
    try:
        temporary = [tempfile.gettempdir()]
    except OSError:
        temporary = []
    problem = "the directory for temporary files cannot be written"
    for parent in (*temporary, os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/var/tmp"):
        if not parent:
            continue
        if len(os.fsencode(parent)) > _LONGEST_SOCKET_PARENT:
            problem = f"{parent} is too long for the path of a socket"
            continue
        with contextlib.suppress(OSError):
            return ScratchDirectory(_PREFIX, Path(parent))
    raise StartupError(f"{problem}; set TMPDIR to another directory")
