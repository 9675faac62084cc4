"""Ids that a request names: those that it allows, those whose scores it wants, and those of words that it bans."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from tokenizers import normalizers

from neper.config import ServerConfig
from neper.server.requests.sampling_fields import distinct_ids
from neper.types import SamplingParams
from tests.helpers.calls import count_calls
from tests.helpers.scripted_engine import scores, top
from tests.server.conftest import END, VOCAB_SIZE, Client, byte_level_tokenizer, running
from tests.server.test_completions import fold, whole
from tests.server.test_errors import CHAT, COMPLETIONS, MESSAGES, check

FIXED: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "Hello"}}


def reply_to(client: Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, **FIXED[path], **body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def set_capabilities(client: Client, **changes: Any) -> None:
    client.engine.capabilities = msgspec.structs.replace(client.engine.capabilities, **changes)


def own_row(client: Client, place: int, token_id: int) -> Any:
    """What the engine scored the token number `place` of the last reply with."""
    request = client.engine.submitted[-1]
    return scores(len(request.prompt_token_ids) + place, token_id, client.engine.capabilities.vocab_size)


def restricted(row: Any, allowed: list[int]) -> dict[int, float]:
    """The distribution over some ids alone, best first."""
    best = max(float(row[i]) for i in allowed)
    total = math.fsum(math.exp(float(row[i]) - best) for i in allowed)
    order = sorted(set(allowed), key=lambda i: (-row[i], i))
    return {i: float(row[i]) - best - math.log(total) for i in order}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top_logprobs", [0, 3, 20])
def test_a_chat_lists_the_whole_allowed_set(client: Client, top_logprobs: int, stream: bool) -> None:
    ids = client.say("Hello there")
    allowed = [*ids, END, 40, 41, 383]
    body: dict[str, Any] = {"logprobs": True, "top_logprobs": top_logprobs, "allowed_token_ids": [*allowed, 40, 40]}
    body["return_tokens_as_token_ids"] = True
    if stream:
        entries = []
        for event in client.events(CHAT, **body):
            for choice in event["choices"]:
                entries += (choice["logprobs"] or {"content": []})["content"]
    else:
        entries = reply_to(client, CHAT, **body)["logprobs"]["content"]
    assert client.engine.submitted[-1].sampling.allowed_token_ids == tuple(allowed)
    assert len(entries) == len(ids)
    for place, (entry, token_id) in enumerate(zip(entries, ids, strict=True)):
        expected = restricted(own_row(client, place, token_id), allowed)
        found = {int(e["token"].removeprefix("token_id:")): e["logprob"] for e in entry["top_logprobs"]}
        assert list(found) == list(expected)
        assert found == pytest.approx(expected, abs=1e-5)
        assert entry["logprob"] == found[token_id]
        assert math.fsum(map(math.exp, found.values())) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("logprobs", [0, 2])
@pytest.mark.parametrize("name", ["allowed_token_ids", "logprob_token_ids"])
@pytest.mark.parametrize("echo", [False, True])
def test_legacy_dicts_hold_the_whole_set(client: Client, name: str, logprobs: int, echo: bool) -> None:
    ids = client.say(" answer")
    named = [*ids, END, 40] if name == "allowed_token_ids" else [40, 41, 383]
    prompt = "What is"
    prompt_ids = client.tokenizer.encode(prompt)
    body: dict[str, Any] = {"prompt": prompt, "logprobs": logprobs, "echo": echo, name: named}
    body["return_tokens_as_token_ids"] = True
    reply = whole(client.complete(**body))
    assert fold(client.events(COMPLETIONS, **body)) == reply
    tops, values = reply["top_logprobs"], reply["token_logprobs"]
    assert len(tops) == len(values) == len(reply["tokens"])
    if echo:
        # A prompt was not sampled, so no set was asked of it: its dicts hold the top N and the token.
        assert tops[0] is None
        for position, token_id in enumerate(prompt_ids[1:], 1):
            row = scores(position, token_id, VOCAB_SIZE)
            expected = {f"token_id:{i}" for i in (*top(row, logprobs), token_id)}
            assert tops[position].keys() == expected
            assert tops[position][f"token_id:{token_id}"] == values[position]
        tops, values = tops[len(prompt_ids) :], values[len(prompt_ids) :]
    for place, (token_id, found, value) in enumerate(zip([*ids, END], tops, values, strict=True)):
        row = own_row(client, place, token_id)
        if name == "allowed_token_ids":
            expected = restricted(row, named)
        else:
            expected = {i: float(row[i]) for i in [*named, token_id]}
        assert {int(key.removeprefix("token_id:")): v for key, v in found.items()} == pytest.approx(expected, abs=1e-5)
        assert value == found[f"token_id:{token_id}"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_named_ids_are_listed_beside_the_sampled_one(client: Client, path: str) -> None:
    """As in p(Yes), p(No), p(Maybe): some below the top 20, all at values of the full vocabulary."""
    [token_id] = client.say([5])
    named = [300, 40, 383, 300, 7]
    body: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    choice = reply_to(client, path, **body, max_tokens=1, logprob_token_ids=named, return_token_ids=True)
    assert client.engine.submitted[-1].logprobs.token_ids == (300, 40, 383, 7)
    assert client.engine.submitted[-1].sampling == SamplingParams(max_tokens=1)
    row = own_row(client, 0, token_id)
    assert not set(named) <= set(top(row, 20))
    assert choice["token_logprobs"] == [pytest.approx(float(row[token_id]))]
    order = sorted(set(named), key=lambda i: (-row[i], i))
    values = [pytest.approx(float(row[i])) for i in order]
    text = client.tokenizer.token_text
    if path == CHAT:
        [entry] = choice["logprobs"]["content"]
        assert entry["logprob"] == choice["token_logprobs"][0]
        assert [e["token"] for e in entry["top_logprobs"]] == [text(i) for i in order]
        assert [e["logprob"] for e in entry["top_logprobs"]] == values
    else:
        [found] = choice["logprobs"]["top_logprobs"]
        assert len(found) == 5
        assert found[""] == values[order.index(383)]
        assert choice["logprobs"]["token_logprobs"] == choice["token_logprobs"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_ids_named_for_a_prompt_are_listed_at_each_position(client: Client, path: str) -> None:
    named = [300, 40, 383, 300, 7]
    body: dict[str, Any] = {"prompt_logprobs": 2, "prompt_logprob_token_ids": named, "return_token_ids": True}
    reply = client.post(path, **FIXED[path], **body, n=2, max_tokens=1).json()
    choices = [reply] if path == CHAT else reply["choices"]
    assert client.engine.submitted[0].logprobs.prompt_logprob_token_ids == (300, 40, 383, 7)
    for choice in choices:
        first, *entries = choice["prompt_logprobs"]
        assert first is None
        for position, (token_id, entry) in enumerate(zip(choice["prompt_token_ids"][1:], entries, strict=True), 1):
            row = scores(position, token_id, VOCAB_SIZE)
            order = sorted({*named} - {token_id}, key=lambda i: (-row[i], i))
            assert [int(key) for key in entry] == [token_id, *order]
            assert [e["logprob"] for e in entry.values()] == [pytest.approx(float(row[int(i)])) for i in entry]
            ranks = [e["rank"] for e in entry.values()]
            assert ranks == [1 + int((row > row[token_id]).sum()), *[None] * len(order)]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_lists_the_ids_that_are_named_for_the_prompt(client: Client, stream: bool) -> None:
    client.say(" answer")
    named, prompt = [40, 41, 383], [5, 40, 6, 7]
    body: dict[str, Any] = {"prompt": prompt, "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True}
    body["prompt_logprob_token_ids"] = named
    reply = fold(client.events(COMPLETIONS, **body)) if stream else whole(client.complete(**body))
    tops = reply["top_logprobs"]
    for position, token_id in enumerate(prompt[1:], 1):
        row = scores(position, token_id, VOCAB_SIZE)
        assert tops[position] == {f"token_id:{i}": pytest.approx(float(row[i])) for i in {*named, token_id}}
    assert all(len(found) <= 2 for found in tops[len(prompt) :])


def test_a_sampled_token_outdoes_a_named_one_of_the_same_text(client: Client) -> None:
    # Ids from 330 on have no token: all of them read "".
    client.engine.reply = lambda request: [383]
    choice = reply_to(client, COMPLETIONS, logprobs=0, max_tokens=1, logprob_token_ids=[340, 341])
    row = own_row(client, 0, 383)
    assert row[383] > max(row[340], row[341])
    assert choice["logprobs"]["top_logprobs"] == [{"": choice["logprobs"]["token_logprobs"][0]}]
    assert choice["logprobs"]["token_logprobs"] == [pytest.approx(float(row[383]))]


def test_a_named_id_is_listed_though_nothing_is_left_of_it(client: Client) -> None:
    set_capabilities(client, logprobs_modes=("raw_logprobs", "processed_logprobs"))
    client.say([70])
    assert top(scores(6, 70, VOCAB_SIZE), 1) == [70]
    body: dict[str, Any] = {"prompt": [5] * 6, "max_tokens": 1, "top_k": 1, "logprobs_mode": "processed_logprobs"}
    body["return_tokens_as_token_ids"] = True
    named = client.complete(**body, logprobs=0, logprob_token_ids=[40, 70])["choices"][0]["logprobs"]
    assert named["top_logprobs"] == [{"token_id:70": 0.0, "token_id:40": -9999.0}]
    # A top k lists no token that cannot come.
    best = client.complete(**body, logprobs=5)["choices"][0]["logprobs"]
    assert best["top_logprobs"] == [{"token_id:70": 0.0}]


@pytest.mark.parametrize("size", [1024, 1025])
def test_a_large_set_lists_its_best(client: Client, size: int) -> None:
    set_capabilities(client, vocab_size=2000)
    allowed = list(range(1999, 1999 - size, -1))
    client.engine.reply = lambda request: [1500]
    options: dict[str, Any] = {"allowed_token_ids": allowed, "max_tokens": 1, "return_tokens_as_token_ids": True}
    choice = reply_to(client, COMPLETIONS, logprobs=3, **options)
    expected = restricted(own_row(client, 0, 1500), allowed)
    best = list(expected)[:3] if size > 1024 else list(expected)
    found = choice["logprobs"]["top_logprobs"][0]
    assert {int(key.removeprefix("token_id:")) for key in found} == {*best, 1500}
    assert found[f"token_id:{best[0]}"] == pytest.approx(expected[best[0]], abs=1e-5)
    entries = reply_to(client, CHAT, logprobs=True, top_logprobs=3, **options)["logprobs"]["content"]
    # Those ids have no text of their own, but their entries are there.
    assert len(entries[0]["top_logprobs"]) == len(best)
    if size > 1024:
        zero = reply_to(client, COMPLETIONS, logprobs=0, **options)
        assert zero["logprobs"]["top_logprobs"] == [{"token_id:1500": zero["logprobs"]["token_logprobs"][0]}]


BAD_IDS = [[], [-1], [VOCAB_SIZE], [10**30], [True], [1.0], ["5"], [None], [5, "5"], 5, "5", {}, True, [[5]], [5] * 385]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", ["allowed_token_ids", "logprob_token_ids", "prompt_logprob_token_ids"])
@pytest.mark.parametrize("value", BAD_IDS, ids=lambda value: str(value)[:20])
def test_wrong_ids(client: Client, path: str, name: str, value: Any) -> None:
    message = check(client.post(path, **FIXED[path], logprobs=1, prompt_logprobs=1, **{name: value}), 400, name)
    if value == [VOCAB_SIZE]:
        assert str(VOCAB_SIZE) in message
        assert "outside the model's 384 ids" in message
    assert client.engine.submitted == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(129)), "logprobs": 1}, "logprob_token_ids"),
        ({"logprob_token_ids": [5], "allowed_token_ids": [5], "logprobs": 1}, "logprob_token_ids"),
        ({"prompt_logprob_token_ids": [5], "logprobs": 1}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": list(range(129)), "prompt_logprobs": 1}, "prompt_logprob_token_ids"),
        *[
            ({"bad_words": value}, "bad_words")
            for value in ("x", 5, [5], [""], ["a", ""], ["x" * 101], ["x"] * 129, [None], {})
        ],
        ({"bad_words": ["a"], "allowed_token_ids": [67]}, "allowed_token_ids"),
        ({"allowed_token_ids": [END], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [END, 5], "min_tokens": 1, "stop_token_ids": [5]}, "allowed_token_ids"),
        ({"allowed_token_ids": [END, 67], "min_tokens": 1, "bad_words": ["a"]}, "allowed_token_ids"),
        ({"stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 1}, "stop_token_ids"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_sets_that_cannot_be(client: Client, path: str, body: dict[str, Any], param: str) -> None:
    assert client.tokenizer.encode("a") == [67]
    check(client.post(path, **FIXED[path], **body), 400, param)
    assert client.engine.submitted == []


@pytest.mark.parametrize(
    "body",
    [
        {"logprob_token_ids": [*range(128), 5, 6], "logprobs": 0},
        {"prompt_logprob_token_ids": [*range(128), 5, 6], "prompt_logprobs": 0},
        {"allowed_token_ids": [END], "min_tokens": 0},
        {"allowed_token_ids": [END], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [67, 70], "bad_words": ["a"]},
        {"allowed_token_ids": None, "logprob_token_ids": None, "bad_words": None},
        {"bad_words": []},
    ],
    ids=lambda value: str(value)[:70],
)
def test_sets_that_can_be(client: Client, body: dict[str, Any]) -> None:
    assert len(client.complete(**body, max_tokens=1)["choices"]) == 1


def test_what_an_engine_cannot_do(client: Client) -> None:
    set_capabilities(client, logprob_token_ids=False, sampling_fields=frozenset())
    for path in (CHAT, COMPLETIONS):
        check(
            client.post(path, **FIXED[path], logprobs=1, logprob_token_ids=[5]), 400, "logprob_token_ids", "unsupported"
        )
        named = {"prompt_logprobs": 1, "prompt_logprob_token_ids": [5]}
        check(client.post(path, **FIXED[path], **named), 400, "prompt_logprob_token_ids", "unsupported")
        for name, value in (("allowed_token_ids", [5]), ("bad_words", ["x"])):
            check(client.post(path, **FIXED[path], **{name: value}), 400, name, "unsupported")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bad_words_become_ids_with_and_without_a_space(client: Client, path: str) -> None:
    reply_to(client, path, bad_words=["dog", "forty-two", "dog"])
    encode = client.tokenizer.encode
    assert encode("dog") != encode(" dog")
    assert client.engine.submitted[-1].sampling.bad_words == tuple(
        tuple(encode(text)) for text in ("dog", " dog", "forty-two", " forty-two")
    )


def test_bad_words_that_cannot_come(client: Client) -> None:
    # A tokenizer can be wider than the logits: what needs an id beyond them needs no ban.
    encode = client.tokenizer.encode
    assert max(encode("dog")) < 280 <= max(encode(" dog"))
    set_capabilities(client, vocab_size=280)
    client.complete([5], bad_words=["dog"], max_tokens=1)
    assert client.engine.submitted[-1].sampling.bad_words == (tuple(encode("dog")),)


def test_a_bad_word_that_is_no_token() -> None:
    with running(byte_level_tokenizer(normalizers.Strip()), ServerConfig()) as client:
        for path in (CHAT, COMPLETIONS):
            message = check(client.post(path, **FIXED[path], bad_words=["x", "  "]), 400, "bad_words")
            assert "'  '" in message
        assert client.engine.submitted == []


def test_many_ids_take_few_calls() -> None:
    ids = list(range(0, 60_000, 3))
    assert len(distinct_ids(ids, 151_936, "allowed_token_ids")) == 20_000
    assert count_calls(lambda: distinct_ids(ids, 151_936, "allowed_token_ids")) < 20
