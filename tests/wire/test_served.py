"""The server over an engine that speaks lines, beside the same server over the same engine in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from neper.config import EngineConfig, LineEngineConfig
from neper.models.source import ModelSource, resolve
from neper.wire.drive import LineEngine
from tests.cases.conftest import CHAT, COMPLETIONS, RealServer, write_reasoning_model
from tests.cases.test_random_requests import plain
from tests.helpers.invariants import Json, check_reply, close
from tests.server.conftest import until
from tests.server.test_errors import check
from tests.wire.test_both_halves import AT_ONCE, command

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return resolve(str(write_reasoning_model(tmp_path_factory.mktemp("served") / "tiny")))


def config(source: ModelSource) -> EngineConfig:
    return EngineConfig(model=str(source.path), device="cpu", dtype="float32", num_threads=1, max_num_seqs=AT_ONCE)


@pytest.fixture(scope="module")
def own(source: ModelSource) -> Iterator[RealServer]:
    with RealServer(source, config(source)) as server:
        yield server


@pytest.fixture(scope="module", params=["tagged", "untagged"])
def lines(source: ModelSource, request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    options = [] if request.param == "tagged" else ["--max-num-seqs", "1"]
    log: Path = tmp_path_factory.mktemp("lines") / "engine.log"
    made = LineEngineConfig(
        engine_command=command(source.path, *options), tokenizer=str(source.path), engine_log=str(log)
    )

    def make_engine() -> LineEngine:
        return LineEngine(made, vocab_size=334)

    with RealServer(source, config(source), make_engine=make_engine) as server:
        yield server


FIXED: Json = {"max_tokens": 16, "seed": 5, "return_token_ids": True}
ASKED: list[tuple[str, Json]] = [
    (CHAT, {}),
    (CHAT, {"logprobs": True}),
    (CHAT, {"logprobs": True, "top_logprobs": 20, "temperature": 0}),
    (CHAT, {"logprobs": True, "top_logprobs": 3, "n": 3}),
    (CHAT, {"logprobs": True, "top_logprobs": 2, "stop": ["e", "\ufffd", "ou"], "include_stop_str_in_output": True}),
    (CHAT, {"logprobs": True, "top_logprobs": 2, "allowed_token_ids": [40, 41, 42, 2]}),
    (CHAT, {"logprobs": True, "tools": [TOOL], "skip_special_tokens": False}),
    (CHAT, {"logprobs": True, "stop_token_ids": list(range(40, 300)), "frequency_penalty": 1.0}),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>\nwell"}],
            "continue_final_message": True,
            "logprobs": True,
            "top_logprobs": 1,
        },
    ),
    (COMPLETIONS, {}),
    (COMPLETIONS, {"echo": True, "max_tokens": 0}),
    (COMPLETIONS, {"logprobs": 0, "temperature": 0}),
    (COMPLETIONS, {"logprobs": 5, "temperature": 1.4, "top_p": 0.9, "top_k": 40, "min_p": 0.01}),
    (COMPLETIONS, {"logprobs": 5, "prompt": ["Hello", "日本 😀", "a"], "n": 2}),
    (COMPLETIONS, {"logprobs": 2, "allowed_token_ids": list(range(3, 300)), "repetition_penalty": 1.2}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ASKED, ids=str)
def test_the_same_reply(own: RealServer, lines: RealServer, path: str, body: Json, stream: bool) -> None:
    asked = {**FIXED, **body, "stream": stream}
    expected, found = own.full(path, **asked), lines.full(path, **asked)
    check_reply("chat" if path == CHAT else "completions", asked, found)
    for one, other in zip(plain(found), plain(expected), strict=True):
        close(one, other)


def test_eight_at_a_time(own: RealServer, lines: RealServer) -> None:
    asked = [(path, {**FIXED, **body, "stream": place % 2 == 0}) for place, (path, body) in enumerate(ASKED)]
    expected = [plain(own.full(path, **body)) for path, body in asked]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda item: plain(lines.full(item[0], **item[1])), asked * 2))
    for ones, others in zip(found, expected * 2, strict=True):
        for one, other in zip(ones, others, strict=True):
            close(one, other)
    assert lines.engine.stats().restarts == 0


def test_the_openai_client(lines: RealServer) -> None:
    client = openai.OpenAI(base_url=f"{lines.url}/v1", api_key="none")
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    asked: Json = {"model": lines.model, "messages": messages, "logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    reply = client.chat.completions.create(**asked, seed=3)
    streamed = list(client.chat.completions.create(**asked, seed=3, stream=True))
    choice = reply.choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert "".join(entry.token for entry in entries) == choice.message.content
    folded = [entry for chunk in streamed for c in chunk.choices if c.logprobs for entry in c.logprobs.content or []]
    assert [entry.token for entry in folded] == [entry.token for entry in entries]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo"),
        (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
        (CHAT, {"min_tokens": 2}, "min_tokens"),
        (CHAT, {"logprobs": True, "logprobs_mode": "processed_logprobs"}, "logprobs_mode"),
        (CHAT, {"logprobs": True, "logprob_token_ids": [5]}, "logprob_token_ids"),
        (CHAT, {"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (COMPLETIONS, {"allowed_token_ids": [384]}, "allowed_token_ids"),
    ],
)
def test_what_lines_cannot_carry(lines: RealServer, path: str, body: Json, param: str) -> None:
    check(lines.post(path, **body), 400, param)


def test_a_client_that_leaves(lines: RealServer) -> None:
    """The engine stops its work, and the next request is right."""
    expected = lines.choice(COMPLETIONS, **FIXED, temperature=0)
    before = lines.engine.stats()
    with (
        httpx.Client(base_url=lines.url, timeout=120) as http,
        http.stream("POST", COMPLETIONS, json={"prompt": "Hello", "max_tokens": 450, "stream": True}) as response,
    ):
        next(response.iter_lines())
    until(lambda: lines.engine.stats().running == 0)
    assert lines.engine.stats().generated_tokens - before.generated_tokens < 300
    assert lines.choice(COMPLETIONS, **FIXED, temperature=0) == expected
