"""Constraints: the form of a reply, as pieces of grammar that can be put into one another.

Each piece is a grammar of llguidance's (Lark with extensions, or a JSON Schema) under a name. So a user's grammar keeps
its own rule names inside the grammar around it. `neper.text.matcher` runs them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neper.errors import InvalidRequestError
from neper.text.json_schema import JsonSchema, held_schema
from neper.text.tokenizer import Tokenizer
from neper.text.tools import FUNCTION_NAME, TOOL_FORMATS

MAX_CHARACTERS = 256 * 1024
"""The longest grammar, serialised."""

# A space, or a line break and its indentation. It is bounded, so that a model cannot write whitespace for ever.
_WHITESPACE = r"\x20|\n(\x20{0,32}|\t{0,16})"
# Text that is certain may come in any tokens, not only in those that the tokenizer would make. The model chooses them,
# and they are part of the scores.
_ANY_TOKENS = '%llguidance {"no_forcing": true}'
_ANYTHING = "/(?s:.*)/"
# Without \uXXXX a string has one spelling. So a key with another spelling than a named property is another key.
_JSON_OPTIONS = {"whitespace_pattern": _WHITESPACE, "json_allowed_escapes": 'nrbtf\\"'}


@dataclass(frozen=True)
class Constraint:
    """Named grammars, of which the first is entered; it refers to the others."""

    grammars: tuple[Mapping[str, Any], ...]

    def text(self) -> str:
        """llguidance's serialised form, as `SamplingParams.grammar` holds it."""
        entry = _lark("entry", f"{_ANY_TOKENS}\nstart: @{self.grammars[0]['name']}")
        return json.dumps({"grammars": [*entry.grammars, *self.grammars]})


def json_object() -> Constraint:
    """Any JSON object."""
    return json_schema({"type": "object"})


def json_schema(
    schema: JsonSchema, *, strict: bool = False, where: str = "the schema", param: str = "response_format"
) -> Constraint:
    """JSON that a schema allows, with properties in the schema's order.

    Args:
        strict: objects have no other properties than those named, unless `additionalProperties` allows them.
        where: the name of the schema in errors.
        param: the request field that errors name.

    Raises:
        InvalidRequestError: a schema that cannot be held.
    """
    return Constraint((_schema_grammar("json", schema, where, param, closed=strict),))


def regex(pattern: str, *, param: str = "structured_outputs") -> Constraint:
    """A text that the pattern matches as a whole (in the syntax of Rust's `regex`; `\\d` is 0 to 9)."""
    if not pattern:
        raise InvalidRequestError("regex must not be empty", param=param)
    from llguidance import regex_to_lark

    return _lark("regex", f"start: TEXT\nTEXT: /{regex_to_lark(pattern, 'd')}/")


def choice(options: Sequence[str], *, param: str = "structured_outputs") -> Constraint:
    """One of these texts, exactly."""
    if not options or not all(options):
        raise InvalidRequestError("choice must be a list of at least one string, none of them empty", param=param)
    # One terminal: as alternatives of a rule they would count against the parser's limit.
    return _lark("choice", f"start: CHOICE\nCHOICE: {' | '.join(map(_quoted, options))}")


def user_grammar(text: str, *, param: str = "structured_outputs") -> Constraint:
    """A grammar that a user wrote: llguidance's Lark, or llama.cpp's GBNF, whose rules are defined by `::=`.

    Raises:
        InvalidRequestError: it is too long, or GBNF that cannot be read.
    """
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequestError(f"the grammar has more than {MAX_CHARACTERS} characters", param=param)
    if "::=" in text:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except Exception as error:  # its own class, and others that its parser raises for some input
            raise InvalidRequestError(f"the grammar is not valid GBNF: {error}", param=param) from None
    return _lark("grammar", text)


def tool_calls(
    format: str,
    functions: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    *,
    parallel: bool,
    text: bool = False,
    instead: Constraint | None = None,
    param: str = "tools",
) -> Constraint:
    """Calls of these functions in the form of a model: at least one, and with `parallel` any number.

    Args:
        format: a name among TOOL_FORMATS.
        functions: OpenAI's function objects: `name`, `parameters`, a schema of the arguments (absent: any object), and
            `strict`, as `json_schema` takes it.
        text: any text may come before the calls, and in place of them.
        instead: JSON that may come in place of the calls. Their format must then not be `bare`, since a lexer could not
            distinguish them.

    Raises:
        InvalidRequestError: a name that is none or occurs twice, or a schema that is not one of an object.
    """
    if not functions:
        raise InvalidRequestError("there is no function to call", param=param)
    key = "parameters" if format == "llama3_json" else "arguments"
    heads: list[str] = []
    grammars: list[Mapping[str, Any]] = []
    for function in functions:
        grammar = _arguments_grammar(function, param)
        if grammar["name"] in [other["name"] for other in grammars]:
            raise InvalidRequestError(f"there are two functions named {function['name']!r}", param=param)
        head = f'{{"name": "{function["name"]}", "{key}": '
        heads.append(f'{_quoted(head)} @{grammar["name"]} "}}"')
        grammars.append(grammar)
    form = TOOL_FORMATS[format]
    opening = _tag(form.opening, tokenizer)
    first = "lead" if text else opening
    call = f"call: {' | '.join(heads)}"
    if form.name == "hermes":
        start, more = f"start: {first} body", f'("\\n" {opening} body)*'
        lines = [call, f'body: "\\n" call "\\n" {_tag("</tool_call>", tokenizer)}']
    elif form.name == "llama3_json":
        start, more = "start: call", '("; " call)*'
        lines = [call]
    else:
        start, more = f"start: {first} list", ""
        others = '(", " call)*' if parallel else ""
        lines = [call, f'list: [" "] "[" call {others} "]"']
    if parallel:
        start = f"{start} {more}"
    if text:
        start += " | TEXT"
        # If calls need no tag, text that begins with a brace is one.
        lines.append(f"TEXT: {_without(form.opening)}" + (r" & /[ \t\r\n]*([^ \t\r\n{](?s:.*))?/" if form.bare else ""))
        lines += [] if form.bare else _up_to("lead", form.opening, tokenizer)
    if instead is not None:
        start += f" | @{instead.grammars[0]['name']}"
        grammars += instead.grammars
    return Constraint((*_lark("calls", "\n".join([start, *lines])).grammars, *grammars))


def after_reasoning(constraint: Constraint, open: str, close: str, tokenizer: Tokenizer, *, opened: bool) -> Constraint:
    """The constraint, behind the model's reasoning and up to three line breaks.

    The reasoning ends with the first `close`. A tag that is a control token is that token. Any other tag is text, in
    any tokens.

    Args:
        opened: the prompt has opened the reasoning, so it comes first and must be closed. Otherwise it may be absent.
    """
    lines = ["block: reasoning BREAKS?", *_up_to("reasoning", close, tokenizer), r"BREAKS: /\n{1,3}/"]
    inner = f"@{constraint.grammars[0]['name']}"
    start = f"start: block {inner}" if opened else f"start: ({_tag(open, tokenizer)} block)? {inner}"
    return Constraint((*_lark("reply", "\n".join([start, *lines])).grammars, *constraint.grammars))


def _lark(name: str, text: str) -> Constraint:
    return Constraint(({"name": name, "lark_grammar": text},))


def _schema_grammar(name: str, schema: JsonSchema, where: str, param: str, *, closed: bool) -> dict[str, Any]:
    held = held_schema(schema, where, param, closed=closed)
    return {"name": name, "json_schema": {**held, "x-guidance": _JSON_OPTIONS}}


def _arguments_grammar(function: Mapping[str, Any], param: str) -> dict[str, Any]:
    name = function["name"]
    if not FUNCTION_NAME.fullmatch(name):
        raise InvalidRequestError(f"a function's name is 1 to 64 letters, digits, _ and -, not {name!r}", param=param)
    where = f"the parameters of {name}"
    schema = function.get("parameters")
    schema = {} if schema is None else schema
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InvalidRequestError(f"{where} must be a JSON Schema of type object", param=param)
    closed = bool(function.get("strict"))
    return _schema_grammar(f"parameters_of_{name}", {"type": "object", **schema}, where, param, closed=closed)


def _control_token(text: str, tokenizer: Tokenizer) -> int | None:
    data = text.encode()
    return next((place for place in sorted(tokenizer.special_token_ids) if tokenizer.token_bytes(place) == data), None)


def _up_to(rule: str, tag: str, tokenizer: Tokenizer) -> list[str]:
    """A rule for any text and the first `tag`, which is a control token, or text in any tokens."""
    if _control_token(tag, tokenizer) is None:
        return [f"{rule}[lazy]: {_ANYTHING} {_quoted(tag)}"]
    return [f"{rule}: BEFORE_{rule.upper()} {_tag(tag, tokenizer)}", f"BEFORE_{rule.upper()}: {_without(tag)}"]


def _without(tag: str) -> str:
    return f"{_ANYTHING} & ~({_ANYTHING} {_quoted(tag)} {_ANYTHING})"


def _tag(text: str, tokenizer: Tokenizer) -> str:
    token_id = _control_token(text, tokenizer)
    return _quoted(text) if token_id is None else f"<[{token_id}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
