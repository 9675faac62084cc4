from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from neper.config import EngineConfig, LineEngineConfig, ServerConfig, WatchConfig
from neper.errors import ModelLoadError, StartupError
from neper.server import run
from neper.server.run import ready_message, serve
from neper.server.transport.listener import base_url, bind, is_loopback
from tests.cli.serving import ServerProcess

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def tiny(tiny_dir: Callable[..., Path]) -> Path:
    return tiny_dir("llama", max_position_embeddings=32768)


def stream(url: str, max_tokens: int) -> Iterator[str]:
    """Data of the events of a completion that never ends by itself before `max_tokens`."""
    body = {"prompt": "the quick", "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "logprobs": 1}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


def gone(pid: int, seconds: float = 120) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            return True
        time.sleep(0.05)
    return False


def test_a_port_in_use_is_told_before_any_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"port {port} on 127.0.0.1 is in use.*another --port"):
            serve(EngineConfig(model="no-such-model"), LineEngineConfig(), ServerConfig(port=port), WatchConfig())


def test_a_bound_port_is_free_again_after_a_failed_start() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(ModelLoadError):
        serve(EngineConfig(model="no-such-model"), LineEngineConfig(), ServerConfig(port=port), WatchConfig())
    bind("127.0.0.1", port).close()


@pytest.mark.parametrize(
    ("host", "port"), [("no host", 8000), ("127.0.0.1", 70000), ("127.0.0.1", -1), ("192.0.2.1", 0)]
)
def test_an_address_that_cannot_be_is_a_start_up_error(host: str, port: int) -> None:
    with pytest.raises(StartupError, match=r"[Cc]hoose a"):
        bind(host, port)


def test_an_open_door_is_warned_about(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "is_loopback", lambda address: False)
    for key, warned in ((None, True), ("secret", False)):
        config = ServerConfig(port=0, api_key=key)
        with pytest.raises(ModelLoadError):
            serve(EngineConfig(model="no-such-model"), LineEngineConfig(), config, WatchConfig())
        assert ("without --api-key" in capfd.readouterr().err) is warned


def test_addresses() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("192.0.2.7")
    assert base_url(("0.0.0.0", 80)) == "http://127.0.0.1:80"
    assert base_url(("::", 80, 0, 0)) == "http://[::1]:80"


def test_the_command_to_try_names_a_key_only_where_one_is_needed() -> None:
    assert "Authorization" not in ready_message("http://127.0.0.1:1", "m", needs_key=False)
    words = shlex.split(ready_message("http://127.0.0.1:1", "it's", needs_key=True).splitlines()[1])
    assert "Authorization: Bearer $API_KEY" in words
    assert json.loads(words[-1])["model"] == "it's"


@needs_proc
def test_serves_then_ends_with_0_on_sigterm(tiny: Path) -> None:
    with ServerProcess(tiny, "--served-model-name", "tiny") as server:
        server.wait_ready()
        words = shlex.split(server.command)
        assert words[2] == f"{server.url}/v1/chat/completions"
        reply = httpx.post(words[2], json=json.loads(words[-1]), timeout=120).json()
        assert reply["model"] == "tiny"
        entries = reply["choices"][0]["logprobs"]["content"]
        assert "".join(e["token"] for e in entries) == reply["choices"][0]["message"]["content"]
        (engine,) = server.children()
        server.process.send_signal(signal.SIGTERM)
        code, stderr = server.finish()
        assert code == 0, stderr
        assert "Traceback" not in stderr
        assert gone(engine)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_running_request_is_finished_before_the_end(tiny: Path, number: signal.Signals) -> None:
    with ServerProcess(tiny, "--drain-timeout", "600") as server:
        url = server.wait_ready().url
        events = stream(url, 1000)
        next(events)
        server.process.send_signal(number)
        rest = list(events)
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
        code, stderr = server.finish()
        assert code == 0, stderr
        assert "Traceback" not in stderr
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


@pytest.mark.slow
def test_a_request_that_outlasts_the_drain_ends_with_an_error(tiny: Path) -> None:
    with ServerProcess(tiny, "--drain-timeout", "0.5") as server:
        events = stream(server.wait_ready().url, 30000)
        next(events)
        server.process.send_signal(signal.SIGTERM)
        assert any("error" in json.loads(event) for event in events if event != "[DONE]")
        code, stderr = server.finish()
        assert code == 0, stderr
        assert "Traceback" not in stderr


@pytest.mark.slow
@needs_proc
def test_a_second_interrupt_ends_at_once(tiny: Path) -> None:
    with ServerProcess(tiny, "--drain-timeout", "3600") as server:
        events = stream(server.wait_ready().url, 30000)
        next(events)
        (engine,) = server.children()
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGINT)
        code, stderr = server.finish()
        assert code == 130, stderr
        assert "Traceback" not in stderr
        assert gone(engine)
        assert any("error" in json.loads(event) for event in events if event != "[DONE]")


@pytest.mark.slow
@needs_proc
def test_an_interrupt_while_it_starts_ends_it_and_its_engine(tiny: Path) -> None:
    with ServerProcess(tiny) as server:
        deadline = time.monotonic() + 120
        while not (children := server.children()) and time.monotonic() < deadline:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGINT)
        code, stderr = server.finish(timeout=120)
        assert code == 130, stderr
        assert "Traceback" not in stderr
        assert gone(children[0])


@pytest.mark.slow
@needs_proc
def test_a_killed_server_takes_its_engine_along(tiny: Path) -> None:
    with ServerProcess(tiny) as server:
        server.wait_ready()
        (engine,) = server.children()
        server.process.kill()
        server.finish()
        try:
            assert gone(engine)
        finally:
            if not gone(engine, 0.1):
                os.kill(engine, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--kv-cache-memory", "1KiB"), "raise kv_cache_memory"),
        (("--max-model-len", "1000000"), "beyond the model's context"),
        (("--device", "abacus"), "use cpu or cuda"),
    ],
)
def test_an_engine_that_cannot_start_says_why(tiny: Path, arguments: tuple[Any, ...], says: str) -> None:
    with ServerProcess(tiny, *arguments) as server:
        code, stderr = server.finish()
        assert code == 1
        assert stderr.splitlines()[-1].startswith("neper: error: ")
        assert says in stderr.splitlines()[-1]
        assert "Traceback" not in stderr
