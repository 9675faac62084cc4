"""response_format and structured_outputs, from JSON to the language they allow."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from neper.errors import InvalidRequestError, UnsupportedError
from neper.server.bodies.strict import RequestBody, decode_body
from neper.server.bodies.structured import ResponseFormat, StructuredOutputs, constraint_of
from neper.text.grammar import Constraint
from neper.text.matcher import Grammars
from neper.text.tokenizer import Tokenizer
from neper.text.trials import Trials
from tests.server.conftest import END, VOCAB_SIZE


class Body(RequestBody):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


def constraint(**fields: Any) -> Constraint | None:
    body = decode_body(json.dumps(fields).encode(), Body)
    return constraint_of(body.response_format, body.structured_outputs)


@pytest.fixture(scope="module")
def trials(tokenizer: Tokenizer) -> Trials:
    return Trials(tokenizer, VOCAB_SIZE, (END,))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB_SIZE, (END,))


SCHEMA = {"type": "object", "properties": {"b": {"enum": [1, "é"]}}, "required": ["b"], "additionalProperties": False}
NAMED = {"name": "answer-1", "schema": SCHEMA, "strict": True, "description": "an answer"}

LANGUAGES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}}, ["{}", '{"a": [1, null]}'], ["[]", "1", "", "{"]),
    (
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        ['{"b": 1}', '{"b":"é"}'],
        ["{}", '{"b": 2}', '{"b": 1, "c": 1}'],
    ),
    ({"structured_outputs": {"json": SCHEMA}}, ['{"b": 1}'], ['{"b": 2}']),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ['{"b": 1}'], ['{"b": 2}']),
    ({"structured_outputs": {"json": True}}, ["1", "[]", '"x"'], ["x"]),
    ({"structured_outputs": {"json": "true"}}, ["1", "[]", '"x"'], ["x"]),
    ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
    ({"structured_outputs": {"regex": "a+|[0-9]{2}"}}, ["aaa", "12"], ["1", "a1", ""]),
    (
        {"structured_outputs": {"choice": ["positive", "neg"], "json_object": False}},
        ["positive", "neg"],
        ["positiv", "x"],
    ),
    ({"structured_outputs": {"grammar": 'start: "a" /[0-9]/'}}, ["a1"], ["a", "1"]),
    ({"structured_outputs": {"grammar": 'root ::= "a" d\nd ::= [0-9]', "regex": None}}, ["a1"], ["a", "1"]),
]


@pytest.mark.parametrize(("fields", "inside", "outside"), LANGUAGES, ids=lambda value: json.dumps(value)[:50])
def test_languages(
    tokenizer: Tokenizer,
    grammars: Grammars,
    trials: Trials,
    fields: dict[str, Any],
    inside: list[str],
    outside: list[str],
) -> None:
    found = constraint(**fields)
    assert found is not None
    asyncio.run(trials.check(found.text(), next(iter(fields))))
    words = np.empty(VOCAB_SIZE // 32, dtype=np.int32)
    for text in inside + outside:
        matcher = grammars.matcher(found.text())
        fits = all(map(matcher.accept, tokenizer.encode(text, add_special_tokens=False)))
        matcher.fill(words)
        assert (fits and bool(words[0] & (1 << END))) == (text in inside), text


@pytest.mark.parametrize("fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}])
def test_free_replies(fields: dict[str, Any]) -> None:
    assert constraint(**fields) is None


def test_text_format_beside_structured_outputs() -> None:
    assert constraint(response_format={"type": "text"}, structured_outputs={"regex": "a"}) is not None


def named(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, **fields}}}


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {}}, "type"),
    ({"response_format": {"type": "xml"}}, "xml"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "schema"),
    ({"response_format": {"type": "json_schema"}}, "go together"),
    ({"response_format": {"type": "json_object", "json_schema": NAMED}}, "go together"),
    ({"response_format": {"type": "text", "json_schema": NAMED}}, "go together"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "name"),
    (named(name="a b"), "name"),
    (named(name="a\n"), "name"),
    (named(name=""), "name"),
    (named(name="n" * 65), "name"),
    (named(schema=None), "response_format.json_schema.schema is missing"),
    (named(schema=[]), "schema"),
    (named(schema="{}"), "schema"),
    (named(strict="yes"), "strict"),
    (named(extra=1), "extra"),
    (named(schema={"items": {"minlength": 1}}), "response_format.json_schema.schema.items: the keyword 'minlength'"),
    ({"structured_outputs": {}}, "exactly one"),
    ({"structured_outputs": {"json_object": False}}, "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one"),
    ({"structured_outputs": {"json": {}, "json_object": True}}, "exactly one"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json is not valid JSON"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json must be a JSON Schema"),
    ({"structured_outputs": {"json": 1}}, "json"),
    ({"structured_outputs": {"json": {"typ": 1}}}, "structured_outputs.json: the keyword 'typ'"),
    ({"structured_outputs": {"regex": ""}}, "regex must not be empty"),
    ({"structured_outputs": {"regex": 1}}, "regex"),
    ({"structured_outputs": {"choice": []}}, "choice must be"),
    ({"structured_outputs": {"choice": [""]}}, "choice must be"),
    ({"structured_outputs": {"choice": [1]}}, "choice"),
    ({"structured_outputs": {"guided": 1}}, "guided"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "not valid GBNF"),
]


@pytest.mark.parametrize(("fields", "reason"), INVALID, ids=lambda value: json.dumps(value)[:60])
def test_invalid(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        constraint(**fields)
    assert reason in error.value.message
    assert error.value.status == 400
    if reason not in ("type", "name", "schema", "extra", "guided"):  # unknown and missing fields name themselves
        assert error.value.param == next(iter(fields))


@pytest.mark.parametrize(
    "key",
    [
        "structural_tag",
        "whitespace_pattern",
        "disable_fallback",
        "disable_any_whitespace",
        "disable_additional_properties",
    ],
)
def test_unsupported(key: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        constraint(structured_outputs={"regex": "a", key: True})
    assert key in error.value.message
    assert error.value.param == "structured_outputs"


def test_two_constraints_exclude_each_other() -> None:
    with pytest.raises(InvalidRequestError) as error:
        constraint(response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    assert "give one" in error.value.message
    assert error.value.param == "structured_outputs"
