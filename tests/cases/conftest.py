"""Real servers over real engines: the embedded model, a tiny random one, and an odd one; and one over a script."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from transformers import AddedToken, AutoModelForCausalLM, PreTrainedTokenizerFast

from neper.config import EngineConfig, ServerConfig
from neper.engine.remote.client import EngineClient
from neper.models.source import ModelSource, resolve
from neper.server.app import create_app
from neper.server.service import Service
from neper.text.tokenizer import Tokenizer
from neper.wire.drive import LineEngine
from tests.helpers.invariants import Json, fold
from tests.helpers.qwen_template import QWEN_TEMPLATE
from tests.helpers.tiny import VOCAB_SIZE, write_model
from tests.server.conftest import TAGS, Client, byte_level_tokenizer, fresh, running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LEVELS = 24  # of the odd model's logits, each shared by VOCAB_SIZE / LEVELS ids
POISON = 383  # the id whose embedding in the odd model is NaN


class RealServer:
    """uvicorn in a thread over an engine in a process of its own, as `neper serve` runs them.

    Attributes:
        http: a client of it. url, model: where it is, and what it calls its model.
        oracle: the same weights in transformers, in float32; None where nobody asks it.
    """

    def __init__(
        self,
        source: ModelSource,
        config: EngineConfig,
        *,
        oracle: bool = False,
        make_engine: Callable[[], EngineClient | LineEngine] | None = None,
    ) -> None:
        self._make_engine = make_engine or (lambda: EngineClient(config, source, log_level="warning"))
        self.source = source
        self.model = source.name
        self.tokenizer = Tokenizer.from_directory(source.path)
        self.oracle = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32).eval() if oracle else None
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=120)
        self._failure: BaseException | None = None
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RealServer:
        self._thread.start()
        assert self._settled.wait(120)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()
        self._uvicorn.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._socket.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
        self._settled.set()

    async def _serve(self) -> None:
        self.engine = self._make_engine()
        await self.engine.start()
        try:
            app = create_app(
                self.engine,
                self.tokenizer,
                ServerConfig(),
                model_name=self.model,
                eos_token_ids=self.source.eos_token_ids,
            )
            self.service: Service = app.state.service
            self._uvicorn = uvicorn.Server(
                uvicorn.Config(app, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=1)
            )
            serving = asyncio.create_task(self._uvicorn.serve([self._socket]))
            while not self._uvicorn.started and not serving.done():
                await asyncio.sleep(0.01)
            self._settled.set()
            await serving
        finally:
            await self.engine.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        if path == CHAT:
            body.setdefault("messages", [{"role": "user", "content": "Hello"}])
        else:
            body.setdefault("prompt", "Hello")
        return self.http.post(path, json={"model": self.model, **body})

    def full(self, path: str, **body: Any) -> Json:
        """A full reply, or a stream folded into one: whichever `stream` asks for."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            reply: Json = response.json()
            return reply
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return fold(events)

    def choice(self, path: str, **body: Any) -> Json:
        """The one choice of a reply, folded if it is streamed."""
        [choice] = self.full(path, **body)["choices"]
        return dict(choice)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def rows(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), V] float64 logits of transformers; row i is about the token after the i-th."""
        assert self.oracle is not None
        with torch.inference_mode():
            logits: torch.Tensor = self.oracle(torch.tensor([token_ids])).logits[0]
        return logits.double()

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        return self.rows(token_ids).log_softmax(-1)


@contextlib.contextmanager
def serving(source: ModelSource, *, oracle: bool = False, **config: Any) -> Iterator[RealServer]:
    values = {"device": "cpu", "dtype": "float32", "num_threads": 1} | config
    with RealServer(source, EngineConfig(model=str(source.path), **values), oracle=oracle) as server:
        yield server


@pytest.fixture(scope="session")
def embedded(smollm2: ModelSource) -> Iterator[RealServer]:
    """The default model. In float32, where an echo's numbers are those of the tokens when they were sampled."""
    with serving(smollm2) as server:
        yield server


def write_reasoning_model(directory: Path) -> Path:
    """A tiny random model with a template that knows reasoning and tools, whose tags are tokens of their own."""
    write_model(directory, "qwen3")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.chat_template = QWEN_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_reasoning(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return resolve(str(write_reasoning_model(tmp_path_factory.mktemp("reasoning") / "tiny")))


@pytest.fixture(scope="session")
def tiny(tiny_reasoning: ModelSource) -> Iterator[RealServer]:
    """A tiny random model, all of whose text is noise: bytes that are no UTF-8, characters cut in two."""
    with serving(tiny_reasoning, oracle=True) as server:
        yield server


def write_odd_model(directory: Path) -> Path:
    """A model with exact ties, gaps beyond float32's exp, and an id that makes NaN.

    All but one of its last hidden numbers are zero, so a logit is one product: ids whose heads are equal tie bit by
    bit, in every position and whatever sums there are. Its 24 levels are 24 apart times that number.
    """
    model = write_model(directory)
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.model.norm.weight[0] = 24.0
        model.lm_head.weight[:, 0] = torch.arange(VOCAB_SIZE) % LEVELS
        model.lm_head.weight[POISON, 0] = LEVELS // 2  # neither end of the order: never sampled
        model.model.embed_tokens.weight[POISON] = float("nan")
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def odd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    directory = write_odd_model(tmp_path_factory.mktemp(f"odd-{request.param}") / "odd")
    with serving(resolve(str(directory)), oracle=True, dtype=request.param) as server:
        yield server


@pytest.fixture(scope="session")
def shared_scripted() -> Iterator[Client]:
    with running(byte_level_tokenizer(), ServerConfig()) as client:
        yield client


@pytest.fixture
def scripted(shared_scripted: Client) -> Iterator[Client]:
    """A server whose engine says what the test tells it to."""
    with fresh(shared_scripted, 2048) as client:
        yield client


@pytest.fixture(scope="session")
def shared_reasoning() -> Iterator[Client]:
    with running(byte_level_tokenizer(template=QWEN_TEMPLATE, tags=TAGS), ServerConfig()) as client:
        yield client


@pytest.fixture
def reasoning(shared_reasoning: Client) -> Iterator[Client]:
    """As `scripted`, for a model that reasons and calls tools."""
    with fresh(shared_reasoning, 2048) as client:
        yield client


@pytest.fixture
def together() -> Callable[[list[Callable[[], Any]]], list[Any]]:
    """Runs functions in a thread each, begun at once; returns what they return, or raises what one raises."""

    def run(functions: list[Callable[[], Any]]) -> list[Any]:
        results: list[Any] = [None] * len(functions)
        barrier = threading.Barrier(len(functions))

        def one(place: int) -> None:
            try:
                barrier.wait(60)
                results[place] = functions[place]()
            except BaseException as error:
                results[place] = error

        threads = [threading.Thread(target=one, args=(place,)) for place in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    return run
