"""A real server on a loopback socket over a scripted engine, and clients for it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers, trainers

from neper.config import ServerConfig
from neper.engine.interface import Capabilities
from neper.server.app import create_app
from neper.server.service import Service
from neper.server.transport.connection import protocol
from neper.text.tokenizer import Tokenizer
from tests.helpers.qwen_template import QWEN_TEMPLATE
from tests.helpers.scripted_engine import ALL_SAMPLING_FIELDS, ScriptedEngine

SECONDS = 300.0
"""A limit for what comes soon: far away, since a test that passes does not wait for it, and machines can be slow."""

MODEL = "scripted"
VOCAB_SIZE = 384  # wider than the tokenizer's 330
END = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if mood %}({{ mood }}){% endif %}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and then the dog sleeps in the sun",
    "Hello, world! Hello there. What is the answer? The answer is forty-two. STOP and go.",
    "日本語のテキスト 中文文本 Ünïcödé naïve café",
]


TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def byte_level_tokenizer(
    normalizer: tokenizers.normalizers.Normalizer | None = None,
    *,
    template: str | Mapping[str, str] = CHAT_TEMPLATE,
    tags: Sequence[str] = (),
    named: Mapping[str, str] | None = None,
) -> Tokenizer:
    """Over the corpus above; `tags` are tokens of their own, but not special ones; `named`: `bos_token` and its like,
    as templates write them.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([tokenizers.AddedToken(tag, special=False, normalized=False) for tag in tags])
    return Tokenizer(backend, {"eos_token": "<|im_end|>", **(named or {})}, template)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


class Server:
    """uvicorn in a thread, as `neper serve` runs it but for the signals."""

    def __init__(self, engine: ScriptedEngine, tokenizer: Tokenizer, config: ServerConfig, **options: Any) -> None:
        if config.stream_ping_interval == ServerConfig.stream_ping_interval:  # no comments where a machine is slow
            config = dataclasses.replace(config, stream_ping_interval=0)
        self.engine = engine
        self.app = create_app(engine, tokenizer, config, model_name=MODEL, **options)
        self.service: Service = self.app.state.service
        self._socket = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only then
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                self.app,
                http=protocol(config, self.service.connections),
                timeout_keep_alive=config.keep_alive_timeout,  # type: ignore[arg-type]
                log_config=None,
                access_log=False,
                ws="none",
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            await self._uvicorn.serve([self._socket])

        asyncio.run(serve())

    def start(self) -> None:
        self._thread.start()
        until(lambda: self._uvicorn.started)

    def stop(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        self._socket.close()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the server's loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(SECONDS)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@dataclass
class Client:
    """A server with its engine, and three ways to talk to it."""

    server: Server
    engine: ScriptedEngine
    tokenizer: Tokenizer
    http: httpx.Client
    sdk: openai.OpenAI

    def say(self, text: str | list[int]) -> list[int]:
        """Script the reply of all requests; returns its ids."""
        ids = self.tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text
        self.engine.reply = lambda request: ids
        return ids

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json={"model": MODEL, **body})

    def chat(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], **body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, prompt: Any = "Hello", **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All chunks of a stream, which must end as one does."""
        if "chat" in path:
            body.setdefault("messages", [{"role": "user", "content": "Hello"}])
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


def new_engine(max_model_len: int = 128) -> ScriptedEngine:
    capabilities = Capabilities(
        vocab_size=VOCAB_SIZE, max_model_len=max_model_len, max_logprobs=20, sampling_fields=ALL_SAMPLING_FIELDS
    )
    return ScriptedEngine(lambda request: [], capabilities=capabilities, end_token_id=END)


@contextlib.contextmanager
def running(tokenizer: Tokenizer, config: ServerConfig, **options: Any) -> Iterator[Client]:
    server = Server(new_engine(), tokenizer, config, **options)
    server.start()
    key = config.api_key or "none"
    try:
        with (
            httpx.Client(base_url=server.url, timeout=SECONDS) as http,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=SECONDS) as sdk,
        ):
            yield Client(server, server.engine, tokenizer, http, sdk)
    finally:
        server.stop()


@pytest.fixture(scope="session")
def shared_client(tokenizer: Tokenizer) -> Iterator[Client]:
    with running(tokenizer, ServerConfig(max_body_bytes=100_000, max_choices=16)) as client:
        yield client


@pytest.fixture
def client(shared_client: Client) -> Iterator[Client]:
    """The shared server with a fresh script. Afterwards nothing may be left in flight."""
    with fresh(shared_client) as client:
        yield client


@contextlib.contextmanager
def fresh(client: Client, max_model_len: int = 128) -> Iterator[Client]:
    client.engine.__dict__.clear()  # replaced methods too
    client.engine.__dict__.update(new_engine(max_model_len).__dict__)
    yield client
    until(lambda: client.server.service.num_choices == 0)
    assert all(stream.closed for stream in client.engine.streams)


@pytest.fixture(scope="session")
def shared_qwen() -> Iterator[Client]:
    with running(byte_level_tokenizer(template=QWEN_TEMPLATE, tags=TAGS), ServerConfig()) as client:
        yield client


@pytest.fixture
def qwen(shared_qwen: Client) -> Iterator[Client]:
    """A server of a model that reasons and calls tools, as `client` is one of a model that does neither."""
    with fresh(shared_qwen, 2048) as client:
        yield client
