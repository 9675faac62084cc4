"""The openai client against `neper serve` on the embedded model: what a user does, end to end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from neper.models.source import ModelSource
from tests.cli.serving import ServerProcess

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
PROMPTS = {
    "plain": "What is the capital of France?",
    "emoji": "Reply with a single emoji.",
    "cjk": "Repeat exactly: 今日は良い天気です。日本語の文章。",
    "quotes": "Repeat exactly: “curly quotes” and naïve café — dashes…",
}


@pytest.fixture(scope="module")
def server(smollm2: ModelSource) -> Iterator[ServerProcess]:
    with ServerProcess(MODEL) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def chat(client: openai.OpenAI, prompt: str, *, stream: bool, **options: Any) -> tuple[str, list[Any] | None, Any]:
    """Content, entries and finish reason; a stream's are folded, each chunk's entries checked against its own text."""
    options = {"model": MODEL, "temperature": 0, "max_tokens": 24, "logprobs": True, **options}
    messages: Any = [{"role": "user", "content": prompt}]
    if not stream:
        choice = client.chat.completions.create(messages=messages, **options).choices[0]
        return choice.message.content or "", choice.logprobs.content if choice.logprobs else None, choice.finish_reason
    text, entries, finish = "", [], None
    for chunk in client.chat.completions.create(messages=messages, stream=True, **options):
        [choice] = chunk.choices
        delta = choice.delta.content or ""
        new = choice.logprobs.content or [] if choice.logprobs else []
        if choice.logprobs is not None:
            assert "".join(entry.token for entry in new) == delta
        text, finish = text + delta, choice.finish_reason or finish
        entries += new
    return text, entries, finish


def check_entries(text: str, entries: list[Any], top: int) -> None:
    assert "".join(entry.token for entry in entries) == text
    data = b"".join(bytes(entry.bytes) for entry in entries)
    assert data.decode("utf-8", "replace") == text
    if "\ufffd" not in text:
        assert data == text.encode()
    for entry in entries:
        assert math.isfinite(entry.logprob)
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == top
        values = [alternative.logprob for alternative in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        if top:
            assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
            assert entry.top_logprobs[0].bytes == entry.bytes
            assert sum(math.exp(value) for value in values) <= 1 + 1e-6


@pytest.mark.parametrize("top", [0, 5, 20])
@pytest.mark.parametrize("name", PROMPTS)
def test_chat_tokens_spell_the_content(client: openai.OpenAI, name: str, top: int) -> None:
    whole = chat(client, PROMPTS[name], stream=False, top_logprobs=top)
    streamed = chat(client, PROMPTS[name], stream=True, top_logprobs=top)
    for text, entries, _ in (whole, streamed):
        assert text
        assert entries is not None
        check_entries(text, entries, top)
    # The second one found its prompt in the cache: bfloat16 may differ there, but the text spells itself in both.
    plain = chat(client, PROMPTS[name], stream=False, logprobs=False)
    assert plain[1] is None


def test_a_reply_cut_inside_a_character(client: openai.OpenAI) -> None:
    for stream in (False, True):
        text, entries, finish = chat(client, PROMPTS["emoji"], stream=stream, max_tokens=2, top_logprobs=5)
        assert finish == "length"
        assert text.endswith("\ufffd")
        assert entries is not None
        assert [entry.token for entry in entries][-1].endswith("\ufffd")
        data = b"".join(bytes(entry.bytes) for entry in entries)
        assert data.decode("utf-8", "replace") == text
        with pytest.raises(UnicodeDecodeError):
            data.decode()
        longer, _, _ = chat(client, PROMPTS["emoji"], stream=stream, max_tokens=3)
        assert "\ufffd" not in longer
        assert longer.encode().startswith(data)


def test_stop_strings_cut_text_and_entries_alike(client: openai.OpenAI) -> None:
    free, _, _ = chat(client, PROMPTS["plain"], stream=False)
    for stop in (free[5:8], free[3:12], free[-4:], free[:2]):
        for stream in (False, True):
            text, entries, finish = chat(client, PROMPTS["plain"], stream=stream, stop=stop, top_logprobs=5)
            assert finish == "stop"
            assert text == free[: free.index(stop)]
            assert entries is not None
            assert "".join(entry.token for entry in entries) == text
            assert b"".join(bytes(entry.bytes) for entry in entries) == text.encode()


@pytest.mark.parametrize("top", [0, 5, 20])
def test_completions_streamed_and_not(client: openai.OpenAI, top: int) -> None:
    prompt = "Once upon a time, in a café far away, there"
    options: Any = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 16, "logprobs": top}
    client.completions.create(**options)  # the cache is equally warm for the two that are compared
    whole = client.completions.create(**options).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.tokens is not None
    chunks = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    tokens = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens or []]
    assert "".join(chunk.text for chunk in chunks) == whole.text == "".join(whole.logprobs.tokens)
    assert tokens == whole.logprobs.tokens
    values = whole.logprobs.token_logprobs or []
    assert values == [v for chunk in chunks if chunk.logprobs for v in chunk.logprobs.token_logprobs or []]
    if top == 0:
        assert whole.logprobs.top_logprobs == [{t: v} for t, v in zip(tokens, values, strict=True)]
    else:
        for value, best in zip(values, whole.logprobs.top_logprobs or [], strict=True):
            assert value == max(best.values())
            assert len(best) == top
    assert whole.logprobs.text_offset is not None
    assert whole.logprobs.text_offset[0] == len(prompt)


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    prompt = "correct horse battery staple"
    options: Any = {"model": MODEL, "prompt": prompt, "echo": True, "logprobs": 1, "temperature": 0}
    scored = client.completions.create(**options, max_tokens=0)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert scored.choices[0].text == prompt == "".join(logprobs.tokens or [])
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    assert (logprobs.token_logprobs or [])[0] is None
    one = client.completions.create(**options, max_tokens=1, extra_body={"top_k": 1})
    longer = one.choices[0].logprobs
    assert longer is not None
    assert len(longer.tokens or []) == len(logprobs.tokens or []) + 1
    for a, b in zip((longer.token_logprobs or [])[1:], (logprobs.token_logprobs or [])[1:], strict=False):
        assert a == pytest.approx(b, abs=1e-6)


def test_eight_at_a_time(client: openai.OpenAI) -> None:
    def one(i: int) -> None:
        prompt = f"{PROMPTS['plain']} Answer number {i}."
        text, entries, _ = chat(client, prompt, stream=i % 2 == 0, top_logprobs=[0, 5, 20][i % 3])
        assert entries is not None
        check_entries(text, entries, [0, 5, 20][i % 3])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))


def test_a_bad_request_is_named_and_the_next_one_works(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, "hi", stream=False, top_logprobs=21)
    assert refused.value.param == "top_logprobs"
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, "word " * 9000, stream=False)
    assert refused.value.code == "context_length_exceeded"
    text, _, _ = chat(client, PROMPTS["plain"], stream=False)
    assert "Paris" in text
