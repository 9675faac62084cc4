"""What a schema says of values: numbers to the last digit, keys however they are spelled, and words for the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from neper.errors import InvalidRequestError
from neper.text.grammar import json_schema
from neper.text.matcher import Grammars
from neper.text.tokenizer import Tokenizer
from tests.cases.conftest import RealServer

END = 2
Json = Any

ID = 738529527931269425
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHOICES = {
    name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]} for name in ("cat", "dog")
}


@pytest.fixture(scope="module")
def tokenizer(tiny: RealServer) -> Tokenizer:
    return tiny.tokenizer


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size, (END,))


def accepts(grammars: Grammars, tokenizer: Tokenizer, schema: Json, text: str, *, strict: bool = False) -> bool:
    matcher = grammars.matcher(json_schema(schema, strict=strict).text())
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(map(matcher.accept, ids)) and matcher.accept(END)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [ID]},
        {"const": {"a": [ID]}},
        {"enum": [-(2**63)]},
        {"const": 2**64},
        {"type": "integer", "maximum": 9007199254740995},
        {"exclusiveMinimum": -(2**63)},
        {"type": "number", "minimum": 1e300},
        {"const": 0.30000000000000004},
        {"multipleOf": 5e-324},
        {"multipleOf": 2**33},
        {"allOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]},
    ],
    ids=str,
)
def test_case_85_numbers_that_cannot_be_exact_are_refused_by_path(schema: Json) -> None:
    with pytest.raises(InvalidRequestError) as error:
        json_schema({"properties": {"n": schema}}, where="S")
    assert error.value.message.startswith(("S.properties.n", "S: the least common multiple"))


_NINES = "{}." + "9" * 30
EXACT: list[tuple[Json, list[str], list[str]]] = [
    ({"enum": [2**53, -(2**53)]}, [str(2**53), str(-(2**53))], [str(2**53 - 1), str(2**53 + 1)]),
    ({"const": 0.1}, ["0.1"], ["0.10000000000000001", "0.2"]),
    ({"type": "integer", "maximum": 2**53, "minimum": 2**53 - 1}, [str(2**53 - 1)], [str(2**53 + 1), str(2**53 - 2)]),
    (
        {"type": "number", "exclusiveMaximum": 2, "minimum": 0},
        ["1.9", "1.999999999", "0"],
        ["2", "2.0", _NINES.format(1)],
    ),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.001", "1"], ["0", "0.0", f"0.{'0' * 400}1", "-1"]),
    (
        {"type": "number", "exclusiveMinimum": -1, "maximum": 1},
        ["-0.9", "1", "0.5"],
        ["-1", "-1.00", _NINES.format("-0")],
    ),
    ({"type": "integer", "exclusiveMinimum": -1, "exclusiveMaximum": 1}, ["0"], ["-1", "1"]),
    ({"type": "number", "multipleOf": 3}, ["0", "9"], ["9007199254740993.0", "1e1"]),
    ({"minimum": 5, "exclusiveMinimum": True, "type": "integer"}, ["6"], ["5"]),
]


@pytest.mark.parametrize(("schema", "inside", "outside"), EXACT, ids=str)
def test_case_85_bounds_hold_once_a_reply_is_parsed(
    grammars: Grammars, tokenizer: Tokenizer, schema: Json, inside: list[str], outside: list[str]
) -> None:
    for text in inside + outside:
        assert accepts(grammars, tokenizer, schema, text) == (text in inside), text


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        (
            OPEN,
            ['{"a":1,"b":2}', '{"é":1}', '{"b":1,"b":2}'],
            [r'{"\u0061":"x"}', '{"a":1,"a":"x"}', '{"b":1,"a":"x"}'],
        ),
        ({"properties": {"\n": {"const": 1}}, "type": "object"}, [r'{"\n":1}'], [r'{"\n":2}', r'{"\u000a":2}']),
        (
            {"type": "object", "patternProperties": {"^a": {"const": 1}}},
            ['{"ab":1,"b":2}'],
            ['{"ab":2}', r'{"\u0061b":2}'],
        ),
    ],
    ids=str,
)
def test_case_86_a_key_has_one_spelling(
    grammars: Grammars, tokenizer: Tokenizer, schema: Json, inside: list[str], outside: list[str]
) -> None:
    for text in inside + outside:
        assert accepts(grammars, tokenizer, schema, text) == (text in inside), text


def test_case_86_a_key_that_comes_twice_counts_once() -> None:
    json_schema({"type": "object", "required": ["a"], "minProperties": 2})
    with pytest.raises(InvalidRequestError, match="S: minProperties can be at most one more"):
        json_schema({"type": "object", "required": ["a"], "minProperties": 3}, where="S")


HARMLESS: list[Json] = [
    {"propertyNames": {"type": "string", "title": "Key"}, "type": "object"},
    {"propertyNames": True},
    {"type": "array", "uniqueItems": False},
    *({"type": "string", "format": name} for name in ("password", "byte", "uri-reference", "iri", "regex")),
    {"format": "int64"},
    {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in CHOICES], "$defs": CHOICES},
    {"oneOf": [{"const": 1}, {"const": 2}, {"type": "string"}]},
    {"oneOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/oneOf/0"}}]},
    {"oneOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/oneOf/0"}}], "anyOf": [{"minLength": 1}]},
    {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "number", "minimum": 4}]},
]


@pytest.mark.parametrize("schema", HARMLESS, ids=str)
def test_case_87_what_constrains_nothing_passes(grammars: Grammars, schema: Json) -> None:
    grammars.matcher(json_schema(schema).text())


def test_case_87_reasons_are_in_the_terms_of_the_schema(tiny: RealServer) -> None:
    for schema, reason in (
        ({"$ref": "#"}, "response_format.json_schema.schema: refers to itself without an end"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "schema.oneOf: schemas 0 and 1 may both fit one value"),
        ({"type": "string", "pattern": "a", "maxLength": 0}, "no string fits its pattern, format and lengths together"),
    ):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        reply = tiny.post("/v1/chat/completions", response_format=form)
        assert reply.status_code == 400
        assert reason in reply.json()["error"]["message"]


INNER = {"type": "object", "properties": {"x": {"type": "integer"}}}
STRICT: list[tuple[Json, list[str], list[str]]] = [
    (INNER, ['{"x":1}', "{}"], ['{"y":1}', '{"x":1,"y":1}']),
    ({"properties": {"o": INNER}, "type": "object"}, ['{"o":{"x":1}}'], ['{"o":{"y":1}}', '{"p":1}']),
    ({"type": "array", "items": INNER}, ['[{"x":1}]'], ['[{"y":1}]']),
    ({"anyOf": [INNER, {"type": "null"}]}, ["null", '{"x":1}'], ['{"y":1}']),
    ({"$ref": "#/$defs/i", "$defs": {"i": INNER}}, ['{"x":1}'], ['{"y":1}']),
    ({"allOf": [{"$ref": "#/$defs/i"}], "$defs": {"i": INNER}}, ['{"x":1}'], ['{"y":1}']),
    ({"type": ["object", "null"]}, ["{}", "null"], ['{"y":1}']),
    ({**INNER, "additionalProperties": {"type": "string"}}, ['{"y":"z"}'], ['{"y":1}']),
    ({"type": "object", "anyOf": [INNER, {"type": "object", "properties": {"z": {}}}]}, ['{"z":1}'], ['{"y":1}']),
]


@pytest.mark.parametrize(("schema", "inside", "outside"), STRICT, ids=str)
def test_case_105_strict_objects_are_closed_at_every_level(
    grammars: Grammars, tokenizer: Tokenizer, schema: Json, inside: list[str], outside: list[str]
) -> None:
    for text in inside + outside:
        assert accepts(grammars, tokenizer, schema, text, strict=True) == (text in inside), text
        assert accepts(grammars, tokenizer, schema, text) == (text in inside or "additionalProperties" not in schema)


def test_case_105_properties_of_several_schemas_cannot_be_strict() -> None:
    schema = {"allOf": [INNER, {"type": "object", "properties": {"y": {}}}]}
    with pytest.raises(InvalidRequestError, match="S: a strict schema cannot join the properties"):
        json_schema(schema, strict=True, where="S")


CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PARAMETERS = {"parameters": {"type": "object"}}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_case_105_strict_functions_and_forms(tiny: RealServer, path: str, strict: bool) -> None:
    """A model that is led to invent keys does so only where it is not strict."""
    form: Json = {"name": "f", "strict": strict}
    schema: Json = {"type": "json_schema", "schema": {"type": "object"}, **form}
    bodies: list[Json] = [
        {"text": {"format": schema}},
        {"tools": [{"type": "function", **form, **PARAMETERS}], "tool_choice": "required"},
    ]
    if path == CHAT:
        bodies = [
            {"response_format": {"type": "json_schema", "json_schema": {**form, "schema": {"type": "object"}}}},
            {"tools": [{"type": "function", "function": {**form, **PARAMETERS}}], "tool_choice": "required"},
        ]
    bias = {str(token_id): 30 for token_id in tiny.tokenizer.encode('"', add_special_tokens=False)}
    for body in bodies:
        body |= {"seed": 1, "logit_bias": bias}
        body |= {"max_tokens": 60, "reasoning_effort": "none"} if path == CHAT else {"max_output_tokens": 300}
        body |= {} if path == CHAT else {"model": tiny.model, "input": "Hi", "reasoning": {"effort": "none"}}
        reply = (tiny.post(path, **body) if path == CHAT else tiny.http.post(path, json=body)).json()
        text = _written(reply)
        assert (json.loads(text) == {}) if strict else ('"' in text), text


def _written(reply: Json) -> str:
    """The JSON that a model wrote: a call's arguments or the text."""
    if "choices" in reply:
        message = reply["choices"][0]["message"]
        return str(
            message["tool_calls"][0]["function"]["arguments"] if message.get("tool_calls") else message["content"]
        )
    item = reply["output"][-1]
    return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
