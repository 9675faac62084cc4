"""The run of the HTTP server: it binds the port, starts the engine, serves until it is stopped, drains, and closes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import logging
import math
import os
import shlex
import signal
import socket
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

import neper
from neper.config import LOG_FORMAT, LOG_TIME_FORMAT, EngineConfig, LineEngineConfig, ServerConfig, WatchConfig
from neper.errors import ModelLoadError, StartupError
from neper.files import read_text
from neper.server.transport.connections import choose_limits
from neper.server.transport.hosts import LOOPBACK
from neper.server.transport.listener import BACKLOG, base_url, bind, is_loopback, listen

if TYPE_CHECKING:
    from neper.server.backend import Backend
    from neper.server.service import Service

logger = logging.getLogger(__name__)

_MAX_KEY = 4096
# The event loop asks for Python's lock several times per request. With Python's default it would wait 5 ms each time
# while a thread decodes or renders.
_SWITCH_SECONDS = 0.0005
# Time after the drain timeout in which errors reach their clients.
_CLOSING_SECONDS = 2
_FAREWELL_SECONDS = 0.3


def serve(
    engine_config: EngineConfig,
    line_config: LineEngineConfig,
    server_config: ServerConfig,
    watch_config: WatchConfig,
) -> int:
    """Serve our own engine, or the command of `line_config`, until SIGTERM or Ctrl-C; returns the exit code.

    Raises StartupError if it cannot start.
    """
    configure_logging(server_config.log_level)
    sys.setswitchinterval(_SWITCH_SECONDS)
    chat_template = read_chat_template(server_config.chat_template)
    server_config = dataclasses.replace(
        server_config, api_key=api_key(server_config), api_key_file=None, api_key_env=None
    )
    # First of all, so that a port that is taken is reported at once.
    sock = bind(server_config.host, server_config.port)
    with contextlib.closing(sock):
        from neper.server.backend import LineBackend, OwnBackend

        choose_limits(server_config)
        parser = server_config.tool_call_parser
        if server_config.api_key is None and not is_loopback(sock.getsockname()[0]):
            logger.warning(
                "listening on %s without --api-key: whoever reaches this port can use the model", server_config.host
            )
        server_config = dataclasses.replace(
            server_config, allowed_hosts=allowed_hosts(server_config, sock.getsockname()[0])
        )
        backend: Backend
        if line_config.engine_command is not None:
            backend = LineBackend(line_config, chat_template=chat_template, tool_call_parser=parser)
        else:
            log_level = server_config.log_level
            backend = OwnBackend(
                engine_config, watch_config, log_level=log_level, chat_template=chat_template, tool_call_parser=parser
            )
        return _run(_serve(backend, server_config, sock))


def api_key(config: ServerConfig) -> str | None:
    """The API key, from the option that has it; None where none is needed.

    Raises:
        StartupError: the file or the variable that should hold it does not hold one.
    """
    key, where = config.api_key, "--api-key"
    if config.api_key_file is not None:
        where = f"--api-key-file {config.api_key_file}"
        key = read_text(Path(config.api_key_file), _MAX_KEY).strip()
    elif config.api_key_env is not None:
        where = f"--api-key-env {config.api_key_env}"
        if config.api_key_env not in os.environ:
            raise StartupError(f"{where}: there is no such environment variable")
        key = os.environ[config.api_key_env].strip()
    if key is not None and not (key.isascii() and key.isprintable() and key and " " not in key):
        raise StartupError(f"{where} holds no key: one word of printable ASCII is needed, since a header carries it")
    return key


def allowed_hosts(config: ServerConfig, address: str) -> tuple[str, ...]:
    """The hosts that a server at `address` answers for; empty = all.

    A server on a loopback address without a key is protected only because other machines cannot reach it.
    """
    if config.allowed_hosts or config.api_key is not None or not is_loopback(address):
        return config.allowed_hosts
    return tuple(dict.fromkeys((LOOPBACK, address, config.host)))


def read_chat_template(file: str | None) -> str | None:
    """The source in a template file. Raises StartupError when it cannot be read, or does not compile."""
    if file is None:
        return None
    from neper.text.chat_template import ChatTemplate

    path = Path(file).expanduser()
    try:
        source = read_text(path)
        ChatTemplate(source).check()
    except ModelLoadError as error:
        raise StartupError(f"--chat-template {file}: {error}") from None
    return source


def configure_logging(level: str) -> None:
    """Write our log to stderr. uvicorn's own log is shown from warnings on, and all of it at debug."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(LOG_FORMAT, LOG_TIME_FORMAT))
    for name, least in (("neper", level.upper()), ("uvicorn", "DEBUG" if level == "debug" else "WARNING")):
        log = logging.getLogger(name)
        log.setLevel(least)
        log.handlers = [handler]
        log.propagate = False


def ready_message(url: str, model_name: str, *, needs_key: bool) -> str:
    """The message of a server that is ready: its address, and a command to try."""
    body = {
        "model": model_name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    key = " -H 'Authorization: Bearer '\"$API_KEY\"" if needs_key else ""
    return (
        f"neper {neper.__version__} serves {model_name} on {url} (Ctrl-C stops it). Try:\n"
        f"curl -s {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )


def _run(coroutine: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


class _Server(uvicorn.Server):
    """uvicorn's server. It prints a message when it is ready, and leaves signals to us."""

    def __init__(self, config: uvicorn.Config, announcement: str) -> None:
        super().__init__(config)
        self.announcement = announcement

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        with contextlib.suppress(OSError):  # nobody reads our output, or the disk is full; the server goes on
            print(self.announcement, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _stop_signals() -> list[signal.Signals]:
    """The signals that end a server. A closed terminal (SIGHUP) is one, unless it is ignored (nohup)."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


class _Stopper:
    """Signals. The first one drains a running server, and ends a starting one. A second Ctrl-C ends it at once.

    Attributes:
        exit_code: 0, or 128 + the signal that cut something off.
    """

    def __init__(self, drain_timeout: float) -> None:
        self.exit_code = 0
        self._drain_timeout = drain_timeout
        self._server: uvicorn.Server | None = None
        self._service: Service | None = None
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._signals = 0

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _stop_signals():
            with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C arrives as KeyboardInterrupt
                loop.add_signal_handler(number, self._receive, number)

    def serving(self, server: uvicorn.Server, service: Service) -> None:
        self._server, self._service = server, service

    def closing(self) -> None:
        """Ignore signals from here on, since an incomplete clean-up would leave things behind."""
        self._task = None

    def _receive(self, number: signal.Signals) -> None:
        if self._task is None or (self._signals and number != signal.SIGINT):
            return
        self._signals += 1
        if self._server is None or self._service is None:
            self.exit_code = 128 + number
            self._task.cancel()
        elif self._signals == 1:
            self._drain(self._server, self._service)
        elif not self.exit_code:
            self.exit_code = 128 + number
            # Clients get an error instead of a cut connection, if they read it in a moment.
            self._service.close_all()
            self._server.force_exit = True
            asyncio.get_running_loop().call_later(_FAREWELL_SECONDS, self._cut)

    def _cut(self) -> None:
        if self._task is not None:
            # uvicorn would log the stack of every request that is cancelled now.
            logging.getLogger("uvicorn").disabled = logging.getLogger("uvicorn.error").disabled = True
            self._task.cancel()

    def _drain(self, server: uvicorn.Server, service: Service) -> None:
        server.should_exit = True
        service.drain()
        # Requests that do not end in time get an error of ours. uvicorn would cut their connections a little later.
        asyncio.get_running_loop().call_later(self._drain_timeout, service.close_all)
        if service.num_choices:
            logger.info(
                "stopping: %d running get up to %g s to finish; Ctrl-C ends at once",
                service.num_choices,
                self._drain_timeout,
            )


async def _serve(backend: Backend, config: ServerConfig, sock: socket.socket) -> int:
    stopper = _Stopper(config.drain_timeout)
    stopper.listen()
    try:
        await _serve_until_stopped(backend, config, sock, stopper)
    except asyncio.CancelledError:
        if not stopper.exit_code:
            raise
    return stopper.exit_code


async def _serve_until_stopped(backend: Backend, config: ServerConfig, sock: socket.socket, stopper: _Stopper) -> None:
    from neper.server.activity import log_activity
    from neper.server.app import create_app
    from neper.server.transport.connection import protocol

    model_name = config.served_model_name or backend.name
    try:
        await backend.start()
        app = create_app(
            backend.engine,
            backend.tokenizer,
            config,
            model_name=model_name,
            eos_token_ids=backend.eos_token_ids,
        )
        service: Service = app.state.service
        server = _Server(
            uvicorn.Config(
                app,
                http=protocol(config, service.connections),
                timeout_keep_alive=config.keep_alive_timeout,  # type: ignore[arg-type]  # it may be any number
                ws="none",
                lifespan="off",
                access_log=False,  # the gate writes a line of its own, with more in it
                log_config=None,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=math.ceil(config.drain_timeout) + _CLOSING_SECONDS,
            ),
            ready_message(base_url(sock.getsockname()), model_name, needs_key=config.api_key is not None),
        )
        stopper.serving(server, service)
        # The collector need not look at permanent objects whenever a large body makes many others.
        gc.collect()
        gc.freeze()
        activity = asyncio.create_task(log_activity(backend.engine))
        try:
            listen(sock, config.host, config.port)
            await server.serve([sock])
        finally:
            activity.cancel()
    finally:
        stopper.closing()
        await backend.close()
