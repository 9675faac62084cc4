"""Replies against JSON schemas: those of the openai package's own types, with the keys that its reference requires."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.cases.conftest import CHAT, COMPLETIONS, RealServer
from tests.helpers.invariants import Json

RESPONSES = "/v1/responses"
ENTRY_KEYS = {
    "ChatCompletionTokenLogprob": ["token", "logprob", "bytes", "top_logprobs"],
    "TopLogprob": ["token", "logprob", "bytes"],
    "ChoiceLogprobs": ["content", "refusal"],
}
# What the reference requires, and the types' defaults hide.
REQUIRED: dict[Any, dict[str, list[str]]] = {
    ChatCompletion: {
        **ENTRY_KEYS,
        "": ["id", "choices", "created", "model", "object", "usage"],
        "Choice": ["finish_reason", "index", "message", "logprobs"],
        "ChatCompletionMessage": ["role", "content", "refusal"],
        "ChatCompletionMessageFunctionToolCall": ["id", "function", "type"],
    },
    ChatCompletionChunk: {**ENTRY_KEYS, "Choice": ["delta", "finish_reason", "index"]},
    Completion: {
        "CompletionChoice": ["finish_reason", "index", "logprobs", "text"],
        "Logprobs": ["text_offset", "token_logprobs", "tokens", "top_logprobs"],
    },
    Response: {
        "ResponseOutputText": ["type", "text", "annotations", "logprobs"],
        "Logprob": ["token", "bytes", "logprob", "top_logprobs"],
        "LogprobTopLogprob": ["token", "bytes", "logprob"],
        "ResponseFunctionToolCall": ["id", "type", "status", "call_id", "name", "arguments"],
        "FunctionTool": ["type", "name", "parameters", "strict"],
    },
    Model: {"": ["id", "created", "object", "owned_by"]},
    ResponseStreamEvent: {},
}
# Null where the types say a list, a number or a word, as OpenAI's own replies of these kinds are.
NULLABLE = {
    Completion: {"Logprobs": ["token_logprobs", "top_logprobs"], "CompletionChoice": ["finish_reason"]},
}


class Schema:
    """The schema of a type, with `REQUIRED` made so."""

    def __init__(self, kind: Any) -> None:
        document = TypeAdapter(kind).json_schema()
        for name, keys in REQUIRED[kind].items():
            described = document if name == "" else document["$defs"][name]
            assert set(keys) <= described["properties"].keys()
            described["required"] = sorted({*described.get("required", ()), *keys})
        for name, keys in NULLABLE.get(kind, {}).items():
            for key in keys:
                described = document["$defs"][name]["properties"]
                described[key] = {"anyOf": [_items_nullable(described[key]), {"type": "null"}]}
        self.required = REQUIRED[kind]
        self.validator = Draft202012Validator(document)

    def check(self, value: Any) -> None:
        self.validator.validate(value)


def _items_nullable(schema: Json) -> Json:
    """The first position of an echo has no score: its place in the arrays is null."""
    found: Json = copy.deepcopy(schema)
    for option in (found, *found.get("anyOf", ())):
        if option.get("type") == "array":
            option["items"] = {"anyOf": [option["items"], {"type": "null"}]}
    return found


@pytest.fixture(scope="module")
def schemas() -> dict[Any, Schema]:
    return {kind: Schema(kind) for kind in REQUIRED}


def data_of(text: str) -> Iterator[Any]:
    for event in text.split("\n\n"):
        for line in event.split("\n"):
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


BODIES: list[Json] = [
    {},
    {"logprobs": 0},
    {"logprobs": 3, "n": 2, "seed": 4},
    {"logprobs": 2, "stop": ["e", "a", "q"], "return_token_ids": True},
    {"logprobs": 2, "allowed_token_ids": [2]},
    {"logprobs": 2, "logprob_token_ids": [0, 383, 45], "return_tokens_as_token_ids": True},
]


@pytest.mark.parametrize("options", BODIES, ids=str)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_replies_and_chunks(tiny: RealServer, schemas: dict[Any, Schema], path: str, options: Json) -> None:
    whole, chunk = (ChatCompletion, ChatCompletionChunk) if path == CHAT else (Completion, Completion)
    extras: list[Json] = [{}] if path == CHAT else [{}, {"echo": True}, {"echo": True, "max_tokens": 0}]
    for extra in extras:
        body = {"max_tokens": 8, **options, **extra}
        response = tiny.post(path, **body)
        assert response.status_code == 200, response.text
        schemas[whole].check(response.json())
        streamed = tiny.post(path, **body, stream=True, stream_options={"include_usage": True})
        chunks = list(data_of(streamed.text))
        assert len(chunks) > 1
        for found in chunks:
            schemas[chunk].check(found)


def test_reasoning_and_tool_calls(tiny: RealServer, schemas: dict[Any, Schema]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maxProperties": 0}}}
    open_thought = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>\nwell"}]
    made: list[Json] = [
        {"tools": [tool], "tool_choice": "required", "max_tokens": 100, "seed": 1},
        {
            "messages": open_thought,
            "continue_final_message": True,
            "logit_bias": {"331": 4},
            "max_tokens": 30,
            "seed": 1,
        },
    ]
    calls = thoughts = 0
    for body in made:
        body |= {"logprobs": True, "top_logprobs": 2}
        reply = tiny.post(CHAT, **body).json()
        schemas[ChatCompletion].check(reply)
        message = reply["choices"][0]["message"]
        calls += "tool_calls" in message
        thoughts += bool(message.get("reasoning_content"))
        for chunk in data_of(tiny.post(CHAT, **body, stream=True).text):
            schemas[ChatCompletionChunk].check(chunk)
    assert calls
    assert thoughts


def test_case_103_responses(tiny: RealServer, schemas: dict[Any, Schema]) -> None:
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    tool: Json = {"type": "function", "name": "f", "parameters": {"type": "object", "maxProperties": 0}}
    calls: Json = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 100}
    for options in ({}, logprobs, {**calls, **logprobs, "seed": 1}):
        body: Json = {"model": tiny.model, "input": "Hello", "max_output_tokens": 16, **options}
        reply = tiny.http.post(RESPONSES, json=body)
        assert reply.status_code == 200, reply.text
        schemas[Response].check(reply.json())
        if "tools" in options:
            assert {"type": "function_call", "name": "f"}.items() <= reply.json()["output"][-1].items()
        events = list(data_of(tiny.http.post(RESPONSES, json={**body, "stream": True}).text))
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        for event in events:
            schemas[ResponseStreamEvent].check(event)


def test_models(tiny: RealServer, schemas: dict[Any, Schema]) -> None:
    listed = tiny.http.get("/v1/models").json()
    assert listed["object"] == "list"
    for model in [*listed["data"], tiny.http.get(f"/v1/models/{tiny.model}").json()]:
        schemas[Model].check(model)


def _without_a_key(value: Any) -> Iterator[tuple[str, Any]]:
    """The value with one key of one object in it left out, for each."""
    if isinstance(value, dict):
        for name in value:
            yield name, {key: item for key, item in value.items() if key != name}
            for missing, item in _without_a_key(value[name]):
                yield missing, {**value, name: item}
    elif isinstance(value, list) and value:
        for missing, item in _without_a_key(value[0]):
            yield missing, [item, *value[1:]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_missing_key_is_found(tiny: RealServer, schemas: dict[Any, Schema], path: str) -> None:
    """The oracle itself: no required key of a real reply can be left out."""
    kind = ChatCompletion if path == CHAT else Completion
    reply = tiny.post(path, logprobs=2, max_tokens=3, ignore_eos=True, skip_special_tokens=False).json()
    schemas[kind].check(reply)
    needed = {key for keys in schemas[kind].required.values() for key in keys} | {"id", "choices", "created", "model"}
    needed -= {"function", "type"}
    found = set()
    for missing, changed in _without_a_key(reply):
        if missing in needed:
            with pytest.raises(ValidationError):
                schemas[kind].check(changed)
            found.add(missing)
    assert found == needed
