"""Long texts over HTTP: refused early, left with their client, and out of others' way."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from neper.config import ServerConfig
from neper.server import long_texts, tokenization
from neper.server.transport.disconnect import ClientDisconnected
from neper.text.tokenizer import Tokenizer
from tests.server.conftest import Client, running, until
from tests.server.test_errors import CHAT, COMPLETIONS, check

LONG = "a b " * 20_000
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": LONG},
    CHAT: {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG},
    "/tokenize": {"prompt": LONG},
}


@pytest.mark.parametrize("path", BODIES)
def test_case_111_a_text_that_is_too_long_is_refused_before_it_is_encoded(
    client: Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "MAX_TOKENS", 0)
    encoded: list[int] = []
    plain = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        ids = plain(self, text, **options)
        encoded.append(len(ids))
        return ids

    monkeypatch.setattr(Tokenizer, "encode", noted)
    response = client.post(path, **BODIES[path])
    message = check(response, 400, response.json()["error"]["param"], "context_length_exceeded")
    assert "more than 128 tokens" in message
    assert max(encoded, default=0) < 100  # what the server asks its template by itself


def test_tokenize_takes_more_than_the_context(client: Client) -> None:
    text = LONG[:60_000]
    reply = client.post("/tokenize", prompt=text).json()
    assert reply["tokens"] == client.tokenizer.encode(text)


class Encoder:
    """Stands in for Tokenizer.encode: it goes on until it is told to end."""

    def __init__(self) -> None:
        self.running = 0
        self.ended: list[BaseException] = []

    def __call__(self, text: str, *, progress: Any = None, **options: Any) -> list[int]:
        if progress is None or len(text) < 1000:
            return [5]
        self.running += 1
        wait = threading.Event()
        try:
            while True:
                progress(0)
                wait.wait(0.005)
        except BaseException as error:
            self.ended.append(error)
            raise
        finally:
            self.running -= 1


@pytest.mark.parametrize("path", BODIES)
def test_case_111_a_client_that_leaves_ends_its_encoding(
    client: Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder()
    monkeypatch.setattr(client.tokenizer, "encode", encoder)
    body = json.dumps(BODIES[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    address = (client.http.base_url.host, client.http.base_url.port)
    connections = [socket.create_connection(address) for _ in range(3)]
    for connection in connections:
        connection.sendall(head.encode() + body)
    until(lambda: encoder.running == 1)  # one at a time of those that are so long
    # Those that are short never wait.
    assert client.post("/tokenize", prompt="x").json()["tokens"] == [5]
    for connection in connections:
        connection.close()
    until(lambda: not encoder.running and client.server.service.num_requests == 0)
    assert encoder.ended
    assert all(isinstance(error, ClientDisconnected) for error in encoder.ended)


def test_only_so_many_long_texts_wait(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "MAX_WAITING", 0)
    with running(tokenizer, ServerConfig()) as client:
        check(client.post("/tokenize", prompt=LONG), 503, None, "overloaded")
        assert client.post("/tokenize", prompt="x").status_code == 200
