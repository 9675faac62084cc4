"""Fields of other clients and servers: hints are taken, what would change the answer is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from neper.server.bodies.other_names import OTHER_NAMES
from tests.server.conftest import Client
from tests.server.test_errors import CHAT, COMPLETIONS, MESSAGES, check
from tests.server.test_failures import body

Json = dict[str, Any]
HINTS: list[Json] = [
    {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "service_tier": "auto"},
    {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "client_metadata": {"a": "b"}},
    {"store": False, "priority": 0, "spaces_between_special_tokens": True, "use_beam_search": False},
    {"length_penalty": 1.0, "early_stopping": False, "typical_p": 1.0, "include_reasoning": True},
    {"guided_json": None, "nobody_knows": None, "stop": None},
]
CHAT_HINTS: list[Json] = [
    {"verbosity": "low", "reasoning_effort": "high", "cache_control": {"type": "ephemeral"}},
    {"tools": [], "functions": [], "function_call": "none", "echo": False, "modalities": ["text"]},
    {"max_tokens": 3, "max_completion_tokens": 5},
    {"messages": [{"role": "user", "content": "x", "name": None, "audio": None, "nobody_knows": None}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": "y", "tool_calls": [], "annotations": [], "refusal": None, "audio": None},
            {"role": "user", "content": "z", "tool_calls": []},
        ]
    },
]


@pytest.mark.parametrize("hints", HINTS, ids=str)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_94_what_cannot_change_the_answer_is_taken(client: Client, path: str, hints: Json) -> None:
    client.say("the quick brown fox")
    plain = client.http.post(path, json=body(path)).json()["choices"]
    assert client.http.post(path, json=body(path, **hints)).json()["choices"] == plain


@pytest.mark.parametrize("hints", CHAT_HINTS, ids=str)
def test_case_94_in_chat(client: Client, hints: Json) -> None:
    assert client.http.post(CHAT, json=body(CHAT, **hints)).status_code == 200


SAID, REFUSED = "I can", "I can't"


@pytest.mark.parametrize(
    ("refusing", "plain"),
    [
        ({"content": None, "refusal": REFUSED}, REFUSED),
        ({"refusal": REFUSED}, REFUSED),
        ({"content": [{"type": "refusal", "refusal": REFUSED}]}, REFUSED),
        ({"content": [{"type": "text", "text": SAID}, {"type": "refusal", "refusal": REFUSED}]}, SAID + REFUSED),
        ({"content": SAID, "refusal": REFUSED}, SAID + REFUSED),
        ({"content": SAID, "refusal": ""}, SAID),
    ],
    ids=str,
)
def test_a_refusal_in_the_history_is_content(client: Client, refusing: Json, plain: str) -> None:
    prompts = []
    for message in (refusing, {"content": plain}):
        messages = [*MESSAGES, {"role": "assistant", **message}, *MESSAGES]
        assert client.http.post(CHAT, json=body(CHAT, messages=messages)).status_code == 200
        prompts.append(client.engine.submitted[-1].prompt_token_ids)
    assert prompts[0] == prompts[1]


def test_case_94_the_newer_name_counts(client: Client) -> None:
    client.http.post(CHAT, json=body(CHAT, max_tokens=3, max_completion_tokens=5))
    assert client.engine.submitted[-1].sampling.max_tokens == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"store": True},
        {"priority": 1},
        {"priority": False},
        {"spaces_between_special_tokens": False},
        {"use_beam_search": True},
        {"length_penalty": 0.5},
        {"include_reasoning": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_94_what_can_is_refused_by_name(client: Client, path: str, wrong: Json) -> None:
    [name] = wrong
    assert f"{name} is not supported" in check(client.post(path, **body(path), **wrong), 400, name, "unsupported")


@pytest.mark.parametrize("name", list(OTHER_NAMES))
def test_case_94_other_servers_names_are_told_what_to_use(client: Client, name: str) -> None:
    for path in (CHAT, COMPLETIONS):
        fields: dict[str, Any] = {**body(path), name: "x"}
        message = check(client.http.post(path, json=fields), 400, name)
        assert message.endswith(f"unknown field `{name}`; here it is {OTHER_NAMES[name]}")


def test_case_94_a_name_of_nobody(client: Client) -> None:
    message = check(client.http.post(CHAT, json=body(CHAT, nobody_knows=0)), 400, "nobody_knows")
    assert message == "Object contains unknown field `nobody_knows`"


def test_case_94_nulls_of_free_objects_are_theirs(client: Client) -> None:
    """Null equals absent among the fields of the API alone: an unknown field elsewhere does not touch a schema."""
    schema = {"type": "object", "properties": {"a": {"default": None, "type": "null"}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    client.http.post(CHAT, json=body(CHAT, response_format=form, nobody_knows=None))
    grammar = client.engine.submitted[-1].sampling.grammar
    client.http.post(CHAT, json=body(CHAT, response_format=form))
    assert grammar is not None
    assert grammar == client.engine.submitted[-1].sampling.grammar


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_102_usage_on_every_chunk(client: Client, path: str) -> None:
    def chunks(**options: bool) -> list[Json]:
        asked = body(path, n=2, stream=True, stream_options=options)
        *events, done, rest = client.http.post(path, json=asked).text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    client.say("the quick brown fox")
    *told, last = chunks(include_usage=True, continuous_usage_stats=True)
    totals = [chunk["usage"]["completion_tokens"] for chunk in told]
    assert totals == sorted(totals)
    assert all(chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for chunk in told)
    assert totals[-1] == last["usage"]["completion_tokens"] > 8
    assert last["choices"] == []
    assert chunks(continuous_usage_stats=True)[-1]["usage"] == last["usage"]
    *plain, _ = chunks(include_usage=True, continuous_usage_stats=False)
    assert [chunk["usage"] for chunk in plain] == [None] * len(plain)
