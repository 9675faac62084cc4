"""guidance: its OpenAI model, which shows tokens by their bytes and probabilities."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from guidance import assistant, gen, user
from guidance.models import OpenAI
from guidance.registry import get_trace_handler
from guidance.trace import TokenOutput

from tests.clients.conftest import SMOLLM2
from tests.clients.contract import post

QUESTION = "What is the capital of France?"
GREEDY = 1e-6  # it takes 0 for "not given"
NEARLY_E = 2.718  # what it raises to the logprob


def ask(url: str, question: str) -> Any:
    model: Any = OpenAI(SMOLLM2, api_key="none", base_url=url + "/v1", echo=False)
    with user():
        model += question
    with assistant():
        model += gen("answer", max_tokens=16, temperature=GREEDY)
    return model


def shown(model: Any) -> list[TokenOutput]:
    """The tokens in the order in which it showed them."""
    nodes = get_trace_handler()[model._id].path()
    return [output for node in nodes for output in node.output if isinstance(output, TokenOutput)]


def raw_reply(url: str, question: str) -> dict[str, Any]:
    body = {"model": SMOLLM2, "messages": [{"role": "user", "content": question}], "max_tokens": 16, "temperature": 0}
    reply = post(url, "/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 5})
    choice: dict[str, Any] = reply["choices"][0]
    return choice


def check(url: str, question: str, model: Any) -> None:
    raw = raw_reply(url, question)
    assert model["answer"] == raw["message"]["content"]
    tokens = shown(model)
    assert b"".join(token.token.bytes for token in tokens) == model["answer"].encode()
    assert "".join(token.value for token in tokens) == model["answer"]
    for token, entry in zip(tokens, raw["logprobs"]["content"], strict=True):
        assert token.token.bytes == bytes(entry["bytes"])
        assert token.token.prob == pytest.approx(NEARLY_E ** entry["logprob"], abs=1e-4)
        assert token.top_k is not None
        assert [one.bytes for one in token.top_k] == [bytes(one["bytes"]) for one in entry["top_logprobs"]]
        expected = [NEARLY_E ** one["logprob"] for one in entry["top_logprobs"]]
        assert [one.prob for one in token.top_k] == pytest.approx(expected, abs=1e-4)
        assert token.top_k[0].bytes == token.token.bytes  # greedy
        assert math.fsum(one.prob for one in token.top_k) <= 1.001


def test_an_answer_is_shown_token_by_token(smollm2_url: str) -> None:
    model = ask(smollm2_url, QUESTION)
    assert "Paris" in model["answer"]
    check(smollm2_url, QUESTION, model)


def test_eight_at_a_time(smollm2_url: str) -> None:
    questions = [f"{QUESTION} Answer in {i + 2} words." for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(lambda question: ask(smollm2_url, question), questions))
    for question, model in zip(questions, models, strict=True):
        check(smollm2_url, question, model)
