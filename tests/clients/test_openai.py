"""The openai SDK: chat and completions, sync and async, whole and streamed, one and eight at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.clients.conftest import SMOLLM2, TINY, Run
from tests.clients.contract import Entries, check_spelling, legacy_bytes, plain, post
from tests.clients.reference import TOLERANCE, Reference

CONTENT = "the quick brown fox"
KINDS = ["sync", "sync-stream", "async", "async-stream"]
Reply = tuple[str, Entries, str | None]


def options(content: str, top: int = 5, **others: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    sampling = {"temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": top}
    return {"model": TINY, "messages": messages, **sampling, **others}


def whole(reply: Any) -> Reply:
    [choice] = reply.choices
    return choice.message.content, plain(choice.logprobs.content), choice.finish_reason


def folded(chunks: list[Any]) -> Reply:
    """A stream's chunks as the reply; each chunk's entries spell that chunk."""
    text, entries, finish = "", [], None
    for chunk in chunks:
        [choice] = chunk.choices
        delta = choice.delta.content or ""
        new = plain(choice.logprobs.content or []) if choice.logprobs else []
        assert "".join(entry["token"] for entry in new) == delta
        text, entries, finish = text + delta, entries + new, choice.finish_reason or finish
    return text, entries, finish


async def async_chat(url: str, bodies: list[dict[str, Any]], *, stream: bool) -> list[Reply]:
    """Replies to all bodies, sent at the same time."""

    async def one(client: openai.AsyncOpenAI, body: dict[str, Any]) -> Reply:
        if not stream:
            return whole(await client.chat.completions.create(**body))
        chunks: AsyncIterator[Any] = await client.chat.completions.create(**body, stream=True)
        return folded([chunk async for chunk in chunks])

    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        return list(await asyncio.gather(*(one(client, body) for body in bodies)))


def chat(client: openai.OpenAI, url: str, run: Run, kind: str, bodies: list[dict[str, Any]]) -> list[Reply]:
    if kind.startswith("async"):
        return run(async_chat(url, bodies, stream=kind == "async-stream"))

    def one(body: dict[str, Any]) -> Reply:
        if kind == "sync":
            return whole(client.chat.completions.create(**body))
        return folded(list(client.chat.completions.create(**body, stream=True)))

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(one, bodies))


@pytest.mark.parametrize("top", [0, 1, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_chat(client: openai.OpenAI, tiny_url: str, reference: Reference, run: Run, kind: str, top: int) -> None:
    body = options(CONTENT, top)
    [(text, entries, finish)] = chat(client, tiny_url, run, kind, [body])
    check_spelling(text, entries, top)
    reference.check(reference.chat_ids(CONTENT), entries)
    [raw] = post(tiny_url, "/v1/chat/completions", body)["choices"]
    assert (text, entries, finish) == (raw["message"]["content"], raw["logprobs"]["content"], raw["finish_reason"])


@pytest.mark.parametrize("kind", KINDS)
def test_eight_chats_at_a_time(client: openai.OpenAI, tiny_url: str, reference: Reference, run: Run, kind: str) -> None:
    tops = [0, 1, 2, 5, 20, 0, 5, 3]
    contents = [f"{CONTENT} number {i} jumps" for i in range(8)]
    replies = chat(client, tiny_url, run, kind, [options(c, top) for c, top in zip(contents, tops, strict=True)])
    for content, top, (text, entries, _) in zip(contents, tops, replies, strict=True):
        check_spelling(text, entries, top)
        reference.check(reference.chat_ids(content), entries)


def test_a_sampled_chat_is_scored_by_the_model(
    client: openai.OpenAI, tiny_url: str, reference: Reference, run: Run
) -> None:
    body = options(CONTENT, temperature=1.5, seed=7, max_tokens=24)
    [(text, entries, _)] = chat(client, tiny_url, run, "sync", [body])
    check_spelling(text, entries, 5)
    reference.check(reference.chat_ids(CONTENT), entries, greedy=False)
    assert any(entry["logprob"] < entry["top_logprobs"][0]["logprob"] for entry in entries)
    assert chat(client, tiny_url, run, "sync-stream", [body])[0][:2] == (text, entries)


def test_replies_have_what_the_types_require(client: openai.OpenAI, tiny_url: str) -> None:
    raw = post(tiny_url, "/v1/chat/completions", options(CONTENT))
    reply = ChatCompletion.model_validate(raw)  # the SDK itself does not validate
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.refusal is None
    assert "refusal" in raw["choices"][0]["logprobs"]
    assert "refusal" in raw["choices"][0]["message"]
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    body = {"model": TINY, "prompt": [CONTENT, "Hello"], "logprobs": 2, "n": 2}
    completion = Completion.model_validate(post(tiny_url, "/v1/completions", body))
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert [model.id for model in client.models.list()] == [TINY]


def test_usage_of_a_stream(client: openai.OpenAI, reference: Reference) -> None:
    stream: Any = client.chat.completions.create(
        **options(CONTENT), stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    prompt = reference.chat_ids(CONTENT)
    assert last.choices == []
    assert all(chunk.usage is None for chunk in chunks)
    assert last.usage.prompt_tokens == len(prompt)
    assert last.usage.completion_tokens == len(rolled(reference, prompt, 12)) - len(prompt)


@pytest.mark.parametrize("stream", [False, True])
def test_ids_and_their_logprobs(client: openai.OpenAI, reference: Reference, stream: bool) -> None:
    body = options(CONTENT, extra_body={"return_token_ids": True})
    replies: Any = client.chat.completions.create(**body, stream=stream)
    replies = list(replies) if stream else [replies]
    [prompt] = [reply.prompt_token_ids for reply in replies if hasattr(reply, "prompt_token_ids")]
    ids = [i for reply in replies for i in getattr(reply.choices[0], "token_ids", None) or []]
    values = [value for reply in replies for value in getattr(reply.choices[0], "token_logprobs", None) or []]
    assert prompt == reference.chat_ids(CONTENT)
    assert prompt + ids == rolled(reference, prompt, 12)
    rows = reference.logprobs(prompt + ids)[len(prompt) - 1 : -1]
    for value, token_id, row in zip(values, ids, rows, strict=True):  # the end token included
        assert abs(value - row[token_id].item()) < TOLERANCE


def check_completion(reference: Reference, choice: Any, prompt: list[int], top: int, *, echoed: bool) -> None:
    """The legacy arrays spell the text and have the model's values; those of the prompt only where it is echoed."""
    logprobs = choice.logprobs
    ids = rolled(reference, prompt, 8)
    rows = reference.logprobs(ids)
    first = 0 if echoed else len(prompt)
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(ids) - first
    spelled = logprobs.tokens[: -1 if choice.finish_reason == "stop" else None]
    assert b"".join(map(legacy_bytes, spelled)).decode("utf-8", "replace") == choice.text
    assert choice.text.startswith(reference.tokenizer.decode(prompt)) is echoed
    offsets = [len(reference.tokenizer.decode(ids[:i])) for i in range(first, len(prompt) + 1)]
    assert logprobs.text_offset[: len(offsets)] == offsets
    for i, (value, best) in enumerate(zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True), first):
        if i == 0:
            assert value is None
            assert best is None
            continue
        assert abs(value - rows[i - 1, ids[i]].item()) < TOLERANCE
        listed = sorted(best.values(), reverse=True)
        assert top <= len(listed) <= top + 1
        for got, want in zip(listed, rows[i - 1].topk(top).values.tolist(), strict=False):
            assert abs(got - want) < TOLERANCE
        if i >= len(prompt):
            assert value == listed[0]  # greedy: the very same float


def rolled(reference: Reference, ids: list[int], count: int) -> list[int]:
    """`ids` and the greedy reply, up to and with an end token."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(reference.logprobs(ids)[-1].argmax()))
        if ids[-1] == reference.tokenizer.eos_token_id:
            break
    return ids


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_completions(client: openai.OpenAI, tiny_url: str, reference: Reference, echo: bool, as_ids: bool) -> None:
    texts = [CONTENT, "Hello, world! Hello", "the answer is"]
    prompts: Any = [reference.ids(text) for text in texts] if as_ids else texts
    body = {"model": TINY, "max_tokens": 8, "temperature": 0, "logprobs": 2, "echo": echo}
    batch = client.completions.create(**body, prompt=prompts)
    for i, text in enumerate(texts):
        body["prompt"] = prompts[i]
        [choice] = client.completions.create(**body).choices
        [raw] = post(tiny_url, "/v1/completions", body)["choices"]
        assert choice.logprobs is not None
        assert (choice.text, choice.logprobs.model_dump()) == (raw["text"], raw["logprobs"])
        chunks = [chunk.choices[0] for chunk in client.completions.create(**body, stream=True)]
        assert "".join(chunk.text for chunk in chunks) == choice.text
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for chunk in chunks if chunk.logprobs for x in getattr(chunk.logprobs, key)] == raw["logprobs"][
                key
            ]
        assert batch.choices[i].index == i
        for scored in (choice, batch.choices[i]):
            check_completion(reference, scored, reference.ids(text), 2, echoed=echo)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": False}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"top_logprob": 3}}, "top_logprob"),
    ],
)
def test_a_refusal_names_the_field(client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**options(CONTENT) | change)
    assert refused.value.param == param
    assert param in refused.value.message


def test_a_real_model_answers(smollm2_url: str) -> None:
    with openai.OpenAI(base_url=smollm2_url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        body = options("What is the capital of France?", model=SMOLLM2, max_tokens=24)
        make: Callable[..., Any] = client.chat.completions.create
        text, entries, _ = whole(make(**body))
        assert folded(list(make(**body, stream=True)))[:2] == (text, entries)
    assert "Paris" in text
    check_spelling(text, entries, 5)
