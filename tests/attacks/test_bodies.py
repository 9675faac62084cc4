"""Bodies of which much is made: each sent several times, from two connections at once."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.attacks.target import Target, at_once

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROUNDS = 8
SIZE = 2**20


def chat(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **fields}).encode()


def filled(head: str, item: str, tail: str, size: int = SIZE) -> bytes:
    """A body of about `size` bytes: as many items as there is room for."""
    return (head + ",".join([item] * (size // (len(item) + 1))) + tail).encode()


def schema(properties: dict[str, object]) -> bytes:
    named = {"name": "x", "schema": {"type": "object", "properties": properties}}
    return chat(response_format={"type": "json_schema", "json_schema": named})


def long_name() -> bytes:
    return schema({"n" * (SIZE - 40_000): {}, **{f"p{i}": {} for i in range(2000)}})


def many_properties() -> bytes:
    return schema({f"p{i}": {} for i in range(SIZE // 14)})


def empty_messages() -> bytes:
    return filled('{"max_tokens":1,"messages":[', '{"role":"user","content":""}', "]}")


def small_numbers() -> bytes:
    return filled('{"max_tokens":1,"prompt":[', "1", "]}")


def lists() -> bytes:
    return filled('{"max_tokens":1,"prompt":[', "[]", "]}")


def template_arguments() -> bytes:
    return filled('{"messages":[{"role":"user","content":"Hi"}],"chat_template_kwargs":{"a":[', "{}", "]}}")


def biases() -> bytes:
    return json.dumps({"prompt": "Hi", "logit_bias": {str(i): 1 for i in range(SIZE // 12)}}).encode()


BODIES: list[tuple[str, Callable[[], bytes]]] = [
    (CHAT, long_name),
    (CHAT, many_properties),
    (CHAT, empty_messages),
    (COMPLETIONS, small_numbers),
    (COMPLETIONS, lists),
    (CHAT, template_arguments),
    (COMPLETIONS, biases),
]


@pytest.mark.parametrize(("path", "make"), BODIES, ids=[make.__name__ for _, make in BODIES])
def test_case_88_bodies_of_many_things(target: Target, path: str, make: Callable[[], bytes]) -> None:
    body = make()
    statuses: list[int] = []

    def send() -> None:
        statuses.extend(target.post(path, body)[0] for _ in range(ROUNDS))

    figures = target.attack(f"case 88, {make.__name__}", lambda: at_once([send, send]), sent=2 * len(body))
    assert {*statuses} <= {400, 413}
    figures.check()


def within(path: str, head: str, item: str, tail: str, count: int) -> tuple[str, bytes]:
    return path, (head + ",".join([item] * count) + tail).encode()


# As much as the limits let through, so that all of it is decoded and checked.
WITHIN: dict[str, tuple[str, bytes]] = {
    "lists": within(COMPLETIONS, '{"max_tokens":1,"prompt":[', "[]", "]}", 65_000),
    "messages": within(CHAT, '{"max_tokens":1,"messages":[', '{"role":"user","content":""}', "]}", 39_000),
    "objects": within(CHAT, '{"messages":[],"chat_template_kwargs":{"a":[', "{}", "]}}", 65_000),
    "numbers": within(COMPLETIONS, '{"max_tokens":1,"prompt":[', "1", "]}", 1_150_000),
    "powers": within(CHAT, '{"messages":[],"metadata":{"a":[', "1e300", "]}}", 40_000),
    "escapes": (COMPLETIONS, b'{"max_tokens":1,"prompt":"' + rb"\"" * (1_990_000) + b'"}'),
}


@pytest.mark.parametrize("name", WITHIN)
def test_case_88_bodies_within_the_limits(target: Target, name: str) -> None:
    path, body = WITHIN[name]
    statuses: list[int] = []

    def send() -> None:
        statuses.extend(target.post(path, body)[0] for _ in range(ROUNDS))

    figures = target.attack(f"case 88, within limits: {name}", lambda: at_once([send, send]), sent=2 * len(body))
    assert {*statuses} <= {400, 413}
    figures.check()
