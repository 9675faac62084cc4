"""The OpenAPI document: it names every route, and what the server answers is what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator, ValidationError
from starlette.routing import Route

import neper
from neper.config import ServerConfig
from neper.server.bodies.chat import ChatBody
from neper.server.bodies.completion import CompletionBody
from neper.server.bodies.responses import ResponsesBody
from neper.server.bodies.strict import only_values
from neper.server.openapi import OPERATIONS, ApiDocument
from neper.text.tokenizer import Tokenizer
from tests.helpers.api_schema import ApiSchema, api_schema
from tests.server.conftest import MODEL, Client, running
from tests.server.test_errors import CHAT, COMPLETIONS, MESSAGES, check

PATHS = {"/v1/models/{name:path}": "/v1/models/{name}"}


@pytest.fixture(scope="module")
def schema() -> ApiSchema:
    return api_schema()


@pytest.fixture
def checked(client: Client, schema: ApiSchema) -> Iterator[httpx.Client]:
    """A client all of whose responses are held against the document."""
    with httpx.Client(base_url=client.server.url, event_hooks={"response": [schema.check]}, timeout=60) as http:
        yield http


def test_the_document_is_served_and_names_every_route(client: Client) -> None:
    document = client.http.get("/openapi.json").json()
    assert document == ApiDocument(needs_key=False).document()
    assert document["openapi"].startswith("3.1.")
    assert client.http.get("/openapi.json?version=3.2").json() == ApiDocument(needs_key=False).document("3.2")
    for wrong in ("2", "", "3.1%00"):
        check(client.http.get(f"/openapi.json?version={wrong}"), 400, "version")
    assert document["info"]["version"] == neper.__version__
    routes = {
        (PATHS.get(route.path, route.path), method.lower())
        for route in client.server.app.routes
        if isinstance(route, Route) and route.include_in_schema  # the explorer is no API
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert routes == {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert document["security"] == []
    assert "securitySchemes" not in document["components"]
    assert not [name for name in document["components"]["schemas"] if "." in name], "two structs of one name"


def test_the_key_is_described_where_one_is_needed(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(api_key="sesam")) as client:
        document = client.http.get("/openapi.json").json()
        assert document["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
        for operation in OPERATIONS:
            described = document["paths"][operation.path][operation.method]
            refused = client.http.request(operation.method, operation.path.replace("{name}", "x")).status_code == 401
            needed = described.get("security", document["security"]) == [{"key": []}]
            assert refused == needed == ("401" in described["responses"])


@pytest.mark.parametrize("version", ["3.1", "3.2"])
@pytest.mark.parametrize("needs_key", [False, True])
def test_case_106_what_generators_of_clients_need(needs_key: bool, version: Any) -> None:
    """openapi-python-client, orval, openapi-typescript and Redocly took the document without an error."""
    document = ApiDocument(needs_key=needs_key).document(version)
    assert document["servers"]
    assert "security" in document
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert ("itemSchema" in str(document)) == (version == "3.2")
    places = [document]
    while places:
        place = places.pop()
        if isinstance(place, list):
            places += place
        elif isinstance(place, dict):
            places += place.values()
            assert place.get("type") != "array" or "items" in place
            assert not any(isinstance(value, bool) for value in place.get("enum", ()))


@pytest.mark.parametrize("name", ["ChatBody", "CompletionBody", "ResponsesBody"])
def test_case_106_what_the_schema_takes_is_no_400(schema: ApiSchema, name: str) -> None:
    """A field that only one value is taken of says so."""
    fields = schema.document["components"]["schemas"][name]["properties"]
    kinds = {"ChatBody": ChatBody, "CompletionBody": CompletionBody, "ResponsesBody": ResponsesBody}
    limited = only_values(kinds[name])
    assert limited
    for field, value in limited.items():
        for other in (value, None, True, False, 0, 1, "", "x", [], ["x"], ["text"]):
            allowed = Draft202012Validator(fields[field]).is_valid(other)
            assert allowed == (other is None or (other == value and isinstance(other, bool) == isinstance(value, bool)))


@pytest.mark.parametrize(("body", "name"), [(ChatBody, "messages"), (CompletionBody, "prompt")])
def test_bodies_are_those_that_are_decoded(schema: ApiSchema, body: type[Any], name: str) -> None:
    described = schema.document["components"]["schemas"][body.__name__]
    assert described["properties"].keys() == set(body.__struct_fields__)
    assert described["required"] == [name]
    assert described["additionalProperties"] is False
    assert {"type": "null"} not in described["properties"][name]["anyOf"]
    for field, value in only_values(body).items():
        if value is None:
            assert described["properties"][field]["type"] == "null"


SCORED: list[dict[str, Any]] = [
    {},
    {"n": 2, "return_token_ids": True},
    {"logprobs": 0, "return_token_ids": True},
    {"logprobs": 3, "stop": "quick", "seed": 5},
    {"logprobs": 2, "return_tokens_as_token_ids": True},
    {"stop_token_ids": [2], "ignore_eos": True, "max_tokens": 3},
]


@pytest.mark.parametrize("options", SCORED, ids=str)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_replies_and_streams(client: Client, checked: httpx.Client, path: str, options: dict[str, Any]) -> None:
    client.say("the quick brown fox 日本")
    fixed: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hello"}
    assert checked.post(path, json={**fixed, **options, "prompt_logprobs": 1}).status_code == 200
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    assert checked.post(path, json={**fixed, **options, **stream}).status_code == 200
    if path == COMPLETIONS:
        for more in ({}, {"stream": True}, {"max_tokens": 0}):
            assert checked.post(path, json={**fixed, **options, "echo": True, **more}).status_code == 200


CLOCK: dict[str, Any] = {"type": "function", "name": "clock"}
FORMAT = {"type": "json_schema", "name": "answer", "schema": {"type": "string"}, "strict": True}
ASKED: list[dict[str, Any]] = [
    {},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "text": {"format": FORMAT, "verbosity": "low"}},
    {"max_output_tokens": 1, "text": {"format": {"type": "json_object"}}},
    {"tools": [CLOCK], "tool_choice": "required"},
    {"tools": [{**CLOCK, "description": "The time", "parameters": {}, "strict": False}], "tool_choice": CLOCK},
    {"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [CLOCK]}},
]


@pytest.mark.parametrize("options", ASKED, ids=str)
def test_responses(qwen: Client, schema: ApiSchema, options: dict[str, Any]) -> None:
    qwen.say('<think>so</think>Hi<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>')
    for stream in (False, True):
        response = qwen.post("/v1/responses", input="Hello", stream=stream, **options)
        assert response.status_code == 200
        schema.check(response)


def test_failures(client: Client, checked: httpx.Client) -> None:
    client.say("the quick brown fox")
    client.engine.fail_after = 2
    for stream in (False, True):
        checked.post(CHAT, json={"messages": MESSAGES, "stream": stream})
    client.engine.fail_after = None
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        for content in (b"", b"[]", b'{"other": 1}', b'{"model": "other"}', b" " * 200_000):
            checked.post(path, content=content, headers={"content-type": "application/json"})
        checked.post(path, content="{}")
        checked.get(path)
    client.engine.alive = False
    for path in ("/health", "/v1/models", "/metrics", "/openapi.json"):
        checked.get(path)
    assert checked.post(CHAT, json={"messages": MESSAGES}).status_code == 503


def test_small_endpoints(checked: httpx.Client) -> None:
    paths = ("/v1/models", f"/v1/models/{MODEL}", "/tokenizer_info", "/health", "/metrics", "/openapi.json")
    for path in (*paths, "/ping", "/version"):
        assert checked.get(path).status_code == 200
    for strs in (False, True):
        assert checked.post("/tokenize", json={"prompt": "Hello", "return_token_strs": strs}).status_code == 200
    assert checked.post("/detokenize", json={"tokens": [5]}).status_code == 200
    assert checked.get("/v1/models/other").status_code == 404


def test_what_is_not_described_is_found(schema: ApiSchema, client: Client) -> None:
    """The oracle itself: a field too many, one too few, a status that is not listed."""
    reply = client.http.get("/v1/models")
    good = reply.json()
    schema.check(reply)
    for wrong in ({**good, "other": 1}, {"object": "list"}, {**good, "object": "other"}):
        with pytest.raises(ValidationError):
            schema.check(httpx.Response(200, json=wrong, headers={"x-request-id": "x"}, request=reply.request))
    with pytest.raises(AssertionError, match="does not describe 418"):
        schema.check(httpx.Response(418, json=good, headers={"x-request-id": "x"}, request=reply.request))
    with pytest.raises(AssertionError, match="X-Request-Id is missing"):
        schema.check(httpx.Response(200, json=good, request=reply.request))


def test_replies_decode_as_their_structs(client: Client) -> None:
    client.say("the quick brown fox")
    for path, operation in ((o.path, o) for o in OPERATIONS if o.chunk is not None):
        fixed: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hello"}
        reply = client.post(path, **fixed, logprobs=2, return_token_ids=True)
        assert operation.reply is not None
        made = msgspec.json.decode(reply.content, type=operation.reply)
        assert msgspec.json.decode(msgspec.json.encode(made)) == reply.json()
