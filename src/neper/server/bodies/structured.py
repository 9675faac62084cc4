"""`response_format` and `structured_outputs`: the form that a body asks for, as a constraint."""

from __future__ import annotations

import json
from typing import Any, Literal

from neper.errors import InvalidRequestError
from neper.server.bodies.strict import Name, Refused, Strict
from neper.text import grammar
from neper.text.grammar import Constraint
from neper.text.json_schema import JsonSchema


class NamedSchema(Strict):
    name: Name
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def schema(self) -> JsonSchema | None:
        """The schema of the reply's JSON; None where the reply is free."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequestError(
                "response_format: type json_schema and the field json_schema go together", param="response_format"
            )
        if self.type == "text":
            return None
        if self.json_schema is None:
            return {"type": "object"}
        if self.json_schema.schema is None:
            raise InvalidRequestError("response_format.json_schema.schema is missing", param="response_format")
        return self.json_schema.schema

    def constraint(self) -> Constraint | None:
        schema = self.schema()
        strict = self.json_schema is not None and bool(self.json_schema.strict)
        where = "response_format.json_schema.schema"
        return None if schema is None else grammar.json_schema(schema, strict=strict, where=where)


class StructuredOutputs(Strict):
    """vLLM's field of this name: exactly one of the five."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    # vLLM's.
    structural_tag: Refused = None
    whitespace_pattern: Refused = None
    disable_fallback: Refused = None
    disable_any_whitespace: Refused = None
    disable_additional_properties: Refused = None

    def constraint(self) -> Constraint:
        self.check_unsupported("structured_outputs")
        given = [self.json, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in given) != 1:
            raise InvalidRequestError(
                "structured_outputs needs exactly one of json, regex, choice, grammar and json_object: true",
                param="structured_outputs",
            )
        if self.regex is not None:
            return grammar.regex(self.regex)
        if self.choice is not None:
            return grammar.choice(self.choice)
        if self.grammar is not None:
            return grammar.user_grammar(self.grammar)
        if self.json is None:
            return grammar.json_object()
        return grammar.json_schema(_schema(self.json), where="structured_outputs.json", param="structured_outputs")


def constraint_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> Constraint | None:
    """The constraint of the two fields of a body; None where the reply is free.

    Raises:
        InvalidRequestError: a field that contradicts itself or the other, or a schema with unknown keywords.
    """
    wanted = None if response_format is None else response_format.constraint()
    if structured_outputs is None:
        return wanted
    if wanted is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs both say what the reply looks like; give one",
            param="structured_outputs",
        )
    return structured_outputs.constraint()


def schema_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> JsonSchema | None:
    """The schema of a reply that must be JSON; None where it need not be.

    Raises:
        InvalidRequestError: a field that contradicts itself.
    """
    schema = None if response_format is None else response_format.schema()
    if schema is not None or structured_outputs is None:
        return schema
    if structured_outputs.json_object:
        return {"type": "object"}
    return None if structured_outputs.json is None else _schema(structured_outputs.json)


def _schema(value: dict[str, Any] | bool | str) -> dict[str, Any] | bool:
    """A schema, which may come as JSON in a string."""
    if not isinstance(value, str):
        return value
    try:
        parsed: Any = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"structured_outputs.json is not valid JSON: {error}", param="structured_outputs"
        ) from None
    if not isinstance(parsed, dict | bool):
        raise InvalidRequestError(
            "structured_outputs.json must be a JSON Schema: an object or a boolean", param="structured_outputs"
        )
    return parsed
