"""What bodies may hold: how much of it, how deep, and any JSON at all where any may stand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neper.config import ServerConfig
from neper.errors import InvalidRequestError, RequestTooLargeError
from neper.server.bodies import strict
from neper.server.bodies.chat import ChatBody
from neper.server.bodies.completion import CompletionBody
from neper.server.bodies.responses import ResponsesBody
from neper.server.bodies.strict import MAX_COST, MAX_DEPTH, MAX_STRINGS, decode_body
from neper.server.replies.sse import Reply
from tests.helpers.qwen_template import QWEN_TEMPLATE
from tests.server.conftest import TAGS, Client, byte_level_tokenizer, running
from tests.server.test_errors import CHAT, COMPLETIONS, MESSAGES, check

RESPONSES = "/v1/responses"


def filled(head: str, item: str, tail: str, count: int) -> bytes:
    return (head + ",".join([item] * count) + tail).encode()


class CountingDecoder:
    """Stands in for msgspec's: nothing that is refused for its size may get here."""

    def __init__(self) -> None:
        self.calls = 0

    def decode(self, data: bytes) -> Any:
        self.calls += 1
        raise InvalidRequestError("decoded")


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (filled('{"prompt":[', "[]", "]}", MAX_COST // 400), RequestTooLargeError, "75002 lists and objects"),
        (filled('{"prompt":[', "1", "]}", MAX_COST // 25), RequestTooLargeError, "1200000 values"),
        (filled('{"metadata":{"a":[', "1e300", "]}}", 60_000), RequestTooLargeError, "60000 values"),
        (filled('{"metadata":{"a":[', "1.5", "]}}", 400_000), RequestTooLargeError, "400000 values"),
        (filled('{"prompt":[', '""', "]}", MAX_STRINGS), RequestTooLargeError, f"more than {MAX_STRINGS} strings"),
        (filled('{"prompt":[', r'"\""', "]}", MAX_STRINGS), RequestTooLargeError, f"more than {MAX_STRINGS} strings"),
        (b'{"metadata":' + b'{"a":' * MAX_DEPTH + b"1" + b"}" * (MAX_DEPTH + 1), InvalidRequestError, "100 deep"),
        (b"[" * 200_000, RequestTooLargeError, "200000 lists"),
        (b'{"prompt":"' + rb"\n" * 2_100_000 + b'"}', RequestTooLargeError, "2100000 escapes"),
        (b'{"prompt":"' + rb"\u8a9e" * 560_000 + b'"}', RequestTooLargeError, "560000 escapes"),
        (b'{"prompt":' + b"[" * MAX_DEPTH, InvalidRequestError, "nested more than 100 deep"),
    ],
)
def test_case_88_what_is_too_much_is_refused_before_it_is_decoded(
    body: bytes, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = CountingDecoder()
    monkeypatch.setattr(strict, "_decoder", lambda kind: decoder)
    with pytest.raises(error, match=message):
        decode_body(body, CompletionBody)
    assert decoder.calls == 0


def test_case_88_what_clients_need_is_taken() -> None:
    prose = "Brackets [0], {'a': 1.5e10}, \"quotes\" and \\ in a text, " * 40_000
    assert decode_body(json.dumps({"prompt": prose}).encode(), CompletionBody).prompt == prose
    batch = [[128_000] * 8_000] * 128
    assert decode_body(json.dumps({"prompt": batch}).encode(), CompletionBody).prompt == batch
    biases = {str(i): -100.0 for i in range(100_000)}
    assert decode_body(json.dumps({"prompt": "", "logit_bias": biases}).encode(), CompletionBody).logit_bias == biases
    properties = {f"property_{i}": {"type": "string", "description": "x" * 40} for i in range(50)}
    function = {"parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": {"name": f"f{i}", **function}} for i in range(128)]
    assert decode_body(json.dumps({"messages": MESSAGES, "tools": tools}).encode(), ChatBody).tools is not None
    nested: Any = 1
    for _ in range(MAX_DEPTH - 2):
        nested = [nested]
    assert decode_body(json.dumps({"messages": MESSAGES, "metadata": {"a": nested}}).encode(), ChatBody)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**30, 2**64, 2**64 - 1, -(2**63) - 1])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.text('\\"[{e,', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


def shape(value: Any) -> tuple[int, int]:
    """How many lists and objects there are, and how deep they are nested."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        return 0, 0
    shapes = [shape(item) for item in inner]
    return 1 + sum(count for count, _ in shapes), 1 + max((depth for _, depth in shapes), default=0)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=JSON, ascii=st.booleans(), part=st.sampled_from([2, 3, 5, 2**20]))
def test_the_count_is_that_of_the_json(value: Any, ascii: bool, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    count, depth = shape(value)
    with monkeypatch.context() as patch:
        patch.setattr(strict, "_PART_BYTES", part)
        patch.setattr(strict, "_COSTS", {b"[": 1, b"{": 1, b"e": 0, b",": 0})
        patch.setattr(strict, "_STRING_COST", 0)
        patch.setattr(strict, "_ESCAPE_COSTS", {strict._ESCAPE: 0})
        patch.setattr(strict, "MAX_COST", count)
        patch.setattr(strict, "MAX_DEPTH", depth)
        strict._check_size(data)
        if count:
            patch.setattr(strict, "MAX_DEPTH", depth - 1)
            with pytest.raises(InvalidRequestError, match=f"nested more than {depth - 1} deep"):
                strict._check_size(data)
            patch.setattr(strict, "MAX_COST", count - 1)
            with pytest.raises(RequestTooLargeError, match=f"{count} lists and objects"):
                strict._check_size(data)


@pytest.mark.parametrize("text", [rb"\"", rb"\\", rb"\n", b"x"])
def test_case_88_a_long_text_is_counted_in_parts(text: bytes) -> None:
    """A pass in C over all of it would hold the event loop for as long as it takes."""
    data = b'{"prompt":"' + text * (2**23 // len(text)) + b'","echo":[]}'
    parts = list(strict._outside_strings(data))
    assert len(parts) == 33
    assert b"".join(part for part, _, _ in parts) == data
    assert sum(quotes for _, quotes, _ in parts) == 6
    assert b"".join(outside for _, _, outside in parts) == b"{:,:[]}"


@pytest.fixture(scope="module")
def free() -> Iterator[Client]:
    with running(byte_level_tokenizer(template=QWEN_TEMPLATE, tags=TAGS), ServerConfig()) as client:
        yield client


def function(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


# Where any JSON may stand: the path, and the body with a value there.
FREE_FIELDS: dict[str, tuple[str, Any]] = {
    "chat_template_kwargs": (CHAT, lambda value: {"chat_template_kwargs": {"a": value}}),
    "tools": (CHAT, lambda value: {"tools": [function({"type": "object", "default": value})]}),
    "tools, required": (CHAT, lambda value: {"tools": [function({"default": value})], "tool_choice": "required"}),
    "whole parameters": (CHAT, lambda value: {"tools": [function(value)]}),
    "metadata": (CHAT, lambda value: {"metadata": {"a": value}}),
    "a field that is not there": (CHAT, lambda value: {"other": value}),
    "a field of a message": (CHAT, lambda value: {"messages": [{**MESSAGES[0], "audio": value}]}),
    "arguments": (
        CHAT,
        lambda value: {
            "messages": [
                *MESSAGES,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps(value)}}
                    ],
                },
            ]
        },
    ),
    "response_format": (
        CHAT,
        lambda value: {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"type": "object", "default": value}},
            }
        },
    ),
    "enum": (COMPLETIONS, lambda value: {"structured_outputs": {"json": {"enum": [value]}}}),
    "schema as text": (COMPLETIONS, lambda value: {"structured_outputs": {"json": json.dumps({"const": value})}}),
    "logit_bias": (COMPLETIONS, lambda value: {"logit_bias": value}),
    "prompt": (COMPLETIONS, lambda value: {"prompt": value}),
    "text.format": (
        RESPONSES,
        lambda value: {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"default": value}}}},
    ),
    "metadata of a response": (RESPONSES, lambda value: {"metadata": {"a": value}}),
    "input": (RESPONSES, lambda value: {"input": value}),
    "tool_choice of a response": (RESPONSES, lambda value: {"tool_choice": {"a": value}}),
    "tools of a response": (RESPONSES, lambda value: {"tools": [value]}),
}
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 1},
    RESPONSES: {"input": "Hi", "max_output_tokens": 1},
}


def nested(depth: int, kind: str) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if kind == "[" else {"": value}
    return value


HOSTILE = JSON | st.one_of(
    st.sampled_from([10**30, 2**64, -(2**63) - 1, 1e308, 5e-324, -0.0]),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    st.builds(nested, st.integers(1, 400), st.sampled_from("[{")),
    st.sampled_from(["\ud800", "\udfff\ud800", "\x00", "\U0010ffff", "a" * 100_000, "{{ x }}", "<|im_end|>", ""]),
    st.sampled_from([{"": 1}, {"\ud800": 1}, {"a" * 50_000: 1}, {"\x00": {}}, {"messages": 1}, {"$ref": "#"}]),
)


def ask(client: Client, place: str, value: Any, stream: bool, *, twice: bool = False) -> httpx.Response:
    path, make = FREE_FIELDS[place]
    data = json.dumps({**BASES[path], **make(value), "stream": stream})
    if twice:  # every key, as JSON allows
        data = "{" + data[1:-1] + "," + data[1:-1] + "}"
    content = data.encode("utf-8", "surrogatepass")
    return client.http.post(path, content=content, headers={"content-type": "application/json"})


def holds(response: httpx.Response) -> None:
    """A reply that is one, or an error of the client's."""
    if response.status_code != 200:
        assert response.status_code in (400, 413), response.text
        error = response.json()["error"]
        assert error["message"]
        assert "\n" not in error["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        last = response.text.rstrip().split("\n\n")[-1]
        assert last == "data: [DONE]" or last.startswith(
            ("event: response.completed\n", "event: response.incomplete\n")
        )
        assert '"error":{' not in response.text
    else:
        response.json()


def check_hostile(client: Client, place: str, value: Any, stream: bool, twice: bool) -> None:
    client.say("Hi")
    holds(ask(client, place, value, stream, twice=twice))


@pytest.mark.rounds(60)
def test_case_91_any_json_at_any_free_field(free: Client, rounds: int) -> None:
    @settings(max_examples=rounds, deadline=None)
    @given(place=st.sampled_from(sorted(FREE_FIELDS)), value=HOSTILE, stream=st.booleans(), twice=st.booleans())
    def check(place: str, value: Any, stream: bool, twice: bool) -> None:
        check_hostile(free, place, value, stream, twice)

    check()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("place", "value", "param"),
    [
        ("chat_template_kwargs", 10**30, "chat_template_kwargs"),
        ("tools", 2**64, "tools"),
        ("response_format", -(2**63) - 1, "response_format"),
        ("metadata", 10**30, "metadata"),
        ("text.format", 2**64, "text"),
        ("metadata of a response", 10**30, "metadata"),
        ("tools of a response", 10**30, "tools"),
        ("a field of a message", 10**30, "messages"),
        ("chat_template_kwargs", nested(300, "["), None),
        ("text.format", nested(300, "{"), None),
    ],
)
def test_case_91_what_cannot_be_written_again_is_a_400(
    free: Client, place: str, value: Any, param: str | None, stream: bool
) -> None:
    check(ask(free, place, value, stream), 400, param)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("at", ["begin", "event", "end"])
def test_case_91_what_fails_in_a_stream_ends_it_with_an_error(
    client: Client, path: str, at: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind = {CHAT: "ChatReply", COMPLETIONS: "CompletionReply", RESPONSES: "ResponsesReply"}[path]
    found = next(found for found in _kinds(Reply) if found.__name__ == kind)

    def fail(*arguments: object) -> bytes:
        raise RuntimeError("a bug")

    client.say("Hello there")
    monkeypatch.setattr(found, at, fail)
    response = client.http.post(path, json={**BASES[path], "stream": True})
    if at != "begin":
        assert response.status_code == 200
        assert '"code":"internal_error"' in response.text
        assert "event: error\n" in response.text if path == RESPONSES else response.text.endswith("data: [DONE]\n\n")
    else:  # nothing was sent yet
        check(response, 500, None, "internal_error")


def _kinds(kind: type) -> Iterator[type]:
    for found in kind.__subclasses__():
        yield found
        yield from _kinds(found)


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, ResponsesBody])
def test_free_fields_are_found(kind: type[strict.Strict]) -> None:
    assert "metadata" in strict._free_fields(kind)
    assert "temperature" not in strict._free_fields(kind)
    assert "response_format" in strict._free_fields(kind)


def test_case_88_more_messages_than_the_context_has_tokens(client: Client) -> None:
    empty = {"role": "user", "content": ""}
    for path, field in ((CHAT, "messages"), (RESPONSES, "input")):
        response = client.post(path, **{field: [empty] * 129})
        assert "129 messages" in check(response, 400, None, "context_length_exceeded")
