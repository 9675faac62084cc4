"""The form of JSON that a reply must have: the JSON is found in a model's free text, and checked against its schema.

llguidance checks formats and patterns, as it does where it constrains a reply. It reads a text once for any pattern.
The jsonschema library checks everything else.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from llguidance import LLMatcher

from neper.errors import EngineError
from neper.text.grammar_vocabulary import bytes_tokenizer
from neper.text.json_schema import JsonSchema
from neper.text.matcher import LIMITS
from neper.text.reader import SPACES

MIN_CHECKS = 50_000
CHECKS_A_CHARACTER = 10
"""Bound of the work on one reply, in keywords of a schema that are checked, and 64 characters that a pattern reads.

It grows with the reply. It is not a time, so that slow and fast machines accept the same replies.
"""

MAX_MESSAGE = 300  # characters of an error: it quotes the reply

_FENCE = "```"
_OPENING = re.compile(r"[{\[]")
_FORGET = 10_000  # characters; json counts the lines before each error

Keyword = Callable[[Any, Any, Any, Any], Iterable[Any] | None]
"""The function of jsonschema for a keyword's errors: (validator, the keyword's value, instance, schema)."""


class JsonForm:
    """A schema that replies are checked against. Trials.check must have accepted it: then it is a schema, and its
    references lead only into it.
    """

    def __init__(self, schema: JsonSchema) -> None:
        self._schema = schema

    def find(self, text: str) -> tuple[int, int]:
        """The place of the JSON in a text: its first character, and the one after its last.

        It is the first of these that the schema allows:

        1. the whole text, without white space around it;
        2. the text in a fence of three backticks, without the rest of the line on which that opens;
        3. a value that begins with `{` or `[`, read from the text's beginning on. Reading goes on after a value, or at
           the place where a value failed (with NaN in it: at its end). So no value is part of another, and each
           character is read once.

        It can take seconds: call it in a thread.

        Raises:
            EngineError: there is none. The message has the reason why the first one is not allowed.
        """
        from jsonschema_specifications import REGISTRY

        limits = _Limits(MIN_CHECKS + CHECKS_A_CHARACTER * len(text))
        # Without a registry it would download references. This one has JSON Schema's own schemas, as llguidance has.
        validator = _validator_class()(self._schema, registry=REGISTRY, format_checker=limits)
        problem: str | None = None
        try:
            for value, start, end in _values(text):
                error = next(validator.iter_errors(value), None)
                if error is None:
                    return start, end
                problem = problem or f"does not follow the schema: {_where(error)}: {error.message}"
        except _TooMuchError:
            problem = "takes too much work to be checked against the schema"
        except RecursionError:
            problem = "is nested too deeply to be checked against the schema"
        except ArithmeticError:
            problem = "has a number too large to be checked against the schema"
        raise EngineError(f"the model's reply {problem or _why_not(text)}"[:MAX_MESSAGE])


class _TooMuchError(Exception):
    """It takes too much work."""


class _Limits:
    """The limit of one search, and the checks of strings for which Python's `re` could take for ever."""

    def __init__(self, checks: int) -> None:
        self._left = checks
        self._matchers: dict[tuple[str, str], LLMatcher] = {}

    def count(self, checks: int = 1) -> None:
        self._left -= checks
        if self._left < 0:
            raise _TooMuchError

    def fits(self, keyword: str, value: str, text: str) -> bool:
        """True where a string follows a `pattern` or a `format`."""
        self.count(1 + len(text) // 64)
        matcher = self._matchers.get((keyword, value))
        if matcher is None:
            schema = {"type": "string", keyword: value}
            grammar = json.dumps({"grammars": [{"name": "json", "json_schema": schema}]})
            matcher = self._matchers[keyword, value] = LLMatcher(bytes_tokenizer(), grammar, log_level=0, limits=LIMITS)
        matcher.reset()
        # llguidance's spelling of strings: DEL is a control character to it. Half a surrogate has no bytes.
        data = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode("utf-8", "replace")
        whole = matcher.try_consume_tokens(list(data)) == len(data)
        if matcher.is_error():
            raise _TooMuchError
        return whole and matcher.is_accepting()


_Found = tuple[Any, int, int]
"""A value, its beginning, and its end."""


class _Decoder:
    """Python's JSON decoder without its extensions of JSON."""

    def __init__(self) -> None:
        self._constants: list[str] = []
        self._decoder = json.JSONDecoder(parse_constant=self._constants.append, parse_int=_integer)

    def read(self, text: str, start: int) -> tuple[Any, int]:
        """The value that begins at `start`, and its end. Raises JSONDecodeError."""
        self._constants.clear()
        value, end = self._decoder.raw_decode(text, start)
        if self._constants:
            raise json.JSONDecodeError(f"{self._constants[0]} is no value", text, end)
        return value, end

    def whole(self, text: str) -> Any:
        """The value of a whole text. Raises JSONDecodeError."""
        value, end = self.read(text, 0)
        if end != len(text):
            raise json.JSONDecodeError("More text", text, end)
        return value


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 1000 else float(digits)  # Python refuses very long ones


def _values(text: str) -> Iterator[_Found]:
    """The values that JsonForm.find tries, in its order. Reads the text twice at most."""
    decoder = _Decoder()
    yield from _whole(decoder, text, 0)
    place = 0
    for number, part in enumerate(text.split(_FENCE)):
        if number % 2:
            line, newline, body = part.partition("\n")
            yield from _whole(decoder, body, place + len(line) + 1) if newline else _whole(decoder, part, place)
        place += len(part) + len(_FENCE)
    at = place = 0
    while (opening := _OPENING.search(text, at)) is not None:
        if (start := opening.start()) > _FORGET:
            text, place, start = text[start:], place + start, 0
        try:
            value, at = decoder.read(text, start)
        except json.JSONDecodeError as error:
            at = max(error.pos, start + 1)
        else:
            yield value, place + start, place + at


def _whole(decoder: _Decoder, text: str, place: int) -> Iterator[_Found]:
    """The value of a whole text, if it is one. The text stands at `place` in a larger one."""
    inner = text.strip(SPACES)
    try:
        value = decoder.whole(inner)
    except json.JSONDecodeError:
        return
    start = place + len(text) - len(text.lstrip(SPACES))
    yield value, start, start + len(inner)


def _why_not(text: str) -> str:
    """The defect of a text without JSON in it."""
    inner = text.strip(SPACES)
    if not inner:
        return "is empty, and should be JSON"
    try:
        _Decoder().whole(inner)
    except json.JSONDecodeError as error:
        return f"is not JSON: {error.msg} at character {error.pos} of {inner[:100]!r}"
    raise AssertionError("a text that is JSON was looked at")


def _where(error: Any) -> str:
    path = ".".join(map(str, error.absolute_schema_path))
    return f"{error.json_path} ({path})" if path else str(error.json_path)


@functools.cache
def _validator_class() -> Any:
    """The keywords of JSON Schema's latest draft, and those of older ones that llguidance takes. Each is counted.

    The limits travel as the format checker, since validators of parts of a schema inherit it.
    """
    from jsonschema import Draft7Validator, Draft202012Validator
    from jsonschema.exceptions import ValidationError
    from jsonschema.validators import extend

    latest: dict[str, Keyword] = dict(Draft202012Validator.VALIDATORS)
    older: dict[str, Keyword] = dict(Draft7Validator.VALIDATORS)

    def string(keyword: str) -> Keyword:
        def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
            if isinstance(instance, str) and not validator.format_checker.fits(keyword, value, instance):
                yield ValidationError(f"{instance!r} does not follow the {keyword} {value!r}")

        return check

    def pattern_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, dict):
            for pattern, inner in value.items():
                for name, item in instance.items():
                    if validator.format_checker.fits("pattern", pattern, name):
                        yield from validator.descend(item, inner, path=name, schema_path=pattern)

    def additional_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, dict):
            patterns, fits = schema.get("patternProperties", {}), validator.format_checker.fits
            for name, item in instance.items():
                if name in schema.get("properties", {}) or any(fits("pattern", pattern, name) for pattern in patterns):
                    continue
                if value is False:
                    yield ValidationError(f"the property {name!r} is not allowed")
                else:
                    yield from validator.descend(item, value, path=name)

    def items(validator: Any, value: Any, instance: Any, schema: Any) -> Iterable[Any] | None:
        return (older if isinstance(value, list) else latest)["items"](validator, value, instance, schema)

    def exclusive(keyword: str, limit: str) -> Keyword:
        def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterable[Any] | None:
            if isinstance(value, bool):  # of `minimum` or `maximum`, in draft 4
                if not value or limit not in schema:
                    return None
                value = schema[limit]
            return latest[keyword](validator, value, instance, schema)

        return check

    def counted(function: Keyword) -> Keyword:
        def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterable[Any] | None:
            validator.format_checker.count()
            return function(validator, value, instance, schema)

        return check

    keywords: dict[str, Keyword] = {
        **latest,
        "pattern": string("pattern"),
        "format": string("format"),
        "patternProperties": pattern_properties,
        "additionalProperties": additional_properties,
        "items": items,
        "additionalItems": older["additionalItems"],
        "exclusiveMinimum": exclusive("exclusiveMinimum", "minimum"),
        "exclusiveMaximum": exclusive("exclusiveMaximum", "maximum"),
    }
    return extend(Draft202012Validator, {name: counted(function) for name, function in keywords.items()})
