"""Constraints and masks against languages that are written down, and against jsonschema."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from neper.errors import InvalidRequestError
from neper.text import trial
from neper.text.grammar import (
    MAX_CHARACTERS,
    Constraint,
    after_reasoning,
    choice,
    json_object,
    json_schema,
    regex,
    tool_calls,
    user_grammar,
)
from neper.text.matcher import Grammars, Matcher, fill_masks
from neper.text.tokenizer import Tokenizer
from neper.text.tools import TOOL_FORMATS
from neper.text.trials import Trials
from tests.text.conftest import Pair

VOCAB_SIZE = 601  # wider than the tokenizers, and no multiple of 32
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def units(*parts: bytes | int) -> tuple[int, ...]:
    """A text as its bytes, and control tokens (given as ids) as what no byte is."""
    return tuple(itertools.chain(*(part if isinstance(part, bytes) else [256 + part] for part in parts)))


class Language:
    """A tokenizer, and the oracle: what a token means, whatever llguidance thinks of it."""

    def __init__(self, tokenizer: Tokenizer, ends: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.ends = ends
        self.grammars = Grammars(tokenizer, VOCAB_SIZE, ends)
        self.trials = Trials(tokenizer, VOCAB_SIZE, ends)

    def spell(self, token_id: int) -> tuple[int, ...]:
        control = token_id in self.tokenizer.special_token_ids
        return units(token_id if control else self.tokenizer.token_bytes(token_id))

    def check_usable(self, constraint: Constraint, param: str = "response_format") -> None:
        asyncio.run(self.trials.check(constraint.text(), param))

    def matcher(self, constraint: Constraint) -> Matcher:
        return self.grammars.matcher(constraint.text())

    def allowed(self, matcher: Matcher) -> set[int]:
        words = np.full(-(-VOCAB_SIZE // 32), -1, dtype=np.int32)
        matcher.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    def check(self, constraint: Constraint, texts: Iterable[tuple[int, ...]], *, walks: int = 12) -> None:
        """Along random walks, the mask is what lets the text grow into one of `texts`; every walk ends in one."""
        language = set(texts)
        beginnings = {text[:length] for text in language for length in range(len(text) + 1)}
        spelled = {token_id: self.spell(token_id) for token_id in range(VOCAB_SIZE)}
        for walk in range(walks):
            draw = random.Random(walk)
            matcher = self.matcher(constraint)
            text: tuple[int, ...] = ()
            while True:
                expected = {token_id for token_id, data in spelled.items() if data and text + data in beginnings}
                if text in language:
                    expected |= set(self.ends)
                allowed = self.allowed(matcher)
                assert allowed == expected, text
                assert matcher.finished == (allowed == set(self.ends))
                token_id = draw.choice(sorted(allowed))
                assert matcher.accept(token_id)
                if token_id in self.ends:
                    assert matcher.finished
                    assert self.allowed(matcher) == set(self.ends)
                    break
                text += spelled[token_id]
            assert text in language

    def accepts(self, constraint: Constraint, text: str) -> bool:
        """Whether the grammar takes a text, as the tokenizer writes it, as a whole."""
        matcher = self.matcher(constraint)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if self.tokenizer.strips_leading_space:
            ids = self.tokenizer.encode("\n" + text, add_special_tokens=False)
            while b"".join(map(self.tokenizer.token_bytes, ids)) != text.encode():
                ids = ids[1:]
        return all(map(matcher.accept, ids)) and matcher.accept(self.ends[0])

    def walk(self, constraint: Constraint, seed: int) -> str:
        """A random text of the grammar; quotes and brackets come often, so that it ends."""
        draw = random.Random(seed)
        matcher = self.matcher(constraint)
        data = b""
        for step in itertools.count():
            assert step < 2000, data
            allowed = sorted(self.allowed(matcher))
            closing = [i for i in allowed if i in self.ends or self.tokenizer.token_bytes(i)[:1] in (b'"', b"}", b"]")]
            token_id = draw.choice(closing if closing and draw.random() < 0.6 else allowed)
            assert matcher.accept(token_id)
            if token_id in self.ends:
                return data.decode()
            data += self.tokenizer.token_bytes(token_id)
        raise AssertionError


def with_tags(pair: Pair, *, special: bool) -> Tokenizer:
    """The tokenizer with the tags as tokens of their own."""
    backend = Backend.from_file(str(pair.path / "tokenizer.json"))
    backend.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in TAGS])
    return Tokenizer(backend, {})


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def language(request: pytest.FixtureRequest) -> Language:
    pair = request.getfixturevalue(request.param)
    ends = (2, 0) if request.param == "byte_level" else (2,)
    return Language(pair.ours, ends)


@pytest.fixture(scope="module")
def tagged(byte_level: Pair) -> Language:
    return Language(with_tags(byte_level, special=False), (2,))


@pytest.fixture(scope="module")
def plain(sentencepiece: Pair) -> Language:
    return Language(sentencepiece.ours, (2,))


@pytest.fixture(scope="module")
def control(byte_level: Pair) -> Language:
    return Language(with_tags(byte_level, special=True), (2,))


CHOICES = [
    ["yes", "no"],
    ["a", "ab", "abc", "the answer", "the"],
    ['say "é"\n', "\\n", "日本", "😀", "/x/", "{a}", "%json {}", "// no comment", "it's", "\x00\x01\t", "</s>"],
]


@pytest.mark.parametrize("options", CHOICES)
def test_choices(language: Language, options: list[str]) -> None:
    language.check(choice(options), [units(option.encode()) for option in options])


def test_many_choices(language: Language) -> None:
    options = [f"option number {number}" for number in range(5000)]
    assert language.accepts(choice(options), options[4321])
    assert not language.accepts(choice(options), "option number 5000")


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("a|bc|the", ["a", "bc", "the"]),
        ("^(yes|no)$", ["yes", "no"]),
        ("[ab]{1,3}", ["".join(word) for n in (1, 2, 3) for word in itertools.product("ab", repeat=n)]),
        ("x?/é\n?", ["/é", "x/é", "/é\n", "x/é\n"]),
        (r"\d", [str(digit) for digit in range(10)]),
        ("(?i)ab", ["ab", "aB", "Ab", "AB"]),
        ("a??b", ["b", "ab"]),
    ],
)
def test_regex(language: Language, pattern: str, texts: list[str]) -> None:
    language.check(regex(pattern), [units(text.encode()) for text in texts])


def test_gbnf(language: Language) -> None:
    constraint = user_grammar('root ::= greeting " " name\ngreeting ::= "hello" | "hi"\nname ::= [ab] name?')
    assert language.accepts(constraint, "hello abba")
    assert not language.accepts(constraint, "hello c")


def test_lark(language: Language) -> None:
    constraint = user_grammar('start: pair | "-"\npair: KEY "=" KEY\nKEY: /[ab]/\n%ignore " "?')
    assert language.accepts(constraint, "a = b")
    assert language.accepts(constraint, "-")
    assert not language.accepts(constraint, "a = c")


def test_lark_control_tokens(byte_level: Pair) -> None:
    """A control token comes where the grammar names it, and text that spells it does not count."""
    language = Language(byte_level.ours, (2,))
    constraint = user_grammar('start: "a" <|im_start|> "b" | "c" <[0]>')
    language.check(constraint, [units(b"a", 1, b"b"), units(b"c", 0)])


def test_wildcard_leaves_out_ids_without_token(byte_level: Pair) -> None:
    language = Language(byte_level.ours, (2,))
    allowed = language.allowed(language.matcher(user_grammar("start: <[*]>")))
    assert allowed == set(range(byte_level.ours.vocab_size))


def test_json_spaces(language: Language) -> None:
    constraint = json_schema({"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2})
    for text in ("[1,2]", "[ 1, 2 ]", "[\n  1,\n  2\n]", "[\n\t1,\n\t2\n]", "[1 , 2]"):
        assert language.accepts(constraint, text), text
    for text in ("[1,  2]", "[1,\n\n2]", " [1,2]", "[1,2]\n", "[1,2", "[1,3]", f"[1,\n{' ' * 33}2]"):
        assert not language.accepts(constraint, text), text


def test_json_language(language: Language) -> None:
    space = ["", " ", *("\n" + " " * count for count in range(33)), *("\n" + "\t" * count for count in range(1, 17))]
    constraint = json_schema({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 1})
    language.check(
        constraint, [units(f"[{a}{v}{b}]".encode()) for a in space for v in ("true", "false") for b in space]
    )


def test_control_tokens_match_no_text(language: Language) -> None:
    matcher = language.matcher(json_schema({"type": "string"}))
    quote = next(i for i in range(VOCAB_SIZE) if language.tokenizer.token_bytes(i) == b'"')
    assert matcher.accept(quote)
    allowed = language.allowed(matcher)
    assert not allowed & language.tokenizer.special_token_ids
    assert len(allowed) > 80
    assert language.accepts(json_schema({"type": "string"}), '"<think></think>"')


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 12, "multipleOf": 3},
    {"type": "number", "minimum": 0.5, "maximum": 2},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-c]{2,4}[0-9]$"},
    {"type": "string", "format": "date"},
    {"enum": ["x", 1, None, {"k": [True]}]},
    {"const": {"a": [1, "é"]}},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}]},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False, "minItems": 2},
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"$ref": "#/$defs/tags"}},
        "required": ["name", "tags"],
        "additionalProperties": False,
        "$defs": {"tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}},
    },
    {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}], "title": "t", "examples": [5], "x-order": 1},
    {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_schemas(language: Language, schema: dict[str, Any]) -> None:
    constraint = json_schema(schema)
    language.check_usable(constraint, "response_format")
    for seed in range(6):
        text = language.walk(constraint, seed)
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


def test_json_object(language: Language) -> None:
    for seed in range(10):
        assert isinstance(json.loads(language.walk(json_object(), seed)), dict)


def test_endless_whitespace_is_impossible(language: Language) -> None:
    """Whoever takes whitespace whenever it may gets to the end all the same."""
    matcher = language.matcher(json_schema({"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}))
    data = b""
    while not matcher.finished:
        allowed = sorted(language.allowed(matcher), key=lambda i: not language.tokenizer.token_bytes(i).isspace())
        assert matcher.accept(allowed[0])
        data += language.tokenizer.token_bytes(allowed[0])
        assert len(data) < 400
    assert json.loads(data) == [1, 1, 1]


REPLIES = ['{"b": 1}', '{ "b":1}']
INNER = {"type": "object", "properties": {"b": {"const": 1}}, "required": ["b"], "additionalProperties": False}


@pytest.mark.parametrize("name", ["tagged", "control", "plain"])
def test_reasoning(request: pytest.FixtureRequest, name: str) -> None:
    """Tags may be tokens of their own, control tokens, or text of many tokens."""
    language: Language = request.getfixturevalue(name)
    inner = json_schema(INNER)
    free = after_reasoning(inner, "<think>", "</think>", language.tokenizer, opened=False)
    opened = after_reasoning(inner, "<think>", "</think>", language.tokenizer, opened=True)
    for reply in REPLIES:
        for text in (reply, f"<think></think>{reply}", f"<think>\nso <b> </thin {{}}\n</think>\n\n{reply}"):
            assert language.accepts(free, text), text
            assert language.accepts(opened, text.removeprefix("<think>")) == text.startswith("<think>"), text
        for text in (f"<think>a</think>b</think>{reply}", f"<think>a{reply}", f"<think>a</think>\n\n\n\n{reply}"):
            assert not language.accepts(free, text), text


def test_control_tags_are_not_text(control: Language) -> None:
    """Where a tag is a control token its spelling neither closes the reasoning nor comes in it."""
    constraint = after_reasoning(choice(["x"]), "<think>", "</think>", control.tokenizer, opened=True)
    letters = {control.tokenizer.token_bytes(i): i for i in range(3, 300)}
    matcher = control.matcher(constraint)
    assert all(matcher.accept(letters[bytes([byte])]) for byte in b"</think")
    assert letters[b">"] not in control.allowed(matcher)
    assert control.tokenizer.encode("</think>", add_special_tokens=False)[0] in control.allowed(matcher)


def test_tags_in_many_tokens(tagged: Language) -> None:
    """A tag that is an ordinary token may as well be spelled."""
    constraint = after_reasoning(choice(["x"]), "<think>", "</think>", tagged.tokenizer, opened=False)
    letters = {tagged.tokenizer.token_bytes(i): i for i in range(3, 300)}
    for text in (b"<think>ab</think>\nx", b"<think></think>x", b"x"):
        matcher = tagged.matcher(constraint)
        assert all(matcher.accept(letters[bytes([byte])]) for byte in text)
        assert matcher.finished


def test_reasoning_mask(tagged: Language) -> None:
    """Inside the reasoning any text may come; behind its end only what is asked for."""
    constraint = after_reasoning(choice(["ab", "c"]), "<think>", "</think>", tagged.tokenizer, opened=False)
    matcher = tagged.matcher(constraint)
    start = tagged.allowed(matcher)
    ids = {tagged.tokenizer.token_bytes(i): i for i in range(VOCAB_SIZE)}
    assert start == {ids[text] for text in (b"<think>", b"<", b"<t", b"a", b"ab", b"c", b"<th") if text in ids}
    assert matcher.accept(ids[b"<think>"])
    text = {i for i in range(3, VOCAB_SIZE) if tagged.tokenizer.token_bytes(i).isascii() and tagged.spell(i)}
    assert text <= tagged.allowed(matcher)
    assert matcher.accept(ids[b"</think>"])
    expected = {ids[data] for data in (b"a", b"ab", b"c", b"\n", b"\n\n", b"\n\n\n") if data in ids}
    assert tagged.allowed(matcher) == expected


def test_users_rule_names_stay_their_own(tagged: Language) -> None:
    inner = user_grammar('start: block reasoning\nblock: "b"\nreasoning: BREAKS\nBREAKS: "!"')
    constraint = after_reasoning(inner, "<think>", "</think>", tagged.tokenizer, opened=False)
    assert tagged.accepts(constraint, "<think>x</think>\nb!")
    assert tagged.accepts(constraint, "b!")
    assert not tagged.accepts(constraint, "<think>x</think>!")


FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "get",
        "parameters": {"properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False},
    },
    {"name": "get_all-2", "description": "no parameters", "parameters": None},
]
CALLS: dict[str, tuple[str, str, str, str]] = {  # before, a call, between calls, behind
    "hermes": (
        "<tool_call>\n",
        '{"name": "NAME", "arguments": ARGS}',
        "\n</tool_call>\n<tool_call>\n",
        "\n</tool_call>",
    ),
    "llama3_json": ("", '{"name": "NAME", "parameters": ARGS}', "; ", ""),
    "mistral": ("[TOOL_CALLS] [", '{"name": "NAME", "arguments": ARGS}', ", ", "]"),
}


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("format", TOOL_FORMATS)
@pytest.mark.parametrize("name", ["tagged", "control", "plain"])
def test_tool_calls(request: pytest.FixtureRequest, name: str, format: str, parallel: bool) -> None:
    language: Language = request.getfixturevalue(name)
    constraint = tool_calls(format, FUNCTIONS, language.tokenizer, parallel=parallel)
    language.check_usable(constraint, "tools")
    before, call, between, behind = CALLS[format]
    good = [call.replace("NAME", n).replace("ARGS", a) for n, a in (("get", '{"x": 1}'), ("get_all-2", '{"y": [{}]}'))]
    bad = [call.replace("NAME", n).replace("ARGS", a) for n, a in (("gem", "{}"), ("get", "{}"), ("get_all-2", "[]"))]
    for one in good:
        assert language.accepts(constraint, before + one + behind)
        assert language.accepts(constraint, before + one) == (behind == "")
    for one in bad:
        assert not language.accepts(constraint, before + one + behind)
    assert language.accepts(constraint, before + between.join(good * 2) + behind) == parallel
    assert not language.accepts(constraint, "")
    reasoned = after_reasoning(constraint, "<think>", "</think>", language.tokenizer, opened=False)
    assert language.accepts(reasoned, f"<think>\nhm\n</think>\n\n{before}{good[0]}{behind}")
    assert language.accepts(reasoned, f"{before}{good[1]}{behind}")


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("format", TOOL_FORMATS)
@pytest.mark.parametrize("name", ["tagged", "control", "plain"])
def test_calls_or_text(request: pytest.FixtureRequest, name: str, format: str, parallel: bool) -> None:
    language: Language = request.getfixturevalue(name)
    constraint = tool_calls(format, FUNCTIONS, language.tokenizer, parallel=parallel, text=True)
    language.check_usable(constraint, "tools")
    before, call, between, behind = CALLS[format]
    good = call.replace("NAME", "get").replace("ARGS", '{"x": 1}')
    bad = call.replace("NAME", "get").replace("ARGS", '{"x": 2}')
    bare = TOOL_FORMATS[format].bare
    for reply in (constraint, after_reasoning(constraint, "<think>", "</think>", language.tokenizer, opened=False)):
        for text in ("", "Hello.", "\n\n日本 <tool {", "[1]", "  "):
            assert language.accepts(reply, text)
            if not bare:
                assert language.accepts(reply, text + before + good + behind)
                assert not language.accepts(reply, text + before + bad + behind)
                assert not language.accepts(reply, text + before + "x")
        assert language.accepts(reply, before + good + behind)
        assert not language.accepts(reply, before + bad + behind)
        assert language.accepts(reply, before + between.join([good, good]) + behind) == parallel
        # Text that begins as a call of this form does must become one.
        assert language.accepts(reply, '{"x": 1}') != bare
        assert not language.accepts(reply, f"x{TOOL_FORMATS[format].opening}")


@pytest.mark.parametrize("format", [form.name for form in TOOL_FORMATS.values() if not form.bare])
@pytest.mark.parametrize("name", ["tagged", "control", "plain"])
def test_calls_or_another_form(request: pytest.FixtureRequest, name: str, format: str) -> None:
    language: Language = request.getfixturevalue(name)
    schema = json_schema({"properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False})
    constraint = tool_calls(format, FUNCTIONS, language.tokenizer, parallel=True, instead=schema)
    before, call, _, behind = CALLS[format]
    good = before + call.replace("NAME", "get").replace("ARGS", '{"x": 1}') + behind
    for reply in (constraint, after_reasoning(constraint, "<think>", "</think>", language.tokenizer, opened=False)):
        assert language.accepts(reply, '{"n": 5}')
        assert language.accepts(reply, good)
        for text in ("", "Hello.", '{"x": 1}', '{"n": 5}' + good, good + '{"n": 5}'):
            assert not language.accepts(reply, text)


def test_control_token_before_calls(byte_level: Pair) -> None:
    backend = Backend.from_file(str(byte_level.path / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]"])
    language = Language(Tokenizer(backend, {}), (2,))
    constraint = tool_calls("mistral", FUNCTIONS, language.tokenizer, parallel=True)
    assert language.allowed(language.matcher(constraint)) == {backend.token_to_id("[TOOL_CALLS]")}
    assert language.accepts(constraint, '[TOOL_CALLS][{"name": "get_all-2", "arguments": {}}]')


def test_random_calls(tagged: Language) -> None:
    constraint = tool_calls("hermes", FUNCTIONS, tagged.tokenizer, parallel=False)
    for seed in range(8):
        text = tagged.walk(constraint, seed)
        call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        assert call == {"name": "get", "arguments": {"x": 1}} or call["name"] == "get_all-2"


def test_masks_of_several(language: Language) -> None:
    constraints = [choice(["ab", "c"]), json_object(), regex("[0-9]+"), json_schema({"const": "x"})]
    matchers = [language.matcher(constraint) for constraint in constraints]
    words = np.full((4, -(-VOCAB_SIZE // 32)), -1, dtype=np.int32)
    fill_masks(matchers, words)
    alone = np.zeros_like(words)
    for matcher, row in zip(matchers, alone, strict=True):
        matcher.fill(row)
    assert np.array_equal(words, alone)
    assert len({row.tobytes() for row in words}) == 4
    fill_masks(matchers[2:3], words[:1])
    assert np.array_equal(words[0], alone[2])


def test_token_that_does_not_fit(language: Language) -> None:
    matcher = language.matcher(choice(["ab"]))
    assert not matcher.accept(language.ends[0])
    assert matcher.error is not None
    assert not matcher.finished
    assert language.allowed(matcher) == set()


def test_without_end_tokens(byte_level: Pair) -> None:
    language = Language(byte_level.ours, ())
    matcher = language.matcher(choice(["ab"]))
    ids = {byte_level.ours.token_bytes(i): i for i in range(3, 300)}
    assert matcher.accept(ids[b"a"])
    assert matcher.accept(ids[b"b"])
    assert matcher.finished
    assert language.allowed(matcher) == set()


BAD_SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "objekt"}, "the schema.type: must be one or more of null, boolean"),
    ({"type": "string", "minlength": 3}, "the schema: the keyword 'minlength' is not supported"),
    ({"properties": {"a": {"items": {"nullable": True}}}}, "the schema.properties.a.items: the keyword 'nullable'"),
    ({"anyOf": [{"type": "string"}, {"maxlength": 1}]}, "the schema.anyOf[1]: the keyword 'maxlength'"),
    ({"$defs": {"d": {"typ": "string"}}}, "the schema.$defs.d: the keyword 'typ'"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "'x-guidance'"),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": []}, "'prefixItems'"),
    ({"not": {"type": "string"}}, "'not'"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    ({"type": "string", "format": "colour"}, "the schema: the format 'colour' is not known"),
    ({"type": "string", "pattern": "(?=a)"}, "a pattern cannot be held: look-around"),
    ({"$ref": "#/$defs/none"}, "the schema: the reference '#/$defs/none' leads nowhere"),
    ({"$ref": "https://example.org/schema.json"}, "is not one into this schema"),
    ({"$ref": "#/x-mine", "x-mine": {"minlength": 1}}, "refers to something that is no schema"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "no value fits minimum 5 and maximum 3"),
    ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "the schema.oneOf: schemas 0 and 1 may both fit one value"),
    ({"minLength": "5"}, "the schema.minLength: must be an integer"),
    ({"properties": []}, "the schema.properties: must be an object"),
    ({"$ref": "#"}, "the schema: refers to itself without an end"),
    ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}, "the schema.$defs.a: refers to itself"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "no value fits it"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no value fits it"),
    ({"required": ["a"], "additionalProperties": False, "type": "object"}, "no value fits its required property 'a'"),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 3}, "minProperties can be at most one more"),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, "can be held only where all properties"),
    ({"patternProperties": {"^a": {}, "b": {}}}, "patternProperties: one key may match two patterns"),
    ({"type": "string", "pattern": "^a$", "minLength": 2}, "no string fits its pattern, format and lengths together"),
    ({"type": "string", "enum": [1]}, "no value fits all of its type, const, enum"),
    ({"propertyNames": {"pattern": "a"}}, "'propertyNames'"),
    ({"prefixItems": [{}], "additionalItems": False}, "additionalItems means nothing beside prefixItems"),
    ({"const": "\x7f"}, "the schema.const: a string with control characters"),
    ({"enum": list(range(70_000))}, "has more than 65536 values"),
    ({"required": ["a"] * 70_000}, "has more than 65536 values"),
    ({"properties": {f"p{n}": {} for n in range(10_001)}}, "has more than 10000 subschemas"),
    ({"oneOf": [{"const": n} for n in range(101)]}, "the schema.oneOf: has more than 100 schemas"),
    (False, "no value fits it"),
    ([], "must be a JSON Schema"),
]


@pytest.mark.parametrize(("schema", "reason"), BAD_SCHEMAS, ids=lambda value: json.dumps(value)[:40])
def test_bad_schemas(language: Language, schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        language.check_usable(json_schema(schema), "response_format")
    assert reason in error.value.message
    assert error.value.param == "response_format"


NONSENSE: dict[str, Any] = {  # a value that only those refuse who look at it
    **dict.fromkeys(["minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"], "x"),
    **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"], "x"),
    **{name: [{"type": "none"}] for name in ("anyOf", "oneOf", "allOf", "prefixItems")},
    **{name: {"type": "none"} for name in ("items", "additionalProperties", "additionalItems")},
    **{"pattern": "(", "patternProperties": {"(": {}}, "format": "none", "type": "none", "enum": [], "$ref": "#/none"},
    **{"properties": {"a": {"type": "none"}}, "required": 3},
}
DRAFTS = [jsonschema.Draft202012Validator, jsonschema.Draft7Validator, jsonschema.Draft4Validator]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("keyword", sorted({k for d in DRAFTS for k in d.VALIDATORS} - {"const"}))
def test_no_keyword_is_ignored(tagged: Language, keyword: str, draft: Any) -> None:
    """Every keyword that a draft's validator checks is compiled or refused, also under the other drafts."""
    schema = {"$schema": draft.META_SCHEMA["$schema"], keyword: NONSENSE.get(keyword)}
    if keyword == "additionalItems":
        schema["items"] = [{}]
    with pytest.raises(InvalidRequestError) as error:
        tagged.check_usable(json_schema(schema), "response_format")
    assert keyword in NONSENSE or f"the keyword {keyword!r} is not supported" in error.value.message


BAD_GRAMMARS: list[tuple[Callable[[], Constraint], str]] = [
    (lambda: regex("["), "unclosed character class"),
    (lambda: regex("a(?=b)"), "look-around"),
    (lambda: regex(r"(a)\1"), "backreferences"),
    (lambda: regex(""), "regex must not be empty"),
    (lambda: choice([]), "choice must be a list"),
    (lambda: choice(["a", ""]), "none of them empty"),
    (lambda: choice(["\ud800"]), "cannot be compiled"),
    (lambda: user_grammar("nothing"), "Expected token"),
    (lambda: user_grammar('rule: "a"'), "no start rule"),
    (lambda: user_grammar('start: "a" other'), 'unknown name: "other"'),
    (lambda: user_grammar("start: <|none|>"), "special token"),
    (lambda: user_grammar("root ::= ((("), "not valid GBNF"),
    (lambda: user_grammar("start: <[9999]>"), "too large"),
    (lambda: user_grammar("start: @other"), "other"),
    (lambda: user_grammar('root ::= "a"' + " " * MAX_CHARACTERS), "more than 262144 characters"),
]


@pytest.mark.parametrize(("make", "reason"), BAD_GRAMMARS)
def test_bad_grammars(language: Language, make: Callable[[], Constraint], reason: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        language.check_usable(make(), "structured_outputs")
    assert reason in error.value.message
    assert error.value.param == "structured_outputs"


def test_bad_functions(tagged: Language) -> None:
    def problem(functions: list[dict[str, Any]]) -> str:
        with pytest.raises(InvalidRequestError) as error:
            tagged.check_usable(tool_calls("hermes", functions, tagged.tokenizer, parallel=True), "tools")
        assert error.value.param == "tools"
        return error.value.message

    assert "no function" in problem([])
    assert "two functions named 'get'" in problem([FUNCTIONS[0], FUNCTIONS[0]])
    assert "'a b'" in problem([{"name": "a b"}])
    assert "the parameters of f must be" in problem([FUNCTIONS[0], {"name": "f", "parameters": {"type": "string"}}])
    assert "the parameters of f.properties.a: the keyword 'sort'" in problem(
        [{"name": "f", "parameters": {"properties": {"a": {"sort": 1}}}}]
    )
    broken = {"name": "f", "parameters": {"properties": {"a": {"enum": []}}, "required": ["a"]}}
    assert "parameters_of_f: no value fits its required property 'a'" in problem([FUNCTIONS[0], broken])


def chain(length: int) -> str:
    rules = "\n".join(f"rule{n}: rule{n + 1}" for n in range(length))
    return f'start: rule0\n{rules}\nrule{length}: "a"'


def references(length: int) -> dict[str, Any]:
    schemas: dict[str, Any] = {f"s{n}": {"properties": {"x": {"$ref": f"#/$defs/s{n + 1}"}}} for n in range(length)}
    return {"$defs": {**schemas, f"s{length}": {"type": "string"}}, "$ref": "#/$defs/s0"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


PATTERNS = [{"anyOf": [{"type": "string", "pattern": f"a{n}"}, {"type": "integer", "minimum": n}]} for n in range(40)]
INTERSECTION = "start: A\nA: " + " & ".join(f"/.*a.{{{n}}}/" for n in range(100))
HOSTILE: list[tuple[Callable[[], Constraint], str]] = [
    (lambda: user_grammar(chain(8000)), "nested too deeply"),
    (lambda: json_schema(references(3000)), "nested too deeply"),
    (lambda: json_schema(nested(400)), "nested more than 100 deep"),
    (lambda: regex("(" * 9000 + "a" + ")" * 9000), "invalid regex"),
    (lambda: user_grammar("start: " + "(" * 9000 + '"a"' + ")" * 9000), "too deeply nested"),
    (lambda: json_schema({"allOf": PATTERNS}), "more than 2 seconds"),
    (lambda: user_grammar(INTERSECTION), "more than 2 seconds"),
    (lambda: json_schema({"enum": ["x" * MAX_CHARACTERS]}), "characters"),
]


@pytest.mark.parametrize(("make", "reason"), HOSTILE)
def test_hostile_grammars(
    tagged: Language, make: Callable[[], Constraint], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would overflow the stack or compile for minutes is an error, and the next grammar is served."""
    monkeypatch.setattr(trial, "WATCHDOG_SECONDS", 600.0)  # on busy cores a trial's CPU time takes long
    with pytest.raises(InvalidRequestError) as error:
        tagged.check_usable(make(), "structured_outputs")
    assert reason in error.value.message
    assert len(error.value.message) < 600
    tagged.check_usable(choice(["a"]), "structured_outputs")


def test_exploding_regex_ends_in_an_error(tagged: Language) -> None:
    """A pattern may outgrow the limits later: then nothing may come, and no end either."""
    matcher = tagged.matcher(regex("(a{1,1000}){1,1000}b"))
    letter = next(i for i in range(VOCAB_SIZE) if tagged.tokenizer.token_bytes(i) == b"a")
    for _ in range(500):
        if letter not in tagged.allowed(matcher) or not matcher.accept(letter):
            break
    assert matcher.error is not None
    assert tagged.allowed(matcher) == set()
