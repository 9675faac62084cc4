"""litellm: chat and text completions through its OpenAI providers, sync and async, whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import litellm
import pytest

from tests.clients.conftest import TINY, Run
from tests.clients.contract import Entries, check_spelling, plain, post
from tests.clients.reference import Reference

CONTENT = "over the lazy dog"
TOP = 3
SAMPLING = {"temperature": 0, "max_tokens": 12}


def chat_body(content: str = CONTENT) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": TINY, "messages": messages, **SAMPLING, "logprobs": True, "top_logprobs": TOP}


def through(url: str, body: dict[str, Any], provider: str = "openai") -> dict[str, Any]:
    """litellm's arguments for this body."""
    return {**body, "model": f"{provider}/{TINY}", "api_base": url + "/v1", "api_key": "none", "max_retries": 0}


def folded(chunks: list[Any]) -> tuple[str, Entries]:
    text, entries = "", []
    for chunk in chunks:
        [choice] = chunk.choices
        text += choice.delta.content or ""
        logprobs = getattr(choice, "logprobs", None)
        if logprobs is not None:
            entries += plain(logprobs.content or [])
    return text, entries


async def chats(url: str, bodies: list[dict[str, Any]], *, stream: bool) -> list[tuple[str, Entries]]:
    async def one(body: dict[str, Any]) -> tuple[str, Entries]:
        reply: Any = await litellm.acompletion(**through(url, body), stream=stream)
        if stream:
            return folded([chunk async for chunk in reply])
        return reply.choices[0].message.content, plain(reply.choices[0].logprobs.content)

    return list(await asyncio.gather(*map(one, bodies)))


def check_chat(reference: Reference, content: str, text: str, entries: Entries) -> None:
    """Entries are those of the text. litellm drops chunks of a stream that have no text, so every entry must be in one
    that has."""
    check_spelling(text, entries, TOP)
    reference.check(reference.chat_ids(content), entries)


@pytest.mark.parametrize("kind", ["whole", "stream", "async", "async-stream"])
def test_chat(tiny_url: str, reference: Reference, run: Run, kind: str) -> None:
    body = chat_body()
    stream = kind.endswith("stream")
    if kind.startswith("async"):
        [(text, entries)] = run(chats(tiny_url, [body], stream=stream))
    elif stream:
        text, entries = folded(list(litellm.completion(**through(tiny_url, body), stream=True)))
    else:
        reply: Any = litellm.completion(**through(tiny_url, body))
        text, entries = reply.choices[0].message.content, plain(reply.choices[0].logprobs.content)
    check_chat(reference, CONTENT, text, entries)
    [raw] = post(tiny_url, "/v1/chat/completions", body)["choices"]
    assert text == raw["message"]["content"]
    assert entries == raw["logprobs"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_eight_chats_at_a_time(tiny_url: str, reference: Reference, run: Run, stream: bool) -> None:
    contents = [f"{CONTENT} {i}" for i in range(8)]
    replies = run(chats(tiny_url, [chat_body(content) for content in contents], stream=stream))
    for content, (text, entries) in zip(contents, replies, strict=True):
        check_chat(reference, content, text, entries)


@pytest.mark.parametrize("echo", [False, True])
def test_text_completion(tiny_url: str, echo: bool) -> None:
    body = {"model": TINY, "prompt": CONTENT, **SAMPLING, "logprobs": TOP, "echo": echo}
    complete: Callable[..., Any] = litellm.text_completion
    [raw] = post(tiny_url, "/v1/completions", body)["choices"]
    [choice] = complete(**through(tiny_url, body, "text-completion-openai")).choices
    assert choice.text == raw["text"]
    assert choice.text.startswith(CONTENT) is echo
    assert dict(choice.logprobs) == raw["logprobs"]
    assert len(raw["logprobs"]["tokens"]) > 0
    # It makes no logprobs of a stream's.
    stream = complete(**through(tiny_url, body, "text-completion-openai"), stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in stream) == raw["text"]


def test_a_refusal_arrives_as_one(tiny_url: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="top_logprobs"):
        litellm.completion(**through(tiny_url, chat_body() | {"top_logprobs": 21}))
