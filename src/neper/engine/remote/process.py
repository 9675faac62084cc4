"""The engine as its own process, started by `client`: `python -m neper.engine.remote.process DIRECTORY PARENT`.

It connects to the two sockets in DIRECTORY, receives its configuration as the first message, and serves until it is
told to stop or its parent, the process PARENT, is gone.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import zmq

from neper.config import LOG_FORMAT, LOG_TIME_FORMAT
from neper.engine.core import EngineCore
from neper.engine.remote import loop
from neper.engine.remote.heartbeat import Heartbeat
from neper.engine.remote.messages import (
    Abort,
    EngineOutputs,
    FromEngine,
    Loading,
    Prompts,
    Ready,
    Shutdown,
    Start,
    StartFailed,
    Submit,
    ToEngine,
    decode_to_engine,
    encode,
)
from neper.errors import StartupError
from neper.models import source
from neper.types import TokenChunk

_IDLE_POLL_MS = 500
_SEND_TIMEOUT_MS = 10_000


class EngineProcess:
    """An engine that takes and sends messages."""

    def __init__(self, directory: Path, parent: int) -> None:
        self._prompts = Prompts()
        self._parent = parent  # not os.getppid() now: it may have died in the seconds that our imports take
        context = zmq.Context()
        self._inbox = context.socket(zmq.PULL)
        self._outbox = context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
        self._outbox.setsockopt(zmq.LINGER, 1000)
        for socket in (self._inbox, self._outbox):
            socket.set_hwm(0)
        self._inbox.connect(f"ipc://{directory}/to-engine")
        self._outbox.connect(f"ipc://{directory}/from-engine")
        self._heartbeat = Heartbeat(context, f"ipc://{directory}/from-engine")

    def serve(self) -> int:
        """Run until told to stop; returns the exit status."""
        start = self._receive(wait=True)
        if not isinstance(start, Start):
            return 0 if start is None or isinstance(start, Shutdown) else 2
        level = start.log_level.upper()
        logging.basicConfig(level=level, format=LOG_FORMAT, datefmt=LOG_TIME_FORMAT, stream=sys.stderr)
        try:
            with loop.starting():
                model = source.resolve(start.config.model)
                model = dataclasses.replace(model, gguf=None if start.gguf is None else Path(start.gguf))
                self._core = EngineCore(start.config, model, lambda *progress: self._send(Loading(*progress)))
        except StartupError as error:
            self._send(StartFailed(error.message))
            return 1
        self._send(Ready(self._core.capabilities, self._core.stats()))
        self._heartbeat.start()
        try:
            return loop.serve(self._core, self._take, self._tell)
        finally:
            self._heartbeat.stop()

    def _tell(self, chunks: list[TokenChunk]) -> None:
        """Send what a step brought."""
        if chunks:
            self._send(EngineOutputs(chunks, self._core.stats()))
        self._heartbeat.turns += 1

    def _take(self) -> bool:
        """Act on all messages that wait, waiting for one when there is nothing to compute. False = stop."""
        core = self._core
        message = self._receive(wait=not core.has_work)
        changed = False
        while message is not None:
            if isinstance(message, Submit):
                core.add(self._prompts.request(message))
            elif isinstance(message, Abort):
                core.abort(message.request_id)
                changed = True
            elif isinstance(message, Shutdown):
                return False
            message = self._receive(wait=False)
        if changed and not core.has_work:
            self._send(EngineOutputs([], core.stats()))
        return os.getppid() == self._parent

    def _receive(self, *, wait: bool) -> ToEngine | None:
        """The next message; None when there is none, or, waiting, when the parent is gone."""
        while wait and not self._inbox.poll(_IDLE_POLL_MS):
            self._heartbeat.turns += 1
            if os.getppid() != self._parent:
                return None
        try:
            return decode_to_engine(self._inbox.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def _send(self, message: FromEngine) -> None:
        self._outbox.send(encode(message))


def main() -> int:
    # The parent drains and then says Shutdown; a Ctrl-C that reaches the whole process group is the parent's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    directory, parent = Path(sys.argv[1]), int(sys.argv[2])
    try:
        return EngineProcess(directory, parent).serve()
    finally:
        if os.getppid() != parent:
            shutil.rmtree(directory, ignore_errors=True)  # nobody else is left to do it


if __name__ == "__main__":
    sys.exit(main())
