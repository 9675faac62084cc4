"""The values in a JSON text: what is cut off, broken, given twice, or too deep to be named."""

from __future__ import annotations

import json

import pytest

from neper.text.json_values import LONGEST_POINTER, json_values


def found(text: str, *, whole: bool = True) -> list[tuple[str, str, bool]]:
    data = text.encode()
    return [(v.pointer, data[v.start : v.end].decode(), v.complete) for v in json_values(data, whole=whole)]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (
            ' {"a": [1, {}]} ',
            [("", '{"a": [1, {}]}', True), ("/a", "[1, {}]", True), ("/a/0", "1", True), ("/a/1", "{}", True)],
        ),
        (
            '{"a/~": "\\"", "\\u0062": -1e5}',
            [("", '{"a/~": "\\"", "\\u0062": -1e5}', True), ("/a~1~0", '"\\""', True), ("/b", "-1e5", True)],
        ),
        ('{"a": tru', [("", '{"a": tru', False), ("/a", "tru", False)]),
        ('{"a": "x\\', [("", '{"a": "x\\', False), ("/a", '"x\\', False)]),
        ('{"a', [("", '{"a', False)]),
        ("[1,]", [("", "[1,", False), ("/0", "1", True)]),
        ("[1 2]", [("", "[1 ", False), ("/0", "1", True)]),
        ("[NaN, 1]", [("", "[NaN", False), ("/0", "NaN", False)]),
        ('{"\\x": 1}', [("", "{", False)]),
        ("Sure! {}", [("", "Sure", False)]),
        ("01", [("", "01", False)]),
        ("", []),
        ("  ", []),
    ],
)
def test_values_and_what_is_not_complete(text: str, values: list[tuple[str, str, bool]]) -> None:
    assert found(text) == values


def test_a_number_at_the_end_may_go_on() -> None:
    assert found("12", whole=False) == [("", "12", False)]
    assert found("true", whole=False) == [("", "true", True)]


def test_a_name_that_comes_again_has_its_last_value() -> None:
    text = '{"a": {"b": 1, "c": [2]}, "d": 3, "a": {"b": 4}}'
    assert [(pointer, value) for pointer, value, _ in found(text)[1:]] == [
        ("/d", "3"),
        ("/a", '{"b": 4}'),
        ("/a/b", "4"),
    ]
    values = json_values(text.encode(), whole=True)
    assert [value.parent for value in values] == [-1, 0, 0, 2]
    assert json.loads(text)["a"] == {"b": 4}


def test_values_whose_pointers_are_long_are_left_out() -> None:
    name = "n" * (LONGEST_POINTER - 1)
    assert [pointer for pointer, _, _ in found(json.dumps({name: [1], f"{name}n": [1], "a": 1}))] == [
        "",
        f"/{name}",
        "/a",
    ]
    deep = json_values(b"[" * 100_000, whole=True)
    assert len(deep) == 1 + LONGEST_POINTER // len("/0")
    assert not any(value.complete for value in deep)
