"""JSON in what a model wrote: found by a rule that is written down again here, and checked as jsonschema checks it."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neper.errors import EngineError
from neper.text import json_form
from neper.text.json_form import JsonForm

OBJECT: dict[str, Any] = {"type": "object"}
WORDS = st.text(st.sampled_from("ab {}[]<>/\\\"':,.`\n\t é日😀") | st.characters(codec="utf-8"), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)


@st.composite
def written(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> str:
    return json.dumps(
        draw(values), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2])), allow_nan=False
    )


def found(text: str, schema: Any = OBJECT) -> str:
    start, end = JsonForm(schema).find(text)
    return text[start:end]


def problem(text: str, schema: Any = OBJECT) -> str:
    with pytest.raises(EngineError) as error:
        JsonForm(schema).find(text)
    return error.value.message


def strict(text: str, start: int) -> tuple[Any, int]:
    """Python's decoder, to which what has NaN in it fails at its end."""
    constants: list[str] = []
    value, end = json.JSONDecoder(parse_constant=constants.append).raw_decode(text, start)
    if constants:
        raise json.JSONDecodeError("NaN", text, end)
    return value, end


def first_object(text: str) -> str | None:
    """The rule once more, in Python's terms, for a schema that wants an object."""
    parts = text.split("```")
    bodies = [part.partition("\n")[2] if "\n" in part else part for part in parts[1::2]]
    for body in [text, *bodies]:
        inner = body.strip(" \t\r\n")
        try:
            value, end = strict(inner, 0)
        except ValueError:
            continue
        if end == len(inner) and isinstance(value, dict):
            return inner
    at = 0
    while at < len(text):
        if text[at] in "{[":
            try:
                value, end = strict(text, at)
            except json.JSONDecodeError as error:
                at = max(at + 1, error.pos)
                continue
            if isinstance(value, dict):
                return text[at:end]
            at = end
        else:
            at += 1
    return None


@given(written(VALUES), st.sampled_from(["", " ", "\n\t "]), st.sampled_from(["", " ", "\r\n"]))
def test_a_reply_of_json_alone(text: str, before: str, after: str) -> None:
    assert found(before + text + after, True) == text


CALM = WORDS.map(lambda text: "".join(character for character in text if character not in "{[`"))


@given(written(st.lists(VALUES) | st.dictionaries(WORDS, VALUES)), CALM, CALM)
def test_json_between_words(text: str, before: str, after: str) -> None:
    assert found(f"Here: {before}{text} {after}.", True) == text


@given(written(VALUES.filter(lambda value: "`" not in str(value))), CALM, st.sampled_from(["json", "", "JSON 5"]))
def test_json_in_a_fence(text: str, before: str, language: str) -> None:
    for ending in ("\n```\nI hope this helps [1]", "```", "\n"):
        assert found(f"Here {before}\n```{language}\n{text}{ending}", True) == text


@given(st.lists(WORDS | written(VALUES) | st.sampled_from(["```", "```json\n", "\n", "{", "[[", "NaN"]), max_size=6))
def test_the_rule(parts: list[str]) -> None:
    text = "".join(parts)
    expected = first_object(text)
    if expected is None:
        problem(text)
    else:
        assert found(text) == expected


CASES: list[tuple[Any, str, str]] = [
    (OBJECT, 'see [1] and {"a": {"b": 2}} and {"c": 3}', '{"a": {"b": 2}}'),
    (OBJECT, 'not {this}, but {"a": 1}', '{"a": 1}'),
    (OBJECT, '{"a": NaN} {"b": 1}', '{"b": 1}'),
    ({"required": ["b"], **OBJECT}, 'first {"a": 1}, then {"b": 1}', '{"b": 1}'),
    (OBJECT, '{"draft": 1}\n```json\n{"final": 1}\n```', '{"final": 1}'),
    (OBJECT, '```\n[1]\n```\n```\n{"a": "```"}\n```', '{"a": "```"}'),
    ({"type": "integer"}, "```\n42\n```", "42"),
    ({"type": "string"}, ' "x" ', '"x"'),
    ({"type": "array"}, "[[1] and so on] [2]", "[2]"),
    (OBJECT, "[" + "x" * 20_000 + "{" + "y" * 20_000 + '{"a": 1}', '{"a": 1}'),
]


@pytest.mark.parametrize(("schema", "text", "expected"), CASES)
def test_cases(schema: Any, text: str, expected: str) -> None:
    assert found(text, schema) == expected


PROBLEMS: list[tuple[Any, str, str]] = [
    (OBJECT, "", "the model's reply is empty, and should be JSON"),
    (OBJECT, " \n", "the model's reply is empty, and should be JSON"),
    (OBJECT, "Hello", "the model's reply is not JSON: Expecting value at character 0 of 'Hello'"),
    (OBJECT, "{'a': 1}", "is not JSON: Expecting property name enclosed in double quotes at character 1"),
    (OBJECT, '{"a": 1', "is not JSON"),
    (OBJECT, '{"a": NaN}', "is not JSON: NaN is no value"),
    (OBJECT, '[{"a": 1}]', "does not follow the schema: $ (type): [{'a': 1}] is not of type 'object'"),
    ({"properties": {"a": {"items": {"type": "integer"}}}}, '{"a": [1, "x"]}', "$.a[1] (properties.a.items.type): 'x'"),
    ({"required": ["b"]}, 'first {"a": 1}, then {"c": 1}', "'b' is a required property"),
    ({"type": "integer"}, "the answer is 42", "is not JSON"),
    (False, "1", "False schema does not allow 1"),
    (OBJECT, "[" * 100_000, "is nested too deeply"),
    ({"$ref": "#"}, "{}", "is nested too deeply"),
    ({"multipleOf": 0.5}, "9" * 900, "has a number too large"),
    ({"type": "integer"}, "9" * 5000, "does not follow the schema"),
]


@pytest.mark.parametrize(("schema", "text", "expected"), PROBLEMS, ids=lambda value: str(value)[:40])
def test_problems(schema: Any, text: str, expected: str) -> None:
    message = problem(text, schema)
    assert expected in message
    assert len(message) <= 300


CHECKED: list[tuple[Any, list[Any]]] = [
    ({"type": ["integer", "null"]}, [1, None, 1.0, 1.5, "1", True]),
    ({"enum": [1, "a", {"b": []}]}, [1, "a", {"b": []}, True, {"b": [0]}]),
    ({"const": [1]}, [[1], [True], 1]),
    ({"items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[], [1], [1, 2, 3], ["1"], {}]),
    ({"prefixItems": [{"type": "integer"}], "items": False}, [[], [1], [1, 2], ["x"]]),
    ({"properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}, [{}, {"a": None}]),
    ({"properties": {"a": False}, "additionalProperties": {"type": "integer"}}, [{"b": 1}, {"a": 1}, {"b": "x"}]),
    ({"patternProperties": {"^a.c": {"type": "integer"}}}, [{"abc": 1}, {"abcd": "x"}, {"xabc": "x"}, {"a\nc": "x"}]),
    (
        {"properties": {"b": True}, "patternProperties": {"^a": True}, "additionalProperties": False},
        [{"ab": 1, "b": 2}, {"c": 1}],
    ),
    ({"pattern": "^(a+)+$"}, ["aaa", "aab", "", 5, "a" * 500]),
    ({"pattern": "b.d"}, ["xbédx", "b\nd", 'q"b"d\\', "b\x7fd", "b\x01d", "b/d", "b😀d", "bd", "b\ud800d"]),
    ({"minLength": 2, "maxLength": 3}, ["😀", "😀é", "abcd"]),
    ({"minimum": 1, "exclusiveMaximum": 2.5, "multipleOf": 0.5}, [1, 2.0, 2.5, 0.5, 1.25]),
    ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/s"}], "$defs": {"s": {"type": "string"}}}, [1, "x", None]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "x", None]),
    ({"allOf": [{"minimum": 1}, {"maximum": 3}]}, [0, 2, 4]),
    ({"$ref": "#/$defs/n", "$defs": {"n": {"items": {"$ref": "#/$defs/n"}, "type": "array"}}}, [[], [[[]]], [[1]]]),
    ({"$ref": "http://json-schema.org/draft-07/schema#"}, [{"type": "object"}, {"type": 1}]),
]


@pytest.mark.parametrize(("schema", "values"), CHECKED, ids=lambda value: json.dumps(value)[:50])
def test_what_is_allowed_is_what_jsonschema_allows(schema: Any, values: list[Any]) -> None:
    oracle = jsonschema.Draft202012Validator(schema)
    seen = set()
    for value in values:
        allowed = oracle.is_valid(value)
        seen.add(allowed)
        text = json.dumps(value)
        if allowed:
            assert found(text, schema) == text
        else:
            problem(text, schema)
    assert seen == {True, False}


def test_what_llguidance_takes_beyond_the_draft() -> None:
    """Lists of items and bounds that a boolean makes exclusive, of older drafts; formats, which bind here as there."""
    older = {"items": [{"type": "integer"}], "additionalItems": False}
    assert found("[1]", older) == "[1]"
    assert "additionalItems" in problem("[1, 2]", older)
    bound = {"minimum": 5, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False}
    assert found("9", bound) == "9"
    assert "exclusiveMinimum" in problem("5", bound)
    assert found('"2024-02-29"', {"format": "date"}) == '"2024-02-29"'
    assert "does not follow the format 'date'" in problem('"2024-02-32"', {"format": "date"})
    assert found("5", {"format": "date"}) == "5"


def test_what_takes_too_much_work_is_given_up() -> None:
    doubled: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**doubled, "d40": {"type": "integer"}}}
    assert "takes too much work" in problem('"x"', schema)
    # A pattern whose automaton grows with the text.
    text = "".join(random.Random(0).choices("ab", k=100_000))
    assert "takes too much work" in problem(json.dumps(text), {"pattern": "^(a|b)*a(a|b){15}$"})


@pytest.mark.parametrize("item", [1, "word " * 100])
def test_case_121_a_long_reply_is_no_longer_than_its_work(item: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound grows with the reply: whatever the length, a schema that looks at each part a few times is checked."""
    schema = {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": ["integer", "string"], "pattern": "^w"}]}}
    text = json.dumps([item] * (60_000 if item == 1 else 600))
    monkeypatch.setattr(json_form, "MIN_CHECKS", 100)
    assert found(text, schema) == text


def test_a_pattern_costs_a_look_at_each_character() -> None:
    """Python's `re` would take for ever."""
    assert "does not follow the schema: $ (pattern)" in problem(json.dumps("a" * 5000 + "b"), {"pattern": "^(a+)+$"})


@pytest.mark.parametrize("part", ["[x", '{"', "```", '["\\"', "[[1] x", "{ ", '{"a": [x', "```\n["])
def test_reading_is_linear(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = json_form._Decoder.read
    looks = 0

    def counted(decoder: json_form._Decoder, text: str, start: int) -> tuple[Any, int]:
        """Counts the characters that are read, and those before an error, whose lines json counts."""
        nonlocal looks
        try:
            value, end = read(decoder, text, start)
        except json.JSONDecodeError as error:
            looks += 1 + error.pos - start + error.pos
            raise
        looks += end - start
        return value, end

    def work(size: int) -> int:
        nonlocal looks
        looks = 0
        assert "is not JSON" in problem(part * (size // len(part)) + "x")
        return looks

    monkeypatch.setattr(json_form._Decoder, "read", counted)
    monkeypatch.setattr(json_form, "_FORGET", 1000)
    assert work(24_000) < 9 * work(4_000)  # 36 times as many pairs of characters
