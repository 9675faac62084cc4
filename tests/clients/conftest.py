"""Servers that the clients talk to, and a network that ends at loopback.

These tests run in an environment of their own (`make test-clients`), where neper is not installed: the server is the
main environment's, in a process of its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TINY = "tiny"
SMOLLM2 = "smollm2-135m"
Run = Callable[[Coroutine[Any, Any, Any]], Any]

if find_spec("lm_eval") is None:
    collect_ignore_glob = ["test_*.py"]
else:  # read by the clients when they are imported: no hub, no telemetry, no proxy before the server
    os.environ.update(
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        LANGSMITH_TRACING="false",
        TOKENIZERS_PARALLELISM="false",
        NO_PROXY="127.0.0.1",
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--neper", default=str(ROOT / ".venv/bin/neper"), help="the command that is tested")


@pytest.fixture(scope="session")
def refused_hosts() -> Iterator[list[str]]:
    """Hosts other than loopback that somebody tried to reach; nobody did."""
    hosts: list[str] = []
    connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo

    def check(host: Any) -> None:
        if host not in (None, "", "localhost", "127.0.0.1", b"127.0.0.1", "::1"):
            hosts.append(str(host))
            raise OSError(f"tests reach no host but loopback, not {host}")

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple):
            check(address[0])
        connect(self, address)

    def guarded_getaddrinfo(host: Any, *args: Any, **options: Any) -> Any:
        check(host)
        return getaddrinfo(host, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)
        yield hosts


@pytest.fixture(autouse=True)
def only_loopback(refused_hosts: list[str]) -> Iterator[None]:
    refused_hosts.clear()
    yield
    assert refused_hosts == []


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Runs a coroutine on the one event loop of these tests: some clients keep connections beyond a call."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@contextmanager
def serving(command: str, log: Path, *arguments: str | Path) -> Iterator[str]:
    """URL of a `neper serve` on a free port; killed when the context is left."""
    arguments = (*arguments, "--dtype", "float32", "--port", "0", "--num-threads", "1", "--no-prefix-caching")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [command, "serve", *map(str, arguments)], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+", line)
        if match is None:
            raise AssertionError(f"the server did not start: {line!r} {log.read_text()}")
        yield match[0]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose every id is a token, so that an entry's bytes tell its id."""
    from tests.helpers.tiny import write_model

    directory = tmp_path_factory.mktemp("model") / TINY
    write_model(directory, vocab_size=330)
    return directory


@pytest.fixture(scope="session")
def tiny_url(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Iterator[str]:
    log = tmp_path_factory.mktemp("tiny") / "log"
    with serving(pytestconfig.getoption("--neper"), log, tiny_dir, "--served-model-name", TINY) as url:
        yield url


@pytest.fixture
def client(tiny_url: str) -> Iterator[Any]:
    """The openai SDK's, of the tiny model."""
    import openai

    with openai.OpenAI(base_url=tiny_url + "/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="session")
def smollm2_url(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("smollm2") / "log"
    with serving(pytestconfig.getoption("--neper"), log, SMOLLM2) as url:
        yield url


@pytest.fixture(scope="session")
def reference(tiny_dir: Path) -> Any:
    from tests.clients.reference import Reference

    return Reference(tiny_dir)
