"""Chat completions against the engine's script: values, texts, shapes, streamed and whole."""

from __future__ import annotations

import asyncio
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from neper.seeds import choice_seed
from tests.helpers.chat_replies import fold, joined, whole
from tests.helpers.scripted_engine import scores, top
from tests.server.conftest import END, MODEL, VOCAB_SIZE, Client

PATH = "/v1/chat/completions"
REPLIES = ["Hello, world!", "日本語 naïve 😀👩‍👩‍👧 ok", "", "the answer <|im_start|> is"]


@pytest.mark.parametrize("text", REPLIES)
@pytest.mark.parametrize("tokens_per_chunk", [1, 3])
def test_entries_are_the_engine_s_numbers_and_spell_the_content(
    client: Client, text: str, tokens_per_chunk: int
) -> None:
    client.engine.tokens_per_chunk = tokens_per_chunk
    ids = client.say(text)
    reply = client.chat(logprobs=True, top_logprobs=5, skip_special_tokens=False)
    choice = reply["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    entries = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert joined(entries) == (text, text.encode())
    assert len(entries) == len(ids)
    start = reply["usage"]["prompt_tokens"]
    for position, (token_id, entry) in enumerate(zip(ids, entries, strict=True), start):
        row = scores(position, token_id, VOCAB_SIZE)
        assert entry["logprob"] == pytest.approx(row[token_id], rel=1e-6)
        assert bytes(entry["bytes"]) == client.tokenizer.token_bytes(token_id)
        expected = top(row, 5)
        assert [bytes(a["bytes"]) for a in entry["top_logprobs"]] == [client.tokenizer.token_bytes(i) for i in expected]
        assert [a["logprob"] for a in entry["top_logprobs"]] == pytest.approx([float(row[i]) for i in expected])


@pytest.mark.parametrize("text", REPLIES)
@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 100])
@pytest.mark.parametrize("stop", [None, ["wor", "語 n", "is not"], "👩‍👩"])
def test_a_stream_folds_to_the_full_reply(client: Client, text: str, tokens_per_chunk: int, stop: Any) -> None:
    client.engine.tokens_per_chunk = tokens_per_chunk
    client.say(text)
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "stop": stop, "return_token_ids": True}
    full = client.chat(**options)
    events = client.events(PATH, **options, stream_options={"include_usage": True})
    assert fold(events) == whole(full)
    assert events[-1]["usage"] == full["usage"]
    assert events[0]["prompt_token_ids"] == full["prompt_token_ids"]
    content = whole(full)["content"]
    assert joined(whole(full)["entries"]["content"]) == (content, content.encode())
    assert full["usage"]["completion_tokens"] == len(whole(full)["ids"]) == len(whole(full)["numbers"])


def test_the_chunks_of_a_stream(client: Client) -> None:
    client.say("Hello there")
    events = client.events(PATH, logprobs=True, stream_options={"include_usage": True})
    first, *middle, last, usage = events
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        assert event["id"] == first["id"]
        assert event["model"] == MODEL
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    for event in middle:
        (choice,) = event["choices"]
        text, data = joined(choice["logprobs"]["content"])
        assert (text, data) == (choice["delta"]["content"], choice["delta"]["content"].encode())
        assert choice["logprobs"]["refusal"] is None
        assert event["usage"] is None
    assert last["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(client.tokenizer.encode("Hello there")) + 1
    assert all("usage" not in event for event in client.events(PATH))


def test_without_logprobs(client: Client) -> None:
    client.say("Hello")
    assert client.chat()["choices"][0]["logprobs"] is None
    assert client.chat(logprobs=False)["choices"][0]["logprobs"] is None
    assert client.chat(logprobs=None, top_logprobs=None)["choices"][0]["logprobs"] is None
    assert all(c["logprobs"] is None for event in client.events(PATH) for c in event["choices"])
    assert all(request.logprobs.top_k is None for request in client.engine.submitted)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": 0}, 0),
        ({"logprobs": 7}, 7),
        ({"logprobs": 7, "top_logprobs": 7}, 7),
    ],
)
def test_how_many_alternatives(client: Client, options: dict[str, Any], count: int) -> None:
    client.say("Hello")
    (entry,) = client.chat(**options)["choices"][0]["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == count


def test_alternatives_are_decoded_after_the_same_held_bytes(client: Client) -> None:
    ids = client.say("日")
    entries = client.chat(logprobs=True, top_logprobs=20)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["", "", "日"]
    held = b""
    for token_id, entry in zip(ids, entries, strict=True):
        own = next((a for a in entry["top_logprobs"] if a["bytes"] == entry["bytes"]), None)
        assert own is None or own["token"] == entry["token"]
        held += client.tokenizer.token_bytes(token_id)
    completing = {tuple(a["bytes"]): a["token"] for a in entries[2]["top_logprobs"]}
    for data, text in completing.items():
        if len(data) == 1 and 0x80 <= data[0] < 0xC0:
            assert text == ("日".encode()[:2] + bytes(data)).decode()


def test_a_reply_cut_inside_a_character(client: Client) -> None:
    client.say("ok 😀")
    for k in (0, 2):
        entries = client.chat(logprobs=True, top_logprobs=k, max_tokens=4)["choices"][0]
        assert entries["message"]["content"] == "ok �"
        text, data = joined(entries["logprobs"]["content"])
        assert (text, data) == ("ok �", b"ok \xf0")
        assert entries["finish_reason"] == "length"


def test_a_stop_string_cuts_text_and_entries_at_the_same_place(client: Client) -> None:
    ids = client.say("the answer is STOP now")
    # "STOP" is spelled by more than one token, and the one before it also ends the text.
    for stop, text in (("er is ST", "the answ"), ("STOP", "the answer is "), (["zz", "now"], "the answer is STOP ")):
        reply = client.chat(logprobs=True, top_logprobs=2, stop=stop, return_token_ids=True)
        choice = reply["choices"][0]
        assert choice["message"]["content"] == text
        assert joined(choice["logprobs"]["content"]) == (text, text.encode())
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] in stop
        assert choice["token_ids"] == ids[: len(choice["token_ids"])]
        assert reply["usage"]["completion_tokens"] == len(choice["token_ids"]) == len(choice["token_logprobs"])
        assert client.engine.streams[-1].closed
    kept = client.chat(stop="STOP", include_stop_str_in_output=True)
    assert kept["choices"][0]["message"]["content"] == "the answer is STOP"


def test_the_engine_stops_at_a_stop_string(client: Client) -> None:
    client.say("go STOP " + "and on " * 20)
    client.engine.delay = 0.001
    reply = client.chat(stop="STOP", max_tokens=100)
    assert reply["choices"][0]["message"]["content"] == "go "
    assert client.engine.streams[-1].emitted < 12


def test_stop_token_ids_and_eos(client: Client) -> None:
    ids = client.say("Hello there")
    reply = client.chat(stop_token_ids=[ids[-1]], logprobs=True)
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[-1])
    assert joined(choice["logprobs"]["content"])[0] == choice["message"]["content"]
    assert reply["usage"]["completion_tokens"] == len(ids)
    assert client.engine.submitted[-1].eos_token_ids == (END,)
    going_on = client.chat(ignore_eos=True, max_tokens=len(ids) + 1)["choices"][0]
    assert going_on["finish_reason"] == "length"


def test_an_empty_reply(client: Client) -> None:
    client.say("")
    reply = client.chat(logprobs=True, top_logprobs=3, return_token_ids=True)
    choice = reply["choices"][0]
    assert choice["message"]["content"] == ""
    assert choice["logprobs"] == {"content": [], "refusal": None}
    assert choice["token_ids"] == [END]
    assert len(choice["token_logprobs"]) == 1
    assert reply["usage"]["completion_tokens"] == 1


def test_choices_with_seeds_of_their_own(client: Client) -> None:
    texts = ["Hello", "there", "日"]
    seeds = [choice_seed(7, 0, place) for place in range(3)]
    client.engine.reply = lambda request: client.tokenizer.encode(texts[seeds.index(request.sampling.seed)])
    options: dict[str, Any] = {"n": 3, "seed": 7, "logprobs": True, "top_logprobs": 1}
    full = client.chat(**options)
    assert [choice["index"] for choice in full["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in full["choices"]] == texts
    assert [request.sampling.seed for request in client.engine.submitted] == seeds
    assert full["usage"]["completion_tokens"] == sum(len(client.tokenizer.encode(text)) + 1 for text in texts)
    events = client.events(PATH, **options)
    for index in range(3):
        assert fold(events, index) == whole(full, index)
    client.engine.reply = lambda request: []
    for seed in (2**63 - 1, -(2**63)):
        client.chat(n=2, seed=seed)
        first, second = (request.sampling.seed for request in client.engine.submitted[-2:])
        assert first == seed
        assert 0 <= (second or -1) < 2**63


def test_prompt_logprobs_and_ids(client: Client) -> None:
    client.say("Hello")
    reply = client.chat(prompt_logprobs=2, return_token_ids=True, n=2)
    ids = reply["prompt_token_ids"]
    assert reply["usage"]["prompt_tokens"] == len(ids) == len(reply["prompt_logprobs"])
    assert reply["prompt_logprobs"][0] is None
    for position, (token_id, entry) in enumerate(zip(ids[1:], reply["prompt_logprobs"][1:], strict=True), 1):
        assert next(iter(entry)) == str(token_id)
        row = scores(position, token_id, VOCAB_SIZE)
        assert set(map(int, entry)) == {token_id, *top(row, 2)}
    part = client.chat(prompt_logprobs=2, prompt_logprobs_start=4)["prompt_logprobs"]
    assert part == [None] * 4 + reply["prompt_logprobs"][4:]


def test_the_template(client: Client) -> None:
    client.say("")
    messages = [
        {"role": "developer", "content": "Be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "so"},
    ]
    decode = client.tokenizer.decode_bytes
    body: dict[str, Any] = {"messages": messages, "max_tokens": 1}

    def prompt(**options: Any) -> str:
        assert client.post(PATH, **body, **options).status_code == 200
        return decode(client.engine.submitted[-1].prompt_token_ids).decode()

    begin = "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nso"
    assert prompt() == begin + "<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(chat_template_kwargs={"mood": "sad"}) == begin + "<|im_end|>\n<|im_start|>assistant\n(sad)"
    assert prompt(add_generation_prompt=False) == begin + "<|im_end|>\n"
    assert prompt(continue_final_message=True) == begin
    assert client.engine.submitted[-1].sampling.max_tokens == 1


def test_max_tokens_defaults_to_the_rest_of_the_context(client: Client) -> None:
    client.say("Hello")
    prompt_tokens = client.chat()["usage"]["prompt_tokens"]
    assert client.engine.submitted[-1].sampling.max_tokens == 128 - prompt_tokens
    for name in ("max_tokens", "max_completion_tokens"):
        assert client.chat(**{name: 128 - prompt_tokens})["choices"][0]["finish_reason"] == "stop"
    client.chat(max_tokens=5, max_completion_tokens=5)
    assert client.engine.submitted[-1].sampling.max_tokens == 5


def test_token_ids_in_place_of_texts(client: Client) -> None:
    ids = client.say("Hello 日")
    reply = client.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in ids]
    assert joined(entries)[1] == "Hello 日".encode()
    assert all(entry["top_logprobs"][0]["token"].startswith("token_id:") for entry in entries)


def test_sampling_fields_reach_the_engine(client: Client) -> None:
    client.say("")
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "top_n_sigma": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 1,
        "repetition_penalty": 1.5,
        "min_tokens": 1,
        "seed": 3,
        "ignore_eos": True,
    }
    client.chat(**given, logit_bias={"7": 100, "383": -100.0}, stop_token_ids=[383], max_tokens=2)
    sampling = client.engine.submitted[-1].sampling
    assert {name: getattr(sampling, name) for name in given} == given
    assert sampling.logit_bias == {7: 100.0, 383: -100.0}
    assert sampling.stop_token_ids == (383,)
    client.chat(top_k=-1)
    assert client.engine.submitted[-1].sampling.top_k == 0
    client.chat(
        user="me", metadata={"a": "b"}, store=False, service_tier="auto", safety_identifier="x", prompt_cache_key="y"
    )
    client.chat(response_format={"type": "text"}, echo=False, tools=None, reasoning_effort=None, logit_bias=None)


def test_what_the_engine_does_not_honour_is_refused(client: Client) -> None:
    client.say("")
    full = client.engine.capabilities
    client.engine.capabilities = type(full)(
        vocab_size=VOCAB_SIZE,
        max_model_len=128,
        max_logprobs=4,
        prompt_logprobs=False,
        sampling_fields=frozenset({"temperature"}),
    )
    for body, param in (
        ({"top_p": 0.5}, "top_p"),
        ({"seed": 1}, "seed"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logprobs": True, "top_logprobs": 5}, "top_logprobs"),
    ):
        response = client.post(PATH, messages=[{"role": "user", "content": "x"}], **body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    client.chat(temperature=0.3, top_p=1.0, presence_penalty=0, stop="x", skip_special_tokens=False)


def test_cached_tokens(client: Client) -> None:
    client.say("Hello")
    client.engine.num_cached_tokens = 4
    assert client.chat(n=2)["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def required_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with what OpenAI's types leave optional but its reference always shows made required."""
    always = {"logprobs", "bytes", "refusal", "top_logprobs", "usage", "finish_reason"}
    for part in [schema, *schema["$defs"].values()]:
        if "properties" in part and "usage" not in part.get("title", "").lower():
            part["required"] = sorted({*part.get("required", []), *(always & part["properties"].keys())})
    return schema


def test_replies_fit_openai_s_types(client: Client) -> None:
    client.say("Hello 日")
    schema = required_keys(ChatCompletion.model_json_schema())
    jsonschema.validate(client.chat(logprobs=True, top_logprobs=2), schema)
    jsonschema.validate(client.chat(), schema)
    chunks = required_keys(ChatCompletionChunk.model_json_schema())
    chunks["$defs"]["ChoiceDelta"].pop("required", None)
    for event in client.events(PATH, logprobs=True, top_logprobs=2, stream_options={"include_usage": True}):
        jsonschema.validate(event, chunks)


def test_the_openai_client(client: Client) -> None:
    client.say("Hello 😀!")
    messages: Any = [{"role": "user", "content": "Hi"}]
    reply = client.sdk.chat.completions.create(model=MODEL, messages=messages, logprobs=True, top_logprobs=3)
    content = reply.choices[0].message.content
    assert content == "Hello 😀!"
    assert reply.choices[0].logprobs is not None
    entries = reply.choices[0].logprobs.content or []
    assert b"".join(bytes(e.bytes or []) for e in entries) == content.encode()
    with client.sdk.chat.completions.create(model=MODEL, messages=messages, logprobs=True, stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == content

    async def ask() -> str:
        url = f"{client.server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
            stream = await sdk.chat.completions.create(model=MODEL, messages=messages, logprobs=True, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == content
