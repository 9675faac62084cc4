"""Completions against the engine's script: legacy arrays, echoes, batches, prompt scores."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import msgspec
import pytest
import tokenizers
from openai.types import Completion
from tokenizers import decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from neper.config import ServerConfig
from neper.seeds import choice_seed
from neper.text.tokenizer import Tokenizer
from tests.helpers.scripted_engine import scores, top
from tests.server.conftest import END, MODEL, VOCAB_SIZE, Client, byte_level_tokenizer, running
from tests.server.test_errors import check

PATH = "/v1/completions"
ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def fold(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    text, finish = "", None
    arrays: dict[str, list[Any]] = {name: [] for name in ARRAYS}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                text += choice["text"]
                finish = choice["finish_reason"] or finish
                for name in ARRAYS:
                    arrays[name] += (choice["logprobs"] or {}).get(name) or []
    return {"text": text, "finish": finish, **arrays}


def whole(reply: dict[str, Any], index: int = 0) -> dict[str, Any]:
    choice = reply["choices"][index]
    arrays = {name: (choice["logprobs"] or {}).get(name) or [] for name in ARRAYS}
    return {"text": choice["text"], "finish": choice["finish_reason"], **arrays}


def numbers(client: Client, ids: list[int], start: int, k: int) -> tuple[list[Any], list[Any]]:
    """What token_logprobs and the sets of values in top_logprobs must be, for tokens from a position on."""
    own, tops = [], []
    for position, token_id in enumerate(ids, start):
        row = scores(position, token_id, VOCAB_SIZE)
        own.append(pytest.approx(float(row[token_id]), rel=1e-6))
        tops.append({i: float(row[i]) for i in {token_id, *top(row, k)}})
    return own, tops


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["What is the", "日本 😀"])
def test_echo_shows_prompt_and_reply(client: Client, as_ids: bool, stream: bool, prompt: str) -> None:
    prompt_ids = client.tokenizer.encode(prompt)
    ids = client.say(" answer? 😀")
    body: dict[str, Any] = {
        "prompt": prompt_ids if as_ids else prompt,
        "echo": True,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
    }
    if stream:
        events = client.events(PATH, **body)
        assert events[0]["choices"][0]["text"] == prompt
        assert len(events[0]["choices"][0]["logprobs"]["tokens"]) == len(prompt_ids)
        reply = fold(events)
    else:
        reply = whole(client.complete(**body))
    assert reply["text"] == prompt + " answer? 😀"
    everything = [*prompt_ids, *ids, END]
    assert reply["tokens"] == [f"token_id:{i}" for i in everything]
    assert reply["token_logprobs"][0] is None
    assert reply["top_logprobs"][0] is None
    own, tops = numbers(client, everything[1:], 1, 2)
    assert reply["token_logprobs"][1:] == own
    for found, expected in zip(reply["top_logprobs"][1:], tops, strict=True):
        assert {int(key.removeprefix("token_id:")): value for key, value in found.items()} == pytest.approx(expected)


@pytest.mark.parametrize("text", ["Hello, world!", "日本 😀 ok", "the <|im_start|> answer"])
@pytest.mark.parametrize("tokens_per_chunk", [1, 4])
@pytest.mark.parametrize("options", [{"logprobs": 3}, {"logprobs": 0, "echo": True}, {"stop": "wor", "logprobs": 1}])
def test_a_stream_folds_to_the_full_reply(
    client: Client, text: str, tokens_per_chunk: int, options: dict[str, Any]
) -> None:
    client.engine.tokens_per_chunk = tokens_per_chunk
    client.say(text)
    full = client.complete("Say 日: ", **options)
    events = client.events(PATH, prompt="Say 日: ", **options, stream_options={"include_usage": True})
    assert fold(events) == whole(full)
    assert events[-1]["usage"] == full["usage"]
    assert all(event["object"] == "text_completion" for event in events)


def test_legacy_tokens_keys_and_offsets(client: Client) -> None:
    ids = client.say("Hi 😀 <|im_start|> ok")
    for echo in (False, True):
        choice = client.complete("日本", logprobs=2, echo=echo, max_tokens=50)["choices"][0]
        arrays = choice["logprobs"]
        skip = len(client.tokenizer.encode("日本")) if echo else 0
        offsets, tokens = arrays["text_offset"][skip:], arrays["tokens"][skip:]
        assert choice["text"] == ("日本" if echo else "") + "Hi 😀  ok"
        # A special token is listed, as itself, and is in no text; so is the end token.
        assert tokens == [
            "H",
            "i",
            " ",
            *[f"bytes:\\x{b:02x}" for b in "😀".encode()[:3]],
            "😀",
            " ",
            "<|im_start|>",
        ] + [client.tokenizer.token_text(i) for i in [*ids[9:], END]]
        assert offsets == [2, 3, 4, 5, 5, 5, 5, 6, 7, 7, *range(8, 8 + len(ids) - 10), 10]
        assert len({len(arrays[name]) for name in ARRAYS}) == 1
        for token, value, top_logprobs in zip(
            tokens, arrays["token_logprobs"][skip:], arrays["top_logprobs"][skip:], strict=True
        ):
            assert token in top_logprobs
            assert 2 <= len(top_logprobs) <= 3
            assert value <= top_logprobs[token]


def test_zero_logprobs_is_the_sampled_token_alone(client: Client) -> None:
    client.say("Hello")
    arrays = client.complete(logprobs=0)["choices"][0]["logprobs"]
    assert arrays["top_logprobs"] == [{t: v} for t, v in zip(arrays["tokens"], arrays["token_logprobs"], strict=True)]
    assert arrays["tokens"] == ["Hello", "<|im_end|>"]
    assert len(arrays["token_logprobs"]) == 2
    assert client.complete(logprobs=None)["choices"][0]["logprobs"] is None


def test_equal_keys_keep_the_best_value(client: Client) -> None:
    # Ids from 330 on have no token: all of them read "".
    client.engine.reply = lambda request: [383]
    arrays = client.complete(logprobs=20, max_tokens=1)["choices"][0]["logprobs"]
    row = scores(1, 383, VOCAB_SIZE)
    listed = [i for i in top(row, 20) if i >= 330]
    assert len(listed) > 1
    assert arrays["top_logprobs"][0][""] == pytest.approx(float(row[listed[0]]))
    assert len(arrays["top_logprobs"][0]) == 20 - len(listed) + 1


def test_greedy_value_and_maximum_are_the_same_text(client: Client) -> None:
    best = {p: top(scores(p, 0, VOCAB_SIZE), 1)[0] for p in range(40)}
    client.engine.reply = lambda request: [best[p] for p in range(1, 9)]
    response = client.post(PATH, prompt="Hello", logprobs=1, temperature=0, max_tokens=8)
    arrays = json.loads(response.text, parse_float=str)["choices"][0]["logprobs"]
    for value, top_logprobs in zip(arrays["token_logprobs"], arrays["top_logprobs"], strict=True):
        assert float(value) <= max(map(float, top_logprobs.values()))
        assert value in top_logprobs.values()


def test_an_evaluation_harness_s_request(client: Client) -> None:
    """lm-evaluation-harness sums token_logprobs[ctxlen:-1] of an echo with one token generated."""
    for reply in ("Hello", ""):
        client.say(reply)
        ids = client.tokenizer.encode("the quick brown fox")
        body = {"prompt": [ids], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        choice = client.complete(**body)["choices"][0]
        arrays = choice["logprobs"]
        assert {len(arrays[name]) for name in ARRAYS} == {len(ids) + 1}
        own, _ = numbers(client, ids[1:], 1, 1)
        assert arrays["token_logprobs"] == [None, *own, pytest.approx(arrays["token_logprobs"][-1])]


def test_echo_without_generation(client: Client) -> None:
    client.say("never")
    for logprobs in (None, 1):
        reply = client.complete("Hello world", echo=True, max_tokens=0, logprobs=logprobs)
        choice = reply["choices"][0]
        assert choice["text"] == "Hello world"
        assert choice["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == 0
        count = len(client.tokenizer.encode("Hello world"))
        assert reply["usage"]["prompt_tokens"] == count
        assert logprobs is None or len(choice["logprobs"]["tokens"]) == count
    events = client.events(PATH, prompt="Hello world", echo=True, max_tokens=0, logprobs=1)
    assert fold(events) == whole(reply)
    whole_context = list(range(100, 228))
    assert client.complete(whole_context, echo=True, max_tokens=0)["usage"]["prompt_tokens"] == 128


@pytest.mark.parametrize("n", [1, 2])
def test_batches_are_prompt_major(client: Client, n: int) -> None:
    prompts = ["Hello", "日本", "the answer"]
    texts = {tuple(client.tokenizer.encode(prompt)): f" {place}" for place, prompt in enumerate(prompts)}
    places = {choice_seed(5, place, j): j for place in range(3) for j in range(n)}
    client.engine.reply = lambda request: client.tokenizer.encode(
        f"{texts[tuple(request.prompt_token_ids)]} {places[request.sampling.seed]}"
    )
    for given in (prompts, [list(ids) for ids in texts]):
        options: dict[str, Any] = {"n": n, "seed": 5, "logprobs": 1, "echo": True}
        reply = client.complete(given, **options)
        assert [choice["index"] for choice in reply["choices"]] == list(range(3 * n))
        expected = [f"{prompt} {place} {j}" for place, prompt in enumerate(prompts) for j in range(n)]
        assert [choice["text"] for choice in reply["choices"]] == expected
        assert reply["usage"]["prompt_tokens"] == sum(map(len, texts))
        events = client.events(PATH, prompt=given, **options)
        for index in range(3 * n):
            assert fold(events, index) == whole(reply, index)


def test_prompt_logprobs(client: Client) -> None:
    prompt = "the 日 fox"
    ids = client.tokenizer.encode(prompt)
    client.say(" ok")
    reply = client.complete([prompt, "Hello world"], prompt_logprobs=3, logprobs=1, echo=True, return_token_ids=True)
    choice = reply["choices"][0]
    assert len(reply["choices"][1]["prompt_logprobs"]) == len(client.tokenizer.encode("Hello world"))
    assert choice["prompt_token_ids"] == ids
    first, *entries = choice["prompt_logprobs"]
    assert first is None
    for position, (token_id, entry) in enumerate(zip(ids[1:], entries, strict=True), 1):
        row = scores(position, token_id, VOCAB_SIZE)
        assert list(map(int, entry)) == [token_id, *[i for i in top(row, 3) if i != token_id]]
        for i, shown in entry.items():
            assert shown["logprob"] == pytest.approx(float(row[int(i)]))
            assert shown["rank"] == 1 + int((row > row[int(i)]).sum())
    texts = [entry[str(token_id)]["decoded_token"] for token_id, entry in zip(ids[1:], entries, strict=True)]
    assert client.tokenizer.token_text(ids[0]) + "".join(texts) == prompt
    assert texts.count("") == 2
    # The same scores, for the arrays with their own N.
    assert max(len(top_logprobs) for top_logprobs in choice["logprobs"]["top_logprobs"][1:]) <= 2
    assert choice["logprobs"]["token_logprobs"][1 : len(ids)] == [
        e[str(i)]["logprob"] for i, e in zip(ids[1:], entries, strict=True)
    ]
    alone = client.complete(prompt, prompt_logprobs=0, max_tokens=1)["choices"][0]
    assert [len(entry) for entry in alone["prompt_logprobs"][1:]] == [1] * (len(ids) - 1)


def test_prompt_logprobs_from_a_position_on(client: Client) -> None:
    ids = client.tokenizer.encode("the 日 fox jumps")
    client.say(" ok")
    asked: dict[str, Any] = {"prompt": ids, "prompt_logprobs": 2, "echo": True, "logprobs": 1, "max_tokens": 1}
    whole = client.complete(**asked)["choices"][0]
    for start in (0, 1, 2, 3, len(ids)):
        client.engine.submitted.clear()
        part = client.complete(**asked, prompt_logprobs_start=start)["choices"][0]
        assert client.engine.submitted[0].logprobs.prompt_start == max(1, start)
        assert part["prompt_logprobs"] == [None] * start + whole["prompt_logprobs"][start:]
        for name in ("token_logprobs", "top_logprobs"):
            assert part["logprobs"][name] == [None] * start + whole["logprobs"][name][start:]
        assert part["logprobs"]["tokens"] == whole["logprobs"]["tokens"]
    events = client.events(PATH, prompt=ids, echo=True, logprobs=1, max_tokens=1, prompt_logprobs_start=3)
    assert fold(events)["token_logprobs"][:4] == [None] * 3 + whole["logprobs"]["token_logprobs"][3:4]
    beyond = check(client.post(PATH, **asked, prompt_logprobs_start=len(ids) + 1), 400, "prompt_logprobs_start")
    assert {str(len(ids)), str(len(ids) + 1)} <= set(re.findall(r"\d+", beyond))
    for wrong in ({"prompt": ids, "prompt_logprobs_start": 2}, {**asked, "prompt_logprobs_start": -1}):
        check(client.post(PATH, **wrong), 400, "prompt_logprobs_start")


@pytest.mark.parametrize("options", [{"echo": True, "logprobs": 2}, {"prompt_logprobs": 1, "logprobs": 1}])
def test_the_choices_of_a_prompt_share_its_scores(client: Client, options: dict[str, Any]) -> None:
    client.say(" ok")
    prompts = ["the quick brown fox", "日本 naïve"]
    alone = [client.complete(prompt, **options)["choices"][0] for prompt in prompts]
    client.engine.submitted.clear()
    reply = client.complete(prompts, n=3, seed=5, **options)
    asked = [request.logprobs.prompt_top_k is not None for request in client.engine.submitted]
    assert asked == [True, False, False] * 2
    for choice in reply["choices"]:
        assert choice == alone[choice["index"] // 3] | {"index": choice["index"]}
    if "echo" in options:
        # A stream shows each choice as it comes, so that each has the prompt scored.
        events = client.events(PATH, prompt=prompts, n=3, seed=5, **options)
        for index in range(6):
            assert fold(events, index) == whole(reply, index)


def test_all_ids_are_listed_where_there_is_no_cap(client: Client) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        message = check(client.post(PATH, prompt="x", **{name: -1}), 400, name)
        assert {"-1", "20"} <= set(re.findall(r"-?\d+", message))
    client.engine.capabilities = msgspec.structs.replace(client.engine.capabilities, max_logprobs=-1)
    [token_id] = client.say([70])
    ids = client.tokenizer.encode("ab cd")
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "echo": True, "return_tokens_as_token_ids": True}
    body |= {"logprobs": -1, "prompt_logprobs": -1}
    choice = client.complete(**body)["choices"][0]
    tops = choice["logprobs"]["top_logprobs"]
    for position, actual in enumerate([*ids[1:], token_id], 1):
        row = scores(position, actual, VOCAB_SIZE)
        expected = {f"token_id:{i}": pytest.approx(float(value)) for i, value in enumerate(row)}
        assert tops[position] == expected
        assert list(tops[position]) == [f"token_id:{i}" for i in top(row, VOCAB_SIZE)]
    for position, entry in enumerate(choice["prompt_logprobs"][1:], 1):
        row = scores(position, ids[position], VOCAB_SIZE)
        assert sorted(map(int, entry)) == list(range(VOCAB_SIZE))
        assert all(shown["rank"] == 1 + (row > row[int(i)]).sum() for i, shown in entry.items())
    # Of two numbers, each gets its own.
    for first, second in ((-1, 2), (2, -1)):
        choice = client.complete(**{**body, "logprobs": first, "prompt_logprobs": second})["choices"][0]
        sizes = [VOCAB_SIZE if k < 0 else k + 1 for k in (first, second)]
        assert sizes[0] - 1 <= len(choice["logprobs"]["top_logprobs"][1]) <= sizes[0]
        assert sizes[1] - 1 <= len(choice["prompt_logprobs"][1]) <= sizes[1]
    assert len(client.complete("x", logprobs=VOCAB_SIZE, max_tokens=1)["choices"]) == 1
    client.engine.submitted.clear()
    for name in ("logprobs", "prompt_logprobs"):
        for value in (VOCAB_SIZE + 1, 10**30):
            message = check(client.post(PATH, prompt="x", **{name: value}), 400, name)
            assert {str(value), str(VOCAB_SIZE)} <= set(re.findall(r"\d+", message))
        check(client.post(PATH, prompt="x", **{name: -2}), 400, name)
    assert client.engine.submitted == []


def test_a_gap_between_two_texts_is_not_filled(client: Client) -> None:
    message = check(client.post(PATH, prompt="x", suffix="y"), 400, "suffix", "unsupported")
    assert "suffix is not supported" in message
    assert client.post(PATH, prompt="x", suffix="").status_code == 200
    assert client.complete("x", suffix=None)["choices"][0]["finish_reason"] == "stop"


def test_best_of_must_be_n(client: Client) -> None:
    check(client.post(PATH, prompt="x", best_of=2), 400, "best_of", "unsupported")
    check(client.post(PATH, prompt="x", best_of=1, n=2), 400, "best_of", "unsupported")
    assert len(client.complete("x", best_of=2, n=2)["choices"]) == 2
    assert len(client.complete("x", best_of=1)["choices"]) == 1


FORMS: list[tuple[str, Any]] = [
    ("response_format", {"type": "json_object"}),
    ("structured_outputs", {"choice": ["yes", "no"]}),
]


@pytest.mark.parametrize(("name", "value"), FORMS, ids=str)
def test_a_form_reaches_the_engine_as_a_grammar(client: Client, name: str, value: Any) -> None:
    client.complete("x", **{name: value}, n=2)
    grammars = [request.sampling.grammar for request in client.engine.submitted]
    asyncio.run(client.server.service.trials.check(grammars[0], name))
    assert grammars[0] == grammars[1]
    client.engine.submitted.clear()
    check(client.post(PATH, prompt="x", **{name: value}, ignore_eos=True), 400, "ignore_eos")
    fields = client.engine.capabilities.sampling_fields - {"grammar"}
    client.engine.capabilities = msgspec.structs.replace(client.engine.capabilities, sampling_fields=fields)
    check(client.post(PATH, prompt="x", **{name: value}), 400, name, "unsupported")
    assert client.engine.submitted == []
    client.complete("x", response_format={"type": "text"}, ignore_eos=True, max_tokens=2)
    assert client.engine.submitted[-1].sampling.grammar is None


def test_a_form_that_cannot_be_compiled_names_its_field(client: Client) -> None:
    check(client.post(PATH, prompt="x", structured_outputs={"regex": "("}), 400, "structured_outputs")
    schema = {"type": "string", "pattern": "("}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    check(client.post(PATH, prompt="x", response_format=form), 400, "response_format")
    assert client.engine.submitted == []


def test_a_prompt_of_one_token(client: Client) -> None:
    client.say("x")
    choice = client.complete("a", echo=True, logprobs=1, prompt_logprobs=1)["choices"][0]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_an_id_prompt_that_is_no_text(client: Client) -> None:
    client.say("x")
    ids = client.tokenizer.encode("a😀", add_special_tokens=False)[:-1]
    choice = client.complete([*ids, 383], echo=True, logprobs=1)["choices"][0]
    assert choice["text"] == "a�x"
    assert choice["logprobs"]["text_offset"][-2:] == [2, 3]


def test_token_ids(client: Client) -> None:
    ids = client.say("Hello")
    for stream in (False, True):
        if stream:
            choices = [
                event["choices"][0] for event in client.events(PATH, prompt="日", logprobs=0, return_token_ids=True)
            ]
        else:
            choices = client.complete("日", logprobs=0, return_token_ids=True)["choices"]
        assert choices[0]["prompt_token_ids"] == client.tokenizer.encode("日")
        assert [i for choice in choices for i in choice["token_ids"]] == [*ids, END]
        assert sum(len(choice["token_logprobs"]) for choice in choices) == 2


def test_max_tokens_defaults_to_16_or_what_is_left(client: Client) -> None:
    client.say("a" * 100)
    assert client.complete()["usage"]["completion_tokens"] == 16
    assert client.complete([5] * 120)["usage"]["completion_tokens"] == 8


def test_replies_fit_openai_s_types(client: Client) -> None:
    client.say("Hello 日")
    schema = Completion.model_json_schema()
    for part in schema["$defs"].values():
        if part["title"] == "CompletionChoice":
            part["required"] = sorted({*part["required"], "logprobs"})
    jsonschema.validate(client.complete(logprobs=2), schema)
    # The type says str for each reason, but in a stream all but the last are null.
    schema["$defs"]["CompletionChoice"]["properties"].pop("finish_reason")
    for event in client.events(PATH, prompt="x", logprobs=2):
        jsonschema.validate(event, schema)
    reply = client.sdk.completions.create(model=MODEL, prompt="x", logprobs=2, echo=True)
    assert reply.choices[0].text == "xHello 日"


def sentencepiece_tokenizer() -> Tokenizer:
    """As Llama 2's: BOS added, a space put before a text and dropped again."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "▁ab"]
    merges = [("▁", "a"), ("▁", "b"), ("▁a", "b")]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, template)


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_spelled_by_its_tokens_where_the_tokenizer_normalises(stream: bool) -> None:
    with running(byte_level_tokenizer(normalizers.NFC()), ServerConfig()) as client:
        client.say("!")
        body = {"prompt": "cafe\u0301 x", "echo": True, "logprobs": 0}
        shown = fold(client.events(PATH, **body)) if stream else whole(client.complete(**body))
        assert shown["text"] == "caf\u00e9 x!"
        assert shown["text_offset"][-2:] == [6, 7]


def test_a_tokenizer_that_adds_bos_and_a_space() -> None:
    tokenizer = sentencepiece_tokenizer()
    with running(tokenizer, ServerConfig()) as client:
        a, b = 260, 263  # "a", "▁b"
        a_word = 262  # "▁a"
        client.engine.reply = lambda request: [b, a]
        choice = client.complete("a b", echo=True, logprobs=1)["choices"][0]
        assert client.engine.submitted[-1].prompt_token_ids == [1, a_word, b]
        assert choice["text"] == "a b ba"
        assert choice["logprobs"]["tokens"] == ["<s>", "a", " b", " b", "a", "</s>"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 3, 5, 6]
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert None not in choice["logprobs"]["token_logprobs"][1:]
        # Ids get no BOS.
        assert client.complete([a_word, b], echo=True)["choices"][0]["text"] == "a b ba"
        assert client.engine.submitted[-1].prompt_token_ids == [a_word, b]
        # A chat reply is a text of its own, so entry and alternatives lose the space as the text does.
        entries = client.chat(logprobs=True, top_logprobs=20)["choices"][0]
        assert entries["message"]["content"] == "ba"
        first = entries["logprobs"]["content"][0]
        assert (first["token"], first["bytes"]) == ("b", [98])
        client.engine.reply = lambda request: [b] * 3
        for place, entry in enumerate(client.chat(logprobs=True, top_logprobs=20)["choices"][0]["logprobs"]["content"]):
            for other in entry["top_logprobs"]:
                assert bytes(other["bytes"]).decode("utf-8", "replace") == other["token"] or not other["token"]
                assert not (place == 0 and other["token"] in (" a", " b", " ab"))
