"""Engines of others, which can do less: what is refused by name, what comes without scores, and forms checked after."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from neper.config import ServerConfig
from neper.engine.interface import Capabilities
from neper.errors import StartupError
from neper.seeds import choice_seed
from neper.server.app import create_app
from neper.server.schemas.chat import ChatCompletion
from neper.server.service import Service
from neper.text.json_form import JsonForm
from neper.text.tokenizer import Tokenizer
from neper.types import PackedRows
from tests.helpers.chat_replies import check_spelling, fold, whole
from tests.helpers.invariants import check_reply
from tests.server import test_responses as responses
from tests.server.conftest import MODEL, VOCAB_SIZE, Client, new_engine
from tests.server.test_errors import CHAT, COMPLETIONS, MESSAGES, check, check_failed
from tests.server.test_named_ids import set_capabilities
from tests.server.test_tool_calls import TOOLS, call

RESPONSES = "/v1/responses"
FIXED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "Hello there"},
    RESPONSES: {"input": "Hello"},
}
HONOURED = """
    max_tokens temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty
    allowed_token_ids stop stop_token_ids include_stop_str_in_output skip_special_tokens
"""
FOREIGN: dict[str, Any] = {
    "logprobs": None,
    "logprob_token_ids": False,
    "prompt_logprobs": False,
    "sampling_fields": frozenset(HONOURED.split()),
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
OBJECT = {"type": "json_object"}
SCORED: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]


@pytest.fixture
def foreign(client: Client) -> Client:
    set_capabilities(client, **FOREIGN)
    return client


@pytest.fixture
def thinker(qwen: Client) -> Client:
    """A model that reasons and calls tools."""
    set_capabilities(qwen, **FOREIGN)
    return qwen


def post(client: Client, path: str, **body: Any) -> httpx.Response:
    return client.post(path, **{**FIXED[path], **body})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *[
        (path, body, next(iter(body)))
        for path in (CHAT, COMPLETIONS, RESPONSES)
        for body in (
            {"ignore_eos": True},
            {"min_tokens": 1},
            {"logit_bias": {"5": 1}},
            {"bad_words": ["Hello"]},
            {"logprobs_mode": "tempered_logprobs"},
            {"logprobs_mode": "processed_logprobs"},
            {"structured_outputs": {"regex": "a"}},
            {"structured_outputs": {"json": {}}},
        )
    ],
    (CHAT, {"logprob_token_ids": [5], "logprobs": True}, "logprob_token_ids"),
    (COMPLETIONS, {"logprob_token_ids": [5], "logprobs": 0}, "logprob_token_ids"),
    (CHAT, {"prompt_logprobs": 0}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 1}, "prompt_logprobs"),
    (COMPLETIONS, {"echo": True, "logprobs": 0}, "echo"),
    (COMPLETIONS, {"response_format": OBJECT}, "response_format"),
    (COMPLETIONS, {"response_format": FORM}, "response_format"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_it_lacks_is_refused_by_name(foreign: Client, path: str, body: dict[str, Any], param: str) -> None:
    check(post(foreign, path, **body), 400, param, "unsupported")
    assert foreign.engine.submitted == []
    foreign.say("Hello")
    neutral = {name: None if name != "min_tokens" else 0 for name in body}
    assert post(foreign, path, **neutral).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, "tool_choice"),
        ({"tools": STRICT}, "tools"),
        ({"tools": STRICT, "response_format": FORM}, "tools"),
    ],
)
def test_calls_it_cannot_be_held_to(thinker: Client, body: dict[str, Any], param: str) -> None:
    response = post(thinker, CHAT, **{"tools": TOOLS, **body})
    assert "this engine cannot constrain what it samples" in check(response, 400, param, "unsupported")
    assert thinker.engine.submitted == []


def test_a_view_that_it_lacks(tokenizer: Tokenizer) -> None:
    engine = new_engine()
    engine.capabilities = msgspec.structs.replace(engine.capabilities, **FOREIGN)
    with pytest.raises(StartupError, match="tempered_logprobs"):
        create_app(engine, tokenizer, ServerConfig(logprobs_mode="tempered_logprobs"), model_name=MODEL)


def test_what_works(foreign: Client, thinker: Client) -> None:
    ids = foreign.say("Hello there STOP and go")
    reply = foreign.complete("Hello", echo=True, stop="STOP", n=2, max_tokens=50)
    assert [choice["text"] for choice in reply["choices"]] == ["HelloHello there "] * 2
    options: dict[str, Any] = {
        "logprobs": 2,
        "return_token_ids": True,
        "temperature": 0.5,
        "allowed_token_ids": [*ids, 2],
        "seed": 1,
        "stop_token_ids": [ids[3]],
    }
    reply = foreign.complete(**options)
    check_reply("completions", {**options, "prompt": "Hello"}, reply)
    assert reply["choices"][0]["token_ids"] == ids[:4]
    request = foreign.engine.submitted[-1]
    assert (request.sampling.seed, request.logprobs.top_k) == (1, 2)
    thinker.say(f"<think>so</think>Well {call('clock', '{}')}")
    found = whole(thinker.chat(tools=TOOLS, **SCORED))
    assert (found["reasoning_content"], found["content"], found["calls"]) == ("so", "Well", [("clock", "{}")])
    check_spelling(found)
    assert fold(thinker.events(CHAT, tools=TOOLS, **SCORED)) == found


# No scores


@pytest.mark.parametrize("logprobs", [True, 0, 2])
def test_scores_that_are_known_not_to_come(foreign: Client, logprobs: bool | int) -> None:
    set_capabilities(foreign, logprobs=False, max_logprobs=0)
    for path in (CHAT, COMPLETIONS):
        if path == CHAT or logprobs is not True:
            message = check(post(foreign, path, logprobs=logprobs), 400, "logprobs", "unsupported")
            assert "this engine sends no logprobs" in message
    check(post(foreign, CHAT, logprobs=True, top_logprobs=3), 400, "logprobs", "unsupported")
    check(post(foreign, COMPLETIONS, logprobs=1, echo=True), 400, "logprobs", "unsupported")
    message = check(post(foreign, RESPONSES, include=[responses.LOGPROBS]), 400, "include", "unsupported")
    assert "this engine sends no logprobs" in message
    assert foreign.engine.submitted == []
    foreign.say("Hello")
    for path in (CHAT, COMPLETIONS):
        reply = post(foreign, path, logprobs=None if path == COMPLETIONS else False).json()
        assert reply["choices"][0]["logprobs"] is None
    assert responses.respond(foreign)["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_scores_that_turn_out_not_to_come_after_the_request_was_checked(
    foreign: Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another request's first token, say, while this one's prompt was encoded."""
    foreign.engine.garble = lambda packed: PackedRows.pack(packed.token_ids)
    foreign.say("Hello")
    enter = Service.enter

    def enter_late(service: Service, generation: Any) -> None:
        set_capabilities(foreign, logprobs=False)
        enter(service, generation)

    monkeypatch.setattr(Service, "enter", enter_late)
    reply = post(foreign, path, logprobs=1, max_tokens=3).json()
    assert reply["choices"][0]["logprobs"] is None
    check(post(foreign, path, logprobs=1), 400, "logprobs", "unsupported")


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
def test_scores_that_do_not_come(foreign: Client, tokens_per_chunk: int) -> None:
    foreign.engine.tokens_per_chunk = tokens_per_chunk
    foreign.engine.garble = lambda packed: PackedRows.pack(packed.token_ids)
    ids = foreign.say("the answer 日本 😀")
    free = whole(foreign.chat(return_token_ids=True))
    full = foreign.chat(**SCORED)
    assert full["choices"][0]["logprobs"] is None
    assert "token_logprobs" not in full["choices"][0]
    msgspec.json.decode(json.dumps(full), type=ChatCompletion)
    assert whole(full) == free
    assert free["ids"] == [*ids, 2]
    events = foreign.events(CHAT, **SCORED)
    assert {choice["logprobs"] for event in events for choice in event["choices"]} == {None}
    assert not any("token_logprobs" in choice for event in events for choice in event["choices"])
    assert fold(events) == free

    options: dict[str, Any] = {"return_token_ids": True, "max_tokens": 50, "n": 2}
    plain = foreign.complete(**options)["choices"]
    assert foreign.complete(logprobs=2, **options)["choices"] == plain
    texts = ["", ""]
    for event in foreign.events(COMPLETIONS, prompt="Hello", logprobs=2, **options):
        for choice in event["choices"]:
            assert choice["logprobs"] is None
            assert "token_logprobs" not in choice
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in plain]

    plain_response = responses.respond(foreign)
    assert (
        responses.nameless(responses.respond(foreign, **responses.INCLUDE))["output"]
        == (responses.nameless(plain_response)["output"])
    )
    assert plain_response["output"][0]["content"][0]["logprobs"] == []
    streamed = responses.fold(responses.events(foreign, **responses.INCLUDE))
    assert streamed["output"][0]["content"] == plain_response["output"][0]["content"]


def test_scores_of_one_choice(foreign: Client) -> None:
    """Each choice by itself: the first token of one shows nothing of another."""
    foreign.say("the answer")
    count = iter(range(100))
    foreign.engine.tokens_per_chunk = 100
    foreign.engine.garble = lambda packed: PackedRows.pack(packed.token_ids) if next(count) % 2 else packed
    for path in (CHAT, COMPLETIONS):
        body = SCORED if path == CHAT else {"logprobs": 2, "return_token_ids": True}
        first, second = post(foreign, path, n=2, **body).json()["choices"]
        assert first["logprobs"] is not None
        assert len(first["token_logprobs"]) == len(first["token_ids"])
        assert second["logprobs"] is None
        assert "token_logprobs" not in second


@pytest.mark.parametrize("scored_first", [True, False])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_scores_of_some_tokens_are_an_error(foreign: Client, path: str, scored_first: bool) -> None:
    foreign.say("the answer is here")
    body = {CHAT: SCORED, COMPLETIONS: {"logprobs": 2}, RESPONSES: responses.INCLUDE}[path]
    count = iter(range(100))
    foreign.engine.garble = lambda packed: (
        packed if (next(count) == 0) == scored_first else PackedRows.pack(packed.token_ids)
    )
    check(post(foreign, path, **body), 500, None, "engine_error")


def test_scores_that_nobody_asked_for_are_an_error(foreign: Client) -> None:
    foreign.say("the answer")
    foreign.engine.garble = lambda packed: PackedRows.pack(packed.token_ids, np.full(len(packed), -1.0))
    check(post(foreign, CHAT), 500, None, "engine_error")


# Forms that are checked after

JSON = '{"a": 5, "b": "日本 😀"}'
SAID = [
    JSON,
    f"\n {JSON} \n",
    f"Here you are:\n```json\n{JSON}\n```\nAnything else?",
    f"Hello (😀){JSON}. The answer is {{5}}",
    f'{{"a": "no"}} STOP {JSON}',
]


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 200])
@pytest.mark.parametrize("form", [FORM, OBJECT], ids=["schema", "object"])
def test_the_content_is_the_json(foreign: Client, said: str, tokens_per_chunk: int, form: dict[str, Any]) -> None:
    foreign.engine.tokens_per_chunk = tokens_per_chunk
    ids = foreign.say(said)
    expected = '{"a": "no"}' if form is OBJECT and "no" in said else JSON
    full = foreign.chat(response_format=form, **SCORED)
    found = whole(full)
    assert (found["content"], found["finish"], found["ids"]) == (expected, "stop", [*ids, 2])
    check_spelling(found)
    check_reply("chat", SCORED, full)
    assert full["choices"][0]["message"].keys() == {"role", "content", "refusal"}
    events = foreign.events(CHAT, response_format=form, **SCORED)
    assert fold(events) == found
    # In one piece, with everything else.
    assert [c["delta"]["content"] for e in events for c in e["choices"] if c["delta"].get("content")] == [expected]
    plain = whole(foreign.chat(response_format=form))
    assert plain == {**found, "entries": {key: [] for key in found["entries"]}, "ids": [], "numbers": []}
    request = foreign.engine.submitted[-1]
    assert request.sampling.grammar is None


def test_entries_keep_their_numbers(foreign: Client) -> None:
    foreign.say(f"Hello {JSON} there")
    plain = whole(foreign.chat(**SCORED))["entries"]["content"]
    found = whole(foreign.chat(response_format=OBJECT, **SCORED))["entries"]["content"]
    start = next(
        place
        for place in range(len(plain))
        if plain[place]["logprob"] == found[0]["logprob"] and "{" in plain[place]["token"]
    )
    assert found[1:-1] == plain[start + 1 : start + len(found) - 1]
    last = plain[start + len(found) - 1]
    assert (found[-1]["logprob"], found[-1]["top_logprobs"]) == (last["logprob"], last["top_logprobs"])


def test_without_scores_too(foreign: Client) -> None:
    foreign.engine.garble = lambda packed: PackedRows.pack(packed.token_ids)
    ids = foreign.say(f"Hello {JSON} there")
    full = foreign.chat(response_format=OBJECT, **SCORED)
    assert (whole(full)["content"], whole(full)["ids"]) == (JSON, [*ids, 2])
    assert full["choices"][0]["logprobs"] is None
    assert fold(foreign.events(CHAT, response_format=OBJECT, **SCORED)) == whole(full)


@pytest.mark.parametrize(
    ("said", "form", "problem"),
    [
        ("Hello there", OBJECT, "is not JSON: Expecting value at character 0"),
        ("[1]", OBJECT, "does not follow the schema: $ (type): [1] is not of type 'object'"),
        ('{"a": "x"}', FORM, "does not follow the schema: $.a (properties.a.type): 'x' is not of type 'integer'"),
        ("{}", FORM, "'a' is a required property"),
        ("", FORM, "is empty, and should be JSON"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_of_another_form(foreign: Client, said: str, form: dict[str, Any], problem: str, stream: bool) -> None:
    foreign.say(said)
    for options in ({}, SCORED):
        response = post(foreign, CHAT, response_format=form, stream=stream, **options)
        assert problem in check_failed(response, "engine_error", stream=stream)
    text_format = form if form is OBJECT else {"type": "json_schema", **FORM["json_schema"]}
    response = post(foreign, RESPONSES, text={"format": text_format}, stream=stream)
    assert problem in check_failed(response, "engine_error", stream=stream)


def test_a_reply_that_is_cut(foreign: Client) -> None:
    """By its length it is what it is, even with JSON in it; a stop string may stand behind the JSON, or in it."""
    said = f"Hello {JSON} there"
    ids = foreign.say(said)
    for length in range(1, len(ids) + 1):
        found = whole(foreign.chat(response_format=OBJECT, max_tokens=length, **SCORED))
        assert found["content"] == foreign.tokenizer.decode_bytes(ids[:length]).decode("utf-8", "replace")
        assert found["finish"] == "length"
        check_spelling(found)
        assert fold(foreign.events(CHAT, response_format=OBJECT, max_tokens=length, **SCORED)) == found
    for stop, content in ((" there", JSON), ("}", "Hello " + JSON[:-1]), ("lo", "Hel")):
        found = whole(foreign.chat(response_format=OBJECT, stop=stop, **SCORED))
        assert (found["content"], found["finish"], found["stop"]) == (content, "stop", stop)
        check_spelling(found)
        assert fold(foreign.events(CHAT, response_format=OBJECT, stop=stop, **SCORED)) == found


def test_choices_each(foreign: Client) -> None:
    said = [f"{JSON}", 'so {"a": 1}!', '{"a": 2}']
    seeds = [choice_seed(0, 0, place) for place in range(3)]
    foreign.engine.reply = lambda request: foreign.tokenizer.encode(said[seeds.index(request.sampling.seed)])
    options: dict[str, Any] = {"n": 3, "seed": 0, "response_format": FORM, **SCORED}
    full, events = foreign.chat(**options), foreign.events(CHAT, **options)
    for index, content in enumerate([JSON, '{"a": 1}', '{"a": 2}']):
        found = whole(full, index)
        assert found["content"] == content
        check_spelling(found)
        assert fold(events, index) == found


@pytest.mark.parametrize("tokens_per_chunk", [1, 4, 200])
def test_reasoning_and_calls(thinker: Client, tokens_per_chunk: int) -> None:
    thinker.engine.tokens_per_chunk = tokens_per_chunk
    options: dict[str, Any] = {"response_format": FORM, "tools": TOOLS, **SCORED}
    called = [("clock", "{}")]
    for said, fields in (
        (f'<think>\nnot {{"a": 1}}\n</think>\n\nSo: {JSON}', ('not {"a": 1}', JSON, [])),
        (f"<think>so</think>{call('clock', '{}')}", ("so", "", called)),
        (f"<think>so</think>Let me see\n{call('clock', '{}')}", ("so", "Let me see", called)),
        (JSON, ("", JSON, [])),
    ):
        thinker.say(said)
        found = whole(thinker.chat(**options))
        assert (found["reasoning_content"], found["content"], found["calls"]) == fields
        assert found["finish"] == ("tool_calls" if fields[2] else "stop")
        check_spelling(found)
        assert fold(thinker.events(CHAT, **options)) == found


def test_reasoning_is_streamed_as_it_comes(thinker: Client) -> None:
    thinker.say("<think>the answer is here</think>but it is no JSON")
    response = post(thinker, CHAT, response_format=FORM, stream=True)
    assert response.status_code == 200
    *events, error, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_error"
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    thought = [choice["delta"].get("reasoning_content", "") for choice in deltas]
    assert "".join(thought) == "the answer is here"
    assert sum(map(bool, thought)) > 3
    assert deltas[-1]["finish_reason"] == "error"
    assert "no JSON" not in "".join(events)
    # Tags alone are nothing to show.
    thinker.say("<think>\n\n</think>\n\nno JSON")
    response = post(thinker, CHAT, response_format=FORM, stream=True)
    check_failed(response, "engine_error", stream=True)


def test_responses(foreign: Client, thinker: Client) -> None:
    named = {"type": "json_schema", "name": "answer", "schema": SCHEMA}
    for client, thought in ((foreign, ""), (thinker, "<think>so</think>")):
        client.say(f"{thought}Here: {JSON} ok")
        for form in (named, OBJECT):
            body = {"text": {"format": form}, **responses.INCLUDE}
            response = responses.respond(client, **body)
            assert len(response["output"]) == 1 + bool(thought)
            [part] = response["output"][-1]["content"]
            assert part["text"] == "".join(entry["token"] for entry in part["logprobs"]) == JSON
            streamed = responses.fold(responses.events(client, **body))
            assert responses.nameless(streamed) == responses.nameless(response)
            assert response["text"]["format"]["type"] == form["type"]
        assert (response["output"][0]["type"] == "reasoning") == bool(thought)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"typ": "object"}, "the keyword 'typ' is not supported"),
        ({"type": "objekt"}, "must be one or more of null"),
        ({"pattern": "("}, "a pattern cannot be held: unclosed group"),
        ({"pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "http://127.0.0.1:9/schema"}, "127.0.0.1:9"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"format": "zip-code"}, "not known"),
    ],
)
def test_schemas_are_looked_at_first(foreign: Client, schema: dict[str, Any], problem: str) -> None:
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
    assert problem in check(post(foreign, CHAT, **body), 400, "response_format", "invalid_value")
    body = {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}
    assert problem in check(post(foreign, RESPONSES, **body), 400, "text", "invalid_value")
    assert foreign.engine.submitted == []


def test_a_slow_check_holds_up_nobody(foreign: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the event loop: others are answered before it ends."""
    begun, may_end, find = threading.Event(), threading.Event(), JsonForm.find

    def slow_find(form: JsonForm, text: str) -> tuple[int, int]:
        begun.set()
        assert may_end.wait(60)
        return find(form, text)

    monkeypatch.setattr(JsonForm, "find", slow_find)
    foreign.say('{"a": 1}')
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(post, foreign, CHAT, response_format=FORM)
        try:
            assert begun.wait(60)
            assert foreign.http.get("/health").status_code == 200
            assert not slow.done()
        finally:
            may_end.set()
        assert slow.result().json()["choices"][0]["message"]["content"] == '{"a": 1}'


def test_a_check_that_takes_too_much_work_is_ended(foreign: Client) -> None:
    doubled: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**doubled, "d40": {"type": "integer"}}}
    foreign.say('"x"')
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    message = check(post(foreign, CHAT, response_format=form), 500, None, "engine_error")
    assert "takes too much work" in message


def test_an_engine_that_can_be_held_to_a_form_is(client: Client) -> None:
    """As ever: the constraint goes to the engine, and the reply is what it makes of it."""
    client.say("Hello")
    assert whole(client.chat(response_format=OBJECT))["content"] == "Hello"
    assert client.engine.submitted[-1].sampling.grammar is not None


def test_capabilities_of_a_test_are_what_such_engines_have() -> None:
    """Of what the server asks for, only these are missing: else a test above would pass for another reason."""
    plain = Capabilities(vocab_size=VOCAB_SIZE, max_model_len=1, max_logprobs=0, **FOREIGN)
    assert plain.logprobs is None
    assert plain.logprobs_modes == ("raw_logprobs",)
    missing = new_engine().capabilities.sampling_fields - plain.sampling_fields
    assert missing == {"ignore_eos", "min_tokens", "logit_bias", "bad_words", "grammar", "top_n_sigma"}
