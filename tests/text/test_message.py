"""The message parser against a parse of the whole text at once, however the text is cut into tokens and those grouped.

The oracle finds calls by a regular expression and the end of arguments by the json module; it sees all text at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neper.text.message import MessageParser
from neper.text.reasoning import REASONING_TAGS
from neper.text.tools import TOOL_FORMATS
from tests.helpers.random_tokens import Fields, Spelled, parse, slices, text_tokens

THINK = REASONING_TAGS["think"]
HERMES = TOOL_FORMATS["hermes"]
HEAD = re.compile(r'<tool_call>\s*\{\s*"name"\s*:\s*"([\w-]{1,64})"\s*,\s*"arguments"\s*:\s*(?=\{)', re.ASCII)
CLOSING = "</tool_call>"
BEGUN = "(?:".join(re.escape(character) for character in CLOSING) + ")?" * (len(CLOSING) - 1)
# The end of a call, whole or cut by the end of the text.
TAIL = re.compile(rf"\s*\}}\s*{CLOSING}|\s*(?:\}}\s*(?:{BEGUN})?)?\Z", re.ASCII)


def oracle(text: str, *, reasons: bool = True, opened: bool = False, tools: bool = True) -> Fields:
    reasoning, rest = "", text
    begun = re.match(r"[ \t\r\n]*<think>", text)
    if reasons and (opened or begun):
        thought, tag, rest = (text if opened else text[begun.end() :]).partition("</think>")  # type: ignore[union-attr]
        reasoning = thought.lstrip("\n")
        if tag:
            reasoning, rest = reasoning.rstrip("\n"), rest.lstrip("\n")
    content, calls = "", []
    while tools and (match := HEAD.search(rest)):
        content += rest[: match.start()].rstrip(" \t\r\n")
        try:
            _, end = json.JSONDecoder().raw_decode(rest, match.end())
        except ValueError:
            end = len(rest)
        calls.append((match[1], rest[match.end() : end]))
        tail = TAIL.match(rest, end)
        assert tail is not None
        rest = rest[tail.end() :].lstrip(" \t\r\n")
    return Fields(reasoning, content + rest, tuple(calls))


WORDS = st.text(
    st.sampled_from("ab {}[]<>/\\\"':,.\n\t é日本語한ش😀👩‍👧�") | st.characters(codec="utf-8"), max_size=12
).filter(lambda text: "think>" not in text)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
SPACE = st.sampled_from(["", " ", "\n", "\n  "])


@st.composite
def call_texts(draw: st.DrawFn) -> str:
    arguments = json.dumps(
        draw(st.dictionaries(WORDS, VALUES, max_size=3)),
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 2])),
    )
    space = [draw(SPACE) for _ in range(6)]
    return (
        f'<tool_call>{space[0]}{{{space[1]}"name":{space[2]}"{draw(NAMES)}",{space[3]}"arguments": {arguments}'
        f"{space[4]}}}{space[5]}</tool_call>"
    )


NO_CALLS = [
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>\n{}\n</tool_call>",
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "no name", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f\\u0061", "arguments": {}}</tool_call>',
    '<tool_call>{"mood": 1, "name": "f", "arguments": {}}</tool_call>',
    "<tool_call >",
    "</tool_call>",
    "<tool",
    "</think>",
]
BODIES = st.lists(WORDS | call_texts() | st.sampled_from(NO_CALLS), max_size=4).map("".join)


@st.composite
def messages(draw: st.DrawFn) -> tuple[str, bool]:
    """A text, and whether it begins inside the reasoning."""
    opened = draw(st.booleans())
    thought = draw(WORDS) + draw(st.sampled_from(["", "<tool_call>", "<think>", "\n", "\n\n"]))
    form = draw(st.sampled_from(["none", "reasoned", "open"]))
    begin = "" if opened else draw(st.sampled_from(["", "\n"])) + "<think>" + draw(SPACE)
    body = draw(BODIES)
    if form == "none":
        return body, False
    return begin + thought + (
        "</think>" + draw(st.sampled_from(["", "\n\n"])) + body if form == "reasoned" else ""
    ), opened


@pytest.mark.slow
@given(
    messages(),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 400), max_size=60),
    st.integers(1, 5),
    st.none() | st.integers(0, 400),
)
def test_fields_are_those_of_the_whole_text(
    message: tuple[str, bool], reasons: bool, tools: bool, cuts: list[int], group: int, length: int | None
) -> None:
    text, opened = message
    opened = opened and reasons
    data = text.encode()[:length]
    tokens = text_tokens(slices(data, cuts))
    expected = oracle(data.decode("utf-8", "replace"), reasons=reasons, opened=opened, tools=tools)

    def new() -> MessageParser:
        return MessageParser(reasoning=THINK if reasons else None, opened=opened, tools=HERMES if tools else None)

    parser = new()
    found = parse(parser, tokens, group)
    assert found.fields == found.by_bytes == expected
    assert parser.settled == len(tokens)
    assert parser.num_completed == sum(_is_json(arguments) for _, arguments in expected.calls)
    assert parse(new(), tokens, 1).pieces == found.pieces == parse(new(), tokens, len(tokens) or 1).pieces
    for _, _, piece in found.pieces:
        assert piece.data in tokens[piece.index].data
        assert piece.text in tokens[piece.index].text
        assert piece.held == tokens[piece.index].held


@given(st.binary(max_size=60), st.lists(st.integers(0, 60)))
def test_bytes_that_are_no_text(data: bytes, cuts: list[int]) -> None:
    call = b'<tool_call>{"name": "f", "arguments": {"a": "' + data + b'"}}</tool_call>'
    for whole in (data, b"<think>" + data + b"</think>" + data, data + call):
        tokens = text_tokens(slices(whole, cuts))
        found = parse(MessageParser(reasoning=THINK, tools=HERMES), tokens)
        assert found.fields == found.by_bytes
        assert found.pieces == parse(MessageParser(reasoning=THINK, tools=HERMES), tokens, 7).pieces


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def read(tokens: Sequence[str], **options: Any) -> Spelled:
    return parse(MessageParser(**options), text_tokens([token.encode() for token in tokens]))


def spelled(found: Spelled) -> list[tuple[str, str]]:
    return [(field, token.text) for field, _, token in found.pieces]


def test_a_token_across_two_fields_is_in_both() -> None:
    found = read(["<thi", "nk>\nwell", ", so", "\n</think>\n\nYes", "."], reasoning=THINK)
    assert spelled(found) == [("reasoning", "well"), ("reasoning", ", so"), ("content", "Yes"), ("content", ".")]
    assert [token.index for _, _, token in found.pieces] == [1, 2, 3, 4]
    call = ["Sure<tool", '_call>{"name": "get', '_x", "arguments": {"a', '": 1}}</tool_call>ok']
    assert spelled(read(call, tools=HERMES)) == [
        ("content", "Sure"),
        ("name", "get"),
        ("name", "_x"),
        ("arguments", '{"a'),
        ("arguments", '": 1}'),
        ("content", "ok"),
    ]


def test_what_is_given_back_when() -> None:
    parser = MessageParser(reasoning=THINK, tools=HERMES)
    parts = ["<think>", "\n", "so", "\n", "</", "think>", "\n", "Hi", " ", "<tool_call>", "\n"]
    tokens = text_tokens([part.encode() for part in parts])
    seen = [[(field, piece.text) for field, _, piece in parser.step([token])] for token in tokens]
    nothing: list[tuple[str, str]] = []
    assert seen == [*[nothing] * 2, [("reasoning", "so")], *[nothing] * 4, [("content", "Hi")], *[nothing] * 3]
    # The last three could still begin a call.
    assert parser.settled == 8
    assert [piece.token.text for piece in parser.flush()] == [" ", "<tool_call>", "\n"]
    assert parser.settled == 11


def test_arguments_come_as_they_are_written() -> None:
    parser = MessageParser(tools=HERMES)
    tokens = text_tokens(
        [part.encode() for part in ['<tool_call>{"name": "f', '", ', '"arguments": ', "{", '"a', '": 1']]
    )
    seen = [[(field, call, piece.text) for field, call, piece in parser.step([token])] for token in tokens]
    assert seen == [
        [],
        [],
        [],
        [("name", 0, "f"), ("arguments", 0, "{")],
        [("arguments", 0, '"a')],
        [("arguments", 0, '": 1')],
    ]
    assert parser.num_completed == 0


def test_a_name_is_given_back_whole() -> None:
    # The last token of the name also holds what could begin the closing tag, so it is not final yet.
    tokens = text_tokens([b'<tool_call>{"name": "ge', b't", "arguments": {}}</tool', b"_call>", b"Hi"])
    parser = MessageParser(tools=HERMES)
    assert parser.step(tokens[:2]) == []
    assert [(field, piece.text) for field, _, piece in parser.step(tokens[2:3])] == [
        ("name", "ge"),
        ("name", "t"),
        ("arguments", "{}"),
    ]


def test_one_call_alone() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
    for cuts in ([], [40], range(200)):
        tokens = text_tokens(slices(text.encode(), cuts))
        for group in (1, 300):
            parser = MessageParser(tools=HERMES, parallel=False)
            found = parse(parser, tokens, group)
            assert found.fields == Fields(calls=(("f", "{}"),))
            assert (
                parser.end
                == parser.settled
                == next(
                    place for place in range(1, len(tokens) + 1) if len("".join(t.text for t in tokens[:place])) >= 40
                )
            )
    parser = MessageParser(tools=HERMES, parallel=False)
    parse(parser, text_tokens([b"Hello"]))
    assert parser.end is None


def test_special_tokens_are_seen_though_they_are_in_no_text() -> None:
    tags = [b"<think>", b"</think>", b"<tool_call>", b"</tool_call>"]
    parts = [b"<think>", b"so", b"</think>", b"Hi", b"<tool_call>", b'{"name": "f", "arguments": {}}', b"</tool_call>"]
    for special in (tags, []):
        tokens = text_tokens([*parts, b"<|end|>"], special=[*special, b"<|end|>"])
        assert parse(MessageParser(reasoning=THINK, tools=HERMES), tokens).fields == Fields("so", "Hi", (("f", "{}"),))
    # A tag that opens nothing is content; any other special token stays out of the text.
    tokens = text_tokens([b"a", b"<tool_call>", b"<|x|>", b"b", b"</think>"], special=[*tags, b"<|x|>"])
    assert parse(MessageParser(reasoning=THINK, tools=HERMES), tokens).fields == Fields(content="a<tool_call>b")
    # Where calls are not read, they are content as they are.
    for special in (tags, []):
        tokens = text_tokens([*parts, b"<|end|>"], special=[*special, b"<|end|>"])
        parser = MessageParser(reasoning=THINK, tools=HERMES, reads_calls=False)
        content = 'Hi<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        assert parse(parser, tokens).fields == Fields("so", content)
    # In the middle of a character it is no tag.
    tokens = text_tokens(["é".encode()[:1], b"<tool_call>", "é".encode()[1:], b"x"], special=tags)
    found = parse(MessageParser(tools=HERMES), tokens)
    assert found.fields == found.by_bytes == Fields(content="éx")


def test_a_cut_call() -> None:
    assert read(["<tool_call>"], tools=HERMES).fields == Fields(content="<tool_call>")
    assert read(['<tool_call>{"name": "f", "arguments": '], tools=HERMES).fields.calls == ()
    assert read(['<tool_call>{"name": "f", "arguments": {'], tools=HERMES).fields == Fields(calls=(("f", "{"),))
    assert read(['<tool_call>{"name": "f", "arguments": {}}\n</tool'], tools=HERMES).fields == Fields(
        calls=(("f", "{}"),)
    )


@pytest.mark.parametrize("size", [200, 20_000])
def test_reading_is_linear(size: int) -> None:
    """Texts that begin calls again and again, and one that never gets to its name."""
    for part in ("<tool_call>", '<tool_call>{"arguments": {"', '<tool_call>{"name": "f", "arguments": {},', "\n", "{"):
        text = ("<tool_call>{" if part == "{" else "") + part * (size // len(part))
        parser = CountingParser(tools=HERMES)
        parse(parser, text_tokens([text[start : start + 4].encode() for start in range(0, len(text), 4)]))
        assert parser.characters <= 20 * size


class CountingParser(MessageParser):
    """Counts the characters that reading looks at."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.characters = 0
        plain = self._reader.text

        def counted(start: int, end: int | None = None) -> str:
            found = plain(start, end)
            self.characters += len(found)
            return found

        self._reader.text = counted  # type: ignore[method-assign]
