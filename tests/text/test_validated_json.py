"""Messages whose content becomes the JSON in it, however the text is cut into tokens and those grouped.

The oracle is a MessageParser's content with Python's own decoder, which sees all text at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from neper.text.json_form import JsonForm
from neper.text.message import MessageParser
from neper.text.reasoning import REASONING_TAGS
from neper.text.tools import TOOL_FORMATS
from neper.text.validated_json import JsonParser
from tests.helpers.random_tokens import Fields, parse, slices, text_tokens
from tests.text.test_json_form import CALM, OBJECT, WORDS, first_object, written

THINK = REASONING_TAGS["think"]
HERMES = TOOL_FORMATS["hermes"]
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
OBJECTS = written(st.dictionaries(WORDS, WORDS | st.integers() | st.lists(WORDS, max_size=2), max_size=3))
QUIET = CALM.filter(lambda text: "<" not in text)


def new_parser(schema: Any = OBJECT, **options: Any) -> JsonParser:
    return JsonParser(MessageParser(**{"reasoning": THINK, "tools": HERMES, **options}), JsonForm(schema))


@given(
    st.sampled_from(["", "<think>so\n</think>\n\n", "<think>😀</think>"]),
    QUIET,
    OBJECTS.filter(lambda text: "<tool_call>" not in text),
    QUIET,
    st.booleans(),
    st.lists(st.integers(0, 120)),
    st.integers(1, 20),
)
def test_content_is_the_json(
    thought: str, before: str, text: str, after: str, fenced: bool, cuts: list[int], group: int
) -> None:
    said = f"{before}\n```json\n{text}\n```\n{after}" if fenced and "```" not in text else f"{before} {text} {after}"
    reasoning = "😀" if "😀" in thought else "so" if thought else ""
    tokens = text_tokens(slices((thought + said).encode(), cuts))
    parser = new_parser()
    found = parse(parser, tokens, group)
    assert found.fields == found.by_bytes == Fields(reasoning, text)
    assert (parser.problem, parser.settled, parser.end) == (None, len(tokens), None)
    # The tokens are those that a parser without a form has, but for the two at the ends.
    plain = parse(MessageParser(reasoning=THINK, tools=HERMES), tokens, group).pieces
    kept = [piece for piece in found.pieces if piece[0] == "content"]
    assert [piece for piece in kept[1:-1] if piece not in plain] == []
    assert [piece[2].index for piece in kept] == sorted({piece[2].index for piece in kept})
    for _, _, piece in kept:
        assert piece.data in tokens[piece.index].data
        assert piece.held == tokens[piece.index].held
    assert parse(new_parser(), tokens, 1).pieces == found.pieces == parse(new_parser(), tokens, len(tokens)).pieces


@given(
    st.lists(
        WORDS.map(str.encode)
        | OBJECTS.map(str.encode)
        | st.binary(max_size=3)
        | st.sampled_from([b"<think>", b"</think>", CALL.encode(), b"```", b"\xf0\x9f", b"{}", b"}\xf0"]),
        max_size=8,
    ),
    st.lists(st.integers(0, 200)),
    st.integers(1, 20),
)
def test_any_reply(parts: list[bytes], cuts: list[int], group: int) -> None:
    """What a MessageParser reads, with its content cut to the JSON in it; else as it was."""
    tokens = text_tokens(slices(b"".join(parts), cuts))
    plain = parse(MessageParser(reasoning=THINK, tools=HERMES), tokens, group)
    parser = new_parser()
    found = parse(parser, tokens, group)
    expected = None if plain.fields.calls else first_object(plain.fields.content)
    if expected is None:
        assert found == plain
        assert (parser.problem is None) == bool(plain.fields.calls)
    else:
        assert parser.problem is None
        assert found.fields == plain.fields._replace(content=expected)
        assert found.by_bytes == plain.by_bytes._replace(content=expected)
    kept = new_parser()
    kept.keep()
    assert parse(kept, tokens, group) == plain
    assert kept.problem is None


def given_back(parser: JsonParser, parts: Sequence[str]) -> tuple[list[list[tuple[str, str]]], list[int]]:
    pieces, settled = [], []
    for token in text_tokens([part.encode() for part in parts]):
        pieces.append([(piece.field, piece.token.text) for piece in parser.step([token])])
        settled.append(parser.settled)
    return pieces, settled


def test_what_is_given_back_when() -> None:
    parser = new_parser()
    pieces, settled = given_back(parser, ["<think>", "so", "!</think>Well", ' {"a', '": 1}', " ", "ok"])
    # A token with a part in the content waits as a whole.
    assert pieces == [[], [("reasoning", "so")], [], [], [], [], []]
    assert settled == [0, 2, 2, 2, 2, 2, 2]
    assert [(field, token.text, token.index) for field, _, token in parser.flush()] == [
        ("reasoning", "!", 2),
        ("content", '{"a', 3),
        ("content", '": 1}', 4),
    ]
    assert parser.settled == 7


def test_a_call_makes_the_content_free() -> None:
    parser = new_parser()
    pieces, _ = given_back(parser, ["Let me ", "see", "<tool_call>", '{"name": "f", "arguments": ', '{"a', '": 1}'])
    call = [("name", "f"), ("arguments", '{"a')]
    assert pieces == [[], [], [], [], [("content", "Let me "), ("content", "see"), *call], [("arguments", '": 1}')]]
    assert parser.flush() == []
    assert (parser.problem, parser.num_completed) == (None, 1)
    # It may also come before what is no JSON.
    assert parse(new_parser(), text_tokens([CALL.encode(), b"done"])).fields.content == "done"
    single = new_parser(parallel=False)
    assert parse(single, text_tokens([CALL.encode(), b"done"])).fields == Fields(calls=(("f", '{"a": 1}'),))
    assert single.end == 1


def test_without_json() -> None:
    for text, problem in (("", "is empty"), ("Hello", "is not JSON"), ("[1]", "is not of type 'object'")):
        parser = new_parser()
        assert parse(parser, text_tokens([text.encode()])).fields == Fields(content=text)
        assert parser.problem is not None
        assert problem in parser.problem.message


def test_a_token_that_was_cut_before() -> None:
    """Its front is another field's, with the character that it completes, and its end begins one."""
    parts = [b"<think>\xc3", b"\xa9</think>{}\xf0", b"\x9f\x98\x80"]
    found = parse(new_parser(), text_tokens(parts))
    assert found.fields == found.by_bytes == Fields("é", "{}")
    held = [token.held for field, _, token in found.pieces if field == "content"]
    assert held == [b"\xc3"]


def test_a_message_without_other_fields() -> None:
    parser = new_parser(reasoning=None, tools=None)
    assert not parser.reasons
    assert new_parser().reasons
    text = json.dumps({"a": "<think>"})
    assert parse(parser, text_tokens([b"A", text.encode(), b"."])).fields == Fields(content=text)
