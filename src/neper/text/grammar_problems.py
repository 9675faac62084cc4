"""The reasons why a grammar cannot be used, in the terms of its author: a schema's, or a Lark grammar's."""

from __future__ import annotations

import re

_LONGEST = 400

_NOTHING = "no text fits it"
_TOO_LARGE = "it is too large, or can be read in too many ways at once"

# Words for llguidance's messages, by a part of them. The first one that fits counts.
_MESSAGES: tuple[tuple[str, str], ...] = (
    (r"NoExtension", _NOTHING),
    (r"panic|unwrap", "it cannot be read"),
    (r"Current row has|max_items|Too many items|ParserTooComplex|step_max|too many states", _TOO_LARGE),
    (r"fuel|LexerTooComplex|Lexer Error|lexer states|grammar size|size limit|too big", _TOO_LARGE),
)

# The same for schemas. Other messages are not shown.
_SCHEMA_MESSAGES: tuple[tuple[str, str], ...] = (
    (r"(m\w+) \((\S+)\) is (greater than|equal to) (exclusiveM\w+|m\w+) \((\S+)\)", r"no value fits \1 \2 and \4 \5"),
    (r"(?:required property|property) ('.*?') is unsatisfiable", r"no value fits its required property \1"),
    (r"minProperties > maxProperties|required > maxProperties", "maxProperties is less than the properties required"),
    (r"minProperties \(", "minProperties is more than the properties that there can be"),
    (r"prefixItems\[(\d+)\] is unsatisfiable", r"no value fits its prefixItems[\1]"),
    (r"required item is unsatisfiable", "no value fits its items, of which minItems requires some"),
    (r"Regex is empty", "no string fits its pattern, format and lengths together"),
    (r"Unable to determine if regex is empty", "the patterns of a string are too complex together"),
    (r"incompatible types|incompatible boolean", "no value fits all of its type, const, enum and combined schemas"),
    (r"integer interval", "no integer fits its bounds"),
    (r"multipleOf", "no multiple of multipleOf fits its bounds"),
    (r"Unsatisfiable|schema is false|is empty", "no value fits it"),
    (r"(?s)regex parse error.*error: (.*)", r"a pattern cannot be held: \1"),
    (r"not disjoint|are disjoint", "patternProperties: one key may match two patterns, which cannot be held"),
    (
        r"min/maxProperties only",
        "minProperties and maxProperties can be held only where all properties named are required",
    ),
    (r"circular references", "a reference to itself with keywords beside it cannot be held"),
    (r"stack level exceeded|schema too large", "it is too large once its references and allOf are joined"),
    (r"Failed to generate regex", "a number's bounds cannot be held"),
)


def problem_of(message: str, *, is_schema: bool) -> str:
    """Our words for llguidance's `message` about a grammar."""
    message = message.split("<state>")[0].split("<backtrace>")[0].replace("<non-verbose/>", "")
    for pattern, problem in _MESSAGES + (_SCHEMA_MESSAGES if is_schema else ()):
        found = re.search(pattern, message)
        if found is not None:
            return re.sub(r"\s+", " ", found.expand(problem))[:_LONGEST].strip()
    if is_schema:
        return "a reply cannot be held to it"
    return re.sub(r"\s+", " ", message)[:_LONGEST].strip()
