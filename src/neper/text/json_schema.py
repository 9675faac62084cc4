"""JSON Schemas as users send them: no keyword of theirs may be ignored.

llguidance passes over keywords that the schema's draft does not define, most of which are misspelt or another
dialect's. So every keyword is looked at here first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neper.errors import InvalidRequestError

JsonSchema = Mapping[str, Any] | bool

# Those that llguidance compiles.
_CONSTRAINTS = """
    anyOf oneOf allOf $ref const enum type
    items additionalItems prefixItems minItems maxItems
    properties patternProperties additionalProperties required minProperties maxProperties
    minLength maxLength pattern format
    minimum maximum exclusiveMinimum exclusiveMaximum multipleOf
"""
# Those that say something about values without constraining them; the last line is OpenAPI's.
_ANNOTATIONS = """
    $schema $id id $anchor $defs definitions $comment $vocabulary title description default deprecated readOnly
    writeOnly examples contentMediaType contentEncoding contentSchema
    example discriminator externalDocs xml
"""
_KEYWORDS = frozenset(_CONSTRAINTS.split() + _ANNOTATIONS.split())

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS = ("items", "additionalItems", "additionalProperties")


def check_keywords(schema: JsonSchema, where: str, param: str) -> None:
    """Every keyword of a schema and of those inside it constrains, is known not to, or is a vendor's (`x-…`).

    Args:
        where: how errors call the schema, `response_format.json_schema.schema` say.
        param: the request field that errors name.

    Raises:
        InvalidRequestError: a keyword that would be ignored, or something that is no schema.
    """
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequestError(f"{where} must be a JSON Schema: an object or a boolean", param=param)
    draft = schema.get("$schema") if isinstance(schema, Mapping) else None
    # In older drafts it means nothing; all other keywords are compiled, whatever the draft.
    unknown_to_draft = {"prefixItems"} if draft is not None and "2020-12" not in str(draft) else set()
    pending: list[tuple[str, Any]] = [(where, schema)]
    while pending:
        path, node = pending.pop()
        if not isinstance(node, Mapping):
            continue  # true, false, or what llguidance refuses with a reason
        for keyword in node:
            known = keyword in _KEYWORDS or (keyword.startswith("x-") and keyword != "x-guidance")
            if not known or keyword in unknown_to_draft:
                raise InvalidRequestError(f"{path}: the keyword {keyword!r} is not supported", param=param)
        for keyword in _SCHEMAS_BY_NAME:
            if isinstance(node.get(keyword), Mapping):
                pending += [(f"{path}.{keyword}.{name}", inner) for name, inner in node[keyword].items()]
        for keyword in _LISTS_OF_SCHEMAS:
            if isinstance(node.get(keyword), list):
                pending += [(f"{path}.{keyword}[{place}]", inner) for place, inner in enumerate(node[keyword])]
        pending += [(f"{path}.{keyword}", node[keyword]) for keyword in _SCHEMAS if keyword in node]
