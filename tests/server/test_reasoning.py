"""Reasoning in chat: in a field and a list of its own, streamed or not, and switched off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neper.config import ServerConfig
from neper.errors import StartupError
from neper.seeds import choice_seed
from neper.server.app import create_app
from neper.text.tokenizer import Tokenizer
from tests.helpers.chat_replies import check_spelling, fold, joined, whole
from tests.helpers.qwen_template import OPENED_TEMPLATE
from tests.server.conftest import CHAT_TEMPLATE, MODEL, TAGS, Client, byte_level_tokenizer, fresh, new_engine, running
from tests.text.conftest import write_sentencepiece

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]
LONG_TEXT = "日本語 naïve 😀 ok"


@pytest.fixture(scope="module")
def shared_opened() -> Iterator[Client]:
    with running(byte_level_tokenizer(template=OPENED_TEMPLATE, tags=TAGS), ServerConfig()) as client:
        yield client


@pytest.fixture
def opened(shared_opened: Client) -> Iterator[Client]:
    """A server of a model whose prompts begin the reasoning."""
    with fresh(shared_opened, 2048) as client:
        yield client


CASES = [
    ("<think>\nHello there\n</think>\n\nthe answer", "Hello there", "the answer"),
    (f"<think>{LONG_TEXT}</think>{LONG_TEXT}", LONG_TEXT, LONG_TEXT),
    ("<think>\n\n</think>\n\nHi", "", "Hi"),
    ("the answer", "", "the answer"),
    ("<think>Hello", "Hello", ""),
    ("Hi <think> is </think> a tag", "", "Hi <think> is </think> a tag"),
    ("<think>a <tool_call> b</think>c<tool_call>", "a <tool_call> b", "c<tool_call>"),
    ("<thin", "", "<thin"),
    ("", "", ""),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), CASES)
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
def test_fields_and_their_entries(qwen: Client, text: str, reasoning: str, content: str, tokens_per_chunk: int) -> None:
    qwen.engine.tokens_per_chunk = tokens_per_chunk
    ids = qwen.say(text)
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    full = qwen.chat(**options)
    found = whole(full)
    assert (found["reasoning_content"], found["content"], found["calls"]) == (reasoning, content, [])
    check_spelling(found)
    assert found["ids"] == [*ids, 2]
    assert len(found["numbers"]) == len(found["ids"]) == full["usage"]["completion_tokens"]
    message, logprobs = full["choices"][0]["message"], full["choices"][0]["logprobs"]
    assert message.keys() == {"role", "content", "refusal", "reasoning_content"}
    assert message["reasoning_content"] == (reasoning or None)
    assert logprobs.keys() == {"content", "refusal", "reasoning_content"}
    assert fold(qwen.events(PATH, **options)) == found
    assert whole(qwen.chat()) == {**found, "entries": {key: [] for key in found["entries"]}, "ids": [], "numbers": []}


def test_entries_have_the_numbers_of_their_tokens(qwen: Client) -> None:
    """Scores are made up by position, so the same ids in a model without reasoning have the same ones."""
    ids = qwen.say("<think>\nHello there\n</think>\n\nthe answer")
    found = whole(qwen.chat(logprobs=True, top_logprobs=5, return_token_ids=True))
    numbers = dict(zip(range(len(ids)), found["numbers"], strict=False))
    by_bytes = [qwen.tokenizer.token_bytes(token_id) for token_id in ids]
    place = 0
    for entry in [*found["entries"]["reasoning_content"], *found["entries"]["content"]]:
        while by_bytes[place] != bytes(entry["bytes"]):
            place += 1
        assert entry["logprob"] == numbers[place]
        assert len(entry["top_logprobs"]) == 5
        place += 1


def test_reasoning_that_the_prompt_begins(opened: Client) -> None:
    for text, reasoning, content in (
        ("Hello\n</think>\n\nthere", "Hello", "there"),
        ("Hello", "Hello", ""),
        ("</think>there", "", "there"),
    ):
        opened.say(text)
        found = whole(opened.chat(logprobs=True))
        assert (found["reasoning_content"], found["content"]) == (reasoning, content)
        check_spelling(found)
        assert fold(opened.events(PATH, logprobs=True)) == found
    prompt = opened.tokenizer.decode_bytes(opened.engine.submitted[-1].prompt_token_ids).decode()
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")
    # The user's own tag begins nothing, and the prompt that ends the reasoning leaves none.
    opened.say("Hello</think>there")
    for options in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        message = opened.chat(**options)["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Hello</think>there", "refusal": None}
        prompt = opened.tokenizer.decode_bytes(opened.engine.submitted[-1].prompt_token_ids).decode()
        assert prompt.endswith("<think>\n\n</think>\n\n")


def test_a_message_that_is_continued(qwen: Client) -> None:
    def continued(content: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": content}]
        response = qwen.post(PATH, messages=messages, continue_final_message=True)
        assert response.status_code == 200, response.text
        return whole(response.json())

    qwen.say("so</think>Hi")
    assert continued("<think>\nwell, ")["reasoning_content"] == "so"
    assert continued("<think>\nwell</think>")["content"] == "so</think>Hi"
    assert continued("well")["content"] == "so</think>Hi"


def test_a_cut_reply_and_a_stop_string(qwen: Client) -> None:
    ids = qwen.say("<think>Hello 😀</think>the answer is")
    for length in range(1, len(ids) + 1):
        found = whole(qwen.chat(logprobs=True, max_tokens=length))
        check_spelling(found)
        assert found["finish"] == "length"
        assert fold(qwen.events(PATH, logprobs=True, max_tokens=length)) == found
    for stop, reasoning, content in (("ello", "H", ""), ("answer", "Hello 😀", "the "), ("</think>", "Hello 😀", "")):
        found = whole(qwen.chat(logprobs=True, stop=stop))
        assert (found["reasoning_content"], found["content"]) == (reasoning, content)
        assert (found["finish"], found["stop"]) == ("stop", stop)
        check_spelling(found)
        assert fold(qwen.events(PATH, logprobs=True, stop=stop)) == found


def test_choices_are_read_apart(qwen: Client) -> None:
    texts = ["<think>a</think>b", "c", "<think>d"]
    seeds = [choice_seed(0, 0, place) for place in range(3)]
    qwen.engine.reply = lambda request: qwen.tokenizer.encode(texts[seeds.index(request.sampling.seed)])
    options: dict[str, Any] = {"n": 3, "seed": 0, "logprobs": True}
    full, events = qwen.chat(**options), qwen.events(PATH, **options)
    for index, expected in enumerate([("a", "b"), ("", "c"), ("d", "")]):
        found = whole(full, index)
        assert (found["reasoning_content"], found["content"]) == expected
        assert fold(events, index) == found


@pytest.mark.parametrize("family", ["byte_level", "sentencepiece"])
def test_a_reply_without_reasoning_is_as_without_a_parser(family: str, tmp_path: Path) -> None:
    """Also where the tokenizer drops the first space of a text, and of what else could have begun it."""
    if family == "sentencepiece":
        write_sentencepiece(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        tokenizer = Tokenizer.from_directory(tmp_path)
        assert tokenizer.strips_leading_space
    else:
        tokenizer = byte_level_tokenizer()
    found = []
    for parser in ("none", "think"):
        with running(tokenizer, ServerConfig(reasoning_parser=parser)) as client:
            for text in ("the dog 日本", " the", "<th", "日"):
                client.say(text)
                for tokens_per_chunk in (1, 100):
                    client.engine.tokens_per_chunk = tokens_per_chunk
                    reply = whole(client.chat(logprobs=True, top_logprobs=20))
                    assert reply["content"]
                    check_spelling(reply)
                    found.append(reply)
    half = len(found) // 2
    assert found[:half] == found[half:]


def test_reasoning_reaches_the_template(qwen: Client) -> None:
    qwen.say("")
    messages = [*USER, {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}, *USER]
    assert qwen.post(PATH, messages=messages, reasoning_effort="low").status_code == 200
    prompt = qwen.tokenizer.decode_bytes(qwen.engine.submitted[-1].prompt_token_ids).decode()
    assert "<think>\n2 + 2\n</think>\n\n4<|im_end|>" in prompt
    assert prompt.endswith("assistant\n(low) ")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"reasoning_effort": "no"}, "reasoning_effort"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "reasoning_effort"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs"),
        *[
            ({"chat_template_kwargs": {name: []}}, "chat_template_kwargs")
            for name in ("messages", "tools", "documents")
        ],
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages"),
    ],
)
def test_what_contradicts_is_refused(qwen: Client, body: dict[str, Any], param: str) -> None:
    response = qwen.post(PATH, **{"messages": USER, **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert qwen.engine.submitted == []


def test_a_model_that_does_not_reason(client: Client) -> None:
    client.say("Hello")
    assert "reasoning_content" not in client.chat(reasoning_effort="none")["choices"][0]["message"]
    prompt = client.engine.submitted[-1].prompt_token_ids
    client.chat(reasoning_effort="high")
    assert client.engine.submitted[-1].prompt_token_ids == prompt


def test_the_parser_can_be_named() -> None:
    tokenizer = byte_level_tokenizer()
    with running(tokenizer, ServerConfig(reasoning_parser="mistral")) as client:
        client.say("[THINK]Hello[/THINK]there")
        found = whole(client.chat(logprobs=True))
        assert (found["reasoning_content"], found["content"]) == ("Hello", "there")
        check_spelling(found)
    tokenizer = byte_level_tokenizer(tags=TAGS)
    with running(tokenizer, ServerConfig(reasoning_parser="none")) as client:
        client.say("<think>Hello</think>")
        assert client.chat()["choices"][0]["message"]["content"] == "<think>Hello</think>"
    with pytest.raises(StartupError, match="think, mistral, none"):
        create_app(new_engine(), tokenizer, ServerConfig(reasoning_parser="other"), model_name=MODEL)


def test_the_openai_client(qwen: Client) -> None:
    qwen.say("<think>\nHello\n</think>\n\n日本")
    messages: Any = USER
    reply = qwen.sdk.chat.completions.create(model=MODEL, messages=messages, logprobs=True)
    message, logprobs = reply.choices[0].message.model_dump(), reply.choices[0].logprobs.model_dump()
    assert (message["reasoning_content"], message["content"]) == ("Hello", "日本")
    assert joined(logprobs["reasoning_content"])[0] == "Hello"
    stream = qwen.sdk.chat.completions.create(model=MODEL, messages=messages, logprobs=True, stream=True)
    deltas = [chunk.choices[0].delta.model_dump() for chunk in stream]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hello"
    assert "".join(delta["content"] or "" for delta in deltas) == "日本"
