"""langchain-openai: a chat model that is invoked, streamed and batched, sync and async, with its logprobs."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_openai import ChatOpenAI

from tests.clients.conftest import TINY, Run
from tests.clients.contract import check_spelling, plain, post
from tests.clients.reference import Reference

CONTENT = "the lazy dog sleeps"
TOP = 4


@pytest.fixture
def model(tiny_url: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=TINY,
        base_url=tiny_url + "/v1",
        api_key="none",
        temperature=0,
        max_tokens=12,
        logprobs=True,
        top_logprobs=TOP,
        max_retries=0,
        stream_usage=True,
    )


async def streamed(model: ChatOpenAI) -> Any:
    return reduce(add, [chunk async for chunk in model.astream(CONTENT)])


@pytest.mark.parametrize("kind", ["invoke", "stream", "ainvoke", "astream"])
def test_a_message_has_its_logprobs(
    model: ChatOpenAI, tiny_url: str, reference: Reference, run: Run, kind: str
) -> None:
    if kind == "invoke":
        message: Any = model.invoke(CONTENT)
    elif kind == "stream":
        message = reduce(add, model.stream(CONTENT))
    elif kind == "ainvoke":
        message = run(model.ainvoke(CONTENT))
    else:
        message = run(streamed(model))
    entries = plain(message.response_metadata["logprobs"]["content"])
    check_spelling(message.content, entries, TOP)
    reference.check(reference.chat_ids(CONTENT), entries)
    body = {"model": TINY, "messages": [{"role": "user", "content": CONTENT}], "temperature": 0, "max_tokens": 12}
    reply = post(tiny_url, "/v1/chat/completions", body | {"logprobs": True, "top_logprobs": TOP})
    [raw] = reply["choices"]
    assert (message.content, entries) == (raw["message"]["content"], raw["logprobs"]["content"])
    assert message.response_metadata["finish_reason"] == raw["finish_reason"]
    assert message.usage_metadata["output_tokens"] == reply["usage"]["completion_tokens"]
    assert message.usage_metadata["input_tokens"] == len(reference.chat_ids(CONTENT))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_batch_of_eight(model: ChatOpenAI, reference: Reference, run: Run, is_async: bool) -> None:
    contents: Any = [f"{CONTENT} {i}" for i in range(8)]
    messages = run(model.abatch(contents)) if is_async else model.batch(contents, {"max_concurrency": 8})
    for content, message in zip(contents, messages, strict=True):
        entries = plain(message.response_metadata["logprobs"]["content"])
        check_spelling(str(message.content), entries, TOP)
        reference.check(reference.chat_ids(content), entries)
