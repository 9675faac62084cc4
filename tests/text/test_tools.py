"""Tool calls in each form that models write them, and which form a model uses."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neper.errors import StartupError
from neper.text.detokenizer import Detokenizer
from neper.text.grammar import after_reasoning, tool_calls
from neper.text.matcher import Grammars
from neper.text.message import MessageParser
from neper.text.reasoning import REASONING_PARSERS, REASONING_TAGS, reasoning_tags
from neper.text.tools import PLAIN_FORM, TOOL_CALL_PARSERS, TOOL_FORMATS, tool_format
from tests.helpers.qwen_template import QWEN_TEMPLATE
from tests.helpers.random_tokens import Fields, parse, slices, text_tokens
from tests.server.conftest import byte_level_tokenizer

A = '{"a": "}{]\\"", "é": [1, {"b": null}]}'
QUOTED = json.dumps(A, ensure_ascii=False)
F = ("f", A)
G = ("get_x-1", "{}")

CASES: list[tuple[str, str, str, tuple[tuple[str, str], ...]]] = [
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {A}}}\n</tool_call>', "", (F,)),
    ("hermes", f'Hi\n<tool_call>{{"arguments":{A},"name":"f"}}</tool_call>', "Hi", (F,)),
    (
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {A}}}</tool_call>\n\n'
        '<tool_call>{"name": "get_x-1", "arguments": {}}</tool_call>\nBye',
        "Bye",
        (F, G),
    ),
    ("hermes", f'<tool_call>{{"type": "function", "name": "f", "id": "7", "parameters": {A}}}</tool_call>', "", (F,)),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {A}, "more": {{"x": [1]}}}}</tool_call>Bye', "Bye", (F,)),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {A}</tool_call> Bye', "Bye", (F,)),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {A}}} Bye', "Bye", (F,)),
    ("hermes", f'{{"name": "f", "arguments": {A}}}', f'{{"name": "f", "arguments": {A}}}', ()),
    ("llama3_json", f'{{"name": "f", "parameters": {A}}}', "", (F,)),
    ("llama3_json", f' \n<|python_tag|>{{"name": "f", "parameters": {A}}}', "", (F,)),
    ("llama3_json", f'Hi <|python_tag|>{{"name": "f", "arguments": {A}}} Bye', "Hi" + "Bye", (F,)),
    ("llama3_json", f'{{"name": "f", "parameters": {A}}}; {{"name": "get_x-1", "parameters": {{}}}}', "", (F, G)),
    ("llama3_json", f'{{"name": "f", "parameters": {A}}}; Bye', "Bye", (F,)),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', ()),
    ("llama3_json", f'Hi {{"name": "f", "parameters": {A}}}', f'Hi {{"name": "f", "parameters": {A}}}', ()),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", ()),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {A}}}]', "", (F,)),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "f", "arguments": {A}, "id": "abc"}}, {{"arguments": {{}}, "name": "get_x-1"}}] Bye',
        "Bye",
        (F, G),
    ),
    ("mistral", f"Hi [TOOL_CALLS]f{A}[TOOL_CALLS]get_x-1[ARGS]{{}}", "Hi", (F, G)),
    ("mistral", f"[TOOL_CALLS] f {A}", "", (F,)),
    ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", ()),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", ()),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {A}}}, 5] x', "5] x", (F,)),
    ("mistral", "[TOOL_CALLS]no name{}", "[TOOL_CALLS]no name{}", ()),
]
NOTHING = ("f", "")
CASES_81: list[tuple[str, str, str, tuple[tuple[str, str], ...]]] = [
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {QUOTED}}}\n</tool_call>', "", (F,)),
    ("hermes", f'Hi <tool_call>{{"arguments" : {QUOTED}, "name": "f"}}</tool_call>Bye', "HiBye", (F,)),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": " \\n\\t{\\n\\"a\\": 1\\r}\\n"}</tool_call>',
        "",
        (("f", '{"a": 1}'),),
    ),
    *[
        ("hermes", f"<tool_call>\n{{{members}}}\n</tool_call>Bye", "Bye", (NOTHING,))
        for members in (
            '"name": "f"',
            '"id": "1", "name": "f" ',
            '"name": "f", "arguments": null',
            '"name": "f", "arguments": ""',
            '"name": "f", "arguments": " "',
            '"arguments": null, "name": "f"',
            '"arguments": "", "name": "f"',
            '"name": "f", "type": "function"',
        )
    ],
    *[
        ("hermes", text, text, ())
        for arguments in ('"x"', "5", "[]", "nul", '"null"', '"\\\\{}"', "true", '"\\u007b}"')
        for text in [f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>']
    ],
    ("hermes", '<tool_call>{"arguments": null}</tool_call>', '<tool_call>{"arguments": null}</tool_call>', ()),
    ("llama3_json", f'{{"name": "f", "parameters": {QUOTED}}}; {{"name": "f", "parameters": null}}', "", (F, NOTHING)),
    ("llama3_json", '<|python_tag|>{"name": "f"}', "", (NOTHING,)),
    ("llama3_json", '{"name": "f"}', '{"name": "f"}', ()),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {QUOTED}}}, {{"name": "f"}}]', "", (F, NOTHING)),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{A}[TOOL_CALLS]get_x-1[CALL_ID]123456789[ARGS]{{}}", "", (F, G)),
    ("mistral", f"Hi[TOOL_CALLS]f[CALL_ID]abcdefghi{A}", "Hi", (F,)),
]
CASES += CASES_81


def new(form: str) -> MessageParser:
    return MessageParser(tools=TOOL_FORMATS[form])


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
@settings(max_examples=50)
@given(cuts=st.lists(st.integers(0, 200)), group=st.integers(1, 4))
def test_calls_however_they_are_cut(
    form: str, text: str, content: str, calls: tuple[tuple[str, str], ...], cuts: list[int], group: int
) -> None:
    assert all(json.loads(arguments) is not None for _, arguments in calls if arguments)
    tokens = text_tokens(slices(text.encode(), cuts))
    found = parse(new(form), tokens, group)
    assert found.fields == found.by_bytes == Fields("", content, calls)
    order = [(call, field != "name") for field, call, _ in found.pieces if call >= 0]
    assert order == sorted(order)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.sampled_from('ab"\\\\/\n\t{}[]é😀') | st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(
    arguments=st.dictionaries(st.text(max_size=4), JSON, max_size=4),
    ascii_only=st.tuples(st.booleans(), st.booleans()),
    indent=st.sampled_from([None, 2, "\t"]),
    late=st.booleans(),
    cuts=st.lists(st.integers(0, 200)),
    group=st.integers(1, 4),
)
def test_case_81_arguments_as_a_string_are_the_object_in_it(
    arguments: dict[str, Any],
    ascii_only: tuple[bool, bool],
    indent: int | str | None,
    late: bool,
    cuts: list[int],
    group: int,
) -> None:
    inner = json.dumps(arguments, ensure_ascii=ascii_only[0], indent=indent)
    members = ['"name": "f"', f'"arguments": {json.dumps(inner, ensure_ascii=ascii_only[1])}']
    text = f"<tool_call>{{{', '.join(members[::-1] if late else members)}}}</tool_call>Bye"
    found = parse(new("hermes"), text_tokens(slices(text.encode(), cuts)), group)
    assert found.fields == found.by_bytes
    assert found.fields.content == "Bye"
    [(name, read)] = found.fields.calls
    assert (name, json.loads(read)) == ("f", arguments)
    # A token has one piece in a field, whatever was cut out of it.
    places = [(token.index, field) for field, _, token in found.pieces]
    assert len(places) == len(set(places))


def test_case_81_ids_and_empty_arguments_are_known() -> None:
    text = "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]h[ARGS]{}"
    parser = new("mistral")
    parse(parser, text_tokens([text.encode()]))
    # An id that is there twice names one call.
    assert [parser.made(call) for call in range(3)] == [("abcdefghi", False), (None, False), (None, False)]
    parser = new("hermes")
    parse(parser, text_tokens([b'<tool_call>{"name": "f"}</tool_call>']))
    assert parser.made(0) == (None, True)
    assert parser.num_completed == 1


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_a_text_that_ends_anywhere(form: str, text: str, content: str, calls: tuple[tuple[str, str], ...]) -> None:
    """What was a call stays one: its text only grows."""
    before: tuple[Any, ...] = ()
    for length in range(len(text) + 1):
        found = parse(new(form), text_tokens([text[:length].encode()])).fields
        assert found.calls[: len(before)] == before or [name for name, _ in found.calls[: len(before)]] == [
            name for name, _ in before
        ]
        for (_, now), (_, then) in zip(found.calls, before, strict=False):
            assert now.startswith(then)
        # Nothing is lost but the form and the space around calls.
        assert found.content == text[:length] or found.calls
        before = found.calls
    assert before == calls


def test_tags_that_are_special_tokens() -> None:
    for form, parts, calls in (
        ("mistral", ["[TOOL_CALLS]", "f", "[ARGS]", "{}", "</s>"], (("f", "{}"),)),
        ("mistral", ["[TOOL_CALLS]", ' [{"name": "f", "arguments": {}}]', "</s>"], (("f", "{}"),)),
        ("llama3_json", ["<|python_tag|>", '{"name": "f", "parameters": {}}', "</s>"], (("f", "{}"),)),
    ):
        special = [b"[TOOL_CALLS]", b"[ARGS]", b"<|python_tag|>", b"</s>"]
        tokens = text_tokens([part.encode() for part in parts], special=special)
        assert parse(new(form), tokens).fields == Fields(calls=calls)


LLAMA = '{% if tools %}{{ tools }}{% endif %}Environment: ipython {"name": f, "parameters": {}}'


@pytest.mark.parametrize(
    ("template", "tags", "form"),
    [
        (QWEN_TEMPLATE, [], "hermes"),
        (QWEN_TEMPLATE.replace("<tool_call>", "<call>"), ["<tool_call>"], "hermes"),
        (LLAMA, ["<|python_tag|>"], "llama3_json"),
        (LLAMA + "<|python_tag|>", [], "llama3_json"),
        ("{{ tools }}[TOOL_CALLS]", [], "mistral"),
        ("{{ tools }}", ["[TOOL_CALLS]"], "mistral"),
        ("{{ tools }}<tool_call><function=f>", ["<tool_call>"], None),
        ("{{ tools }}", [], None),
        ("{{ messages }}<tool_call>", ["<tool_call>"], None),
    ],
)
def test_the_form_of_a_model(template: str, tags: list[str], form: str | None) -> None:
    tokenizer = byte_level_tokenizer(template=template, tags=tags)
    assert tool_format(tokenizer) == (form and TOOL_FORMATS[form])
    assert tool_format(tokenizer, "none") is None
    for name in TOOL_FORMATS:
        if "tools" in template:
            assert tool_format(tokenizer, name) == TOOL_FORMATS[name]
        elif TOOL_FORMATS[name] == PLAIN_FORM:
            assert tool_format(tokenizer, name) is None
        else:  # a template that shows no tools cannot be made to
            with pytest.raises(StartupError, match="shows no tools"):
                tool_format(tokenizer, name)
    with pytest.raises(StartupError, match=re.escape(", ".join(TOOL_CALL_PARSERS))):
        tool_format(tokenizer, "other")


@pytest.mark.parametrize(
    ("template", "tags", "kind"),
    [
        (QWEN_TEMPLATE, [], "think"),
        ("{{ messages }}", ["<think>", "</think>"], "think"),
        ("{{ messages }}", ["<think>"], None),
        ("{{ messages }}[THINK]{{ 1 }}[/THINK]", [], "mistral"),
        ("{{ messages }}", ["[THINK]", "[/THINK]"], "mistral"),
        ("{{ messages }}", [], None),
    ],
)
def test_the_tags_of_a_model(template: str, tags: list[str], kind: str | None) -> None:
    tokenizer = byte_level_tokenizer(template=template, tags=tags)
    assert reasoning_tags(tokenizer) == (kind and REASONING_TAGS[kind])
    assert reasoning_tags(tokenizer, "none") is None
    for name, expected in REASONING_TAGS.items():
        assert reasoning_tags(tokenizer, name) == expected
    with pytest.raises(StartupError, match=re.escape(", ".join(REASONING_PARSERS))):
        reasoning_tags(tokenizer, "other")


def test_whether_a_prompt_leaves_the_reasoning_open() -> None:
    tags = REASONING_TAGS["think"]
    for prompt, opened, closed in (
        ("assistant\n", False, False),
        ("assistant\n<think>", True, False),
        ("assistant\n<think>\n", True, False),
        ("assistant\n<think>\n\n</think>\n\n", False, True),
        ("<think> is a tag", False, False),
    ):
        assert (tags.opened_by(prompt), tags.closed_by(prompt)) == (opened, closed)


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "array", "maxItems": 2}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("form", TOOL_FORMATS)
@pytest.mark.parametrize("parallel", [False, True])
def test_what_a_grammar_allows_is_read_as_calls(form: str, parallel: bool) -> None:
    """Random walks through the grammar of required calls, behind reasoning."""
    tokenizer = byte_level_tokenizer(tags=["<think>", "</think>", *TOOL_FORMATS[form].tags])
    vocab_size, end, tags = 384, 2, REASONING_TAGS["think"]
    constraint = tool_calls(form, [{"name": "f", "parameters": PARAMETERS}], tokenizer, parallel=parallel)
    text = after_reasoning(constraint, *tags, tokenizer, opened=True).text()
    grammars = Grammars(tokenizer, vocab_size, [end])
    words = np.zeros(-(-vocab_size // 32), np.int32)
    for seed in range(20):
        draw = np.random.default_rng(seed)
        matcher = grammars.matcher(text)
        ids: list[int] = []
        while len(ids) < 2000:
            matcher.fill(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            # What closes something is preferred, for walks to end.
            closing = [
                i for i in allowed if i == end or tokenizer.token_bytes(i)[:2] in (b"</", b'"', b"}", b"]", b",")
            ]
            token_id = int(draw.choice(closing if closing and draw.random() < 0.5 else allowed))
            if token_id == end:
                break
            ids.append(token_id)
            assert matcher.accept(token_id)
        tokens = Detokenizer(tokenizer)
        parser = MessageParser(reasoning=tags, opened=True, tools=TOOL_FORMATS[form])
        found = parse(parser, tokens.step(ids) + tokens.flush())
        assert found.fields == found.by_bytes
        assert found.fields.content == ""
        assert parser.num_completed == len(found.fields.calls) >= 1
        assert parallel or parser.num_completed == 1
        for name, arguments in found.fields.calls:
            assert name == "f"
            jsonschema.validate(json.loads(arguments), PARAMETERS)
