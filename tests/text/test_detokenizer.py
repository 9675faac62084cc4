"""The detokenizer against a plain reading of the rules: decode everything, search everything, then cut."""

from __future__ import annotations

import codecs
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neper.text.detokenizer import Detokenizer, TextToken
from neper.text.tokenizer import Tokenizer
from tests.helpers.calls import count_calls
from tests.text.conftest import Pair

TEXTS = ["the dog", "日本語、中文", "😀🚀👩‍👩‍👧", "naïve café", "aaabab", "\n\n", "STOP"]


class Case(NamedTuple):
    token_ids: list[int]
    groups: list[int]
    stop: list[str]
    include_stop: bool
    skip: bool
    ended: bool
    min_tokens: int
    begins_text: bool


class Expected(NamedTuple):
    tokens: list[tuple[int, str, bool]]
    text: str
    stopped: str | None
    num_tokens: int


def hidden(ours: Tokenizer, case: Case) -> list[bool]:
    flags = [case.skip and token_id in ours.special_token_ids for token_id in case.token_ids]
    if case.ended and flags and not case.include_stop:
        flags[-1] = True
    return flags


def visible_bytes(ours: Tokenizer, case: Case) -> list[bytes]:
    """What each token adds to the text, b"" for a hidden one."""
    data = [
        b"" if flag else ours.token_bytes(token_id)
        for token_id, flag in zip(case.token_ids, hidden(ours, case), strict=True)
    ]
    first = next((place for place, own in enumerate(data) if own), None)
    if case.begins_text and ours.strips_leading_space and first is not None and data[first].startswith(b" "):
        data[first] = data[first][1:]
    return data


def read(ours: Tokenizer, case: Case) -> Expected:
    """The rules, naively: token by token over the whole text so far."""
    flags, data = hidden(ours, case), visible_bytes(ours, case)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(own) for own in data]
    tail = decoder.decode(b"", final=True)
    text, starts = "", []
    for place in range(len(texts) + 1):
        before = len(text)
        if place < len(texts):
            starts.append(before)
            text += texts[place]
        elif tail:
            text += tail
            texts[max(i for i, flag in enumerate(flags) if not flag)] += tail
        taken = min(place + 1, len(texts))
        found = [
            (start, len(stop), stop)
            for stop in case.stop
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before and taken > case.min_tokens
        ]
        if not found:
            continue
        start, length, stop = min(found)
        cut = start + length if case.include_stop else start
        tokens = [(i, texts[i][: cut - starts[i]], not flags[i]) for i in range(taken) if starts[i] < cut]
        return Expected([token for token in tokens if token[2]], text[:cut], stop, taken)
    tokens = [(i, texts[i], True) for i in range(len(texts)) if not flags[i]]
    return Expected(tokens, text, None, len(texts))


def run(ours: Tokenizer, case: Case, groups: list[int]) -> tuple[list[TextToken], Detokenizer]:
    detokenizer = Detokenizer(
        ours,
        stop=case.stop,
        include_stop=case.include_stop,
        skip_special_tokens=case.skip,
        min_tokens=case.min_tokens,
        begins_text=case.begins_text,
    )
    released: list[TextToken] = []
    place = 0
    for size in [*groups, len(case.token_ids)]:
        following = min(place + size, len(case.token_ids))
        is_last = following == len(case.token_ids) and following > place
        released += detokenizer.step(case.token_ids[place:following], ended=case.ended and is_last)
        place = following
    released += detokenizer.flush()
    assert detokenizer.flush() == []
    return released, detokenizer


def check_case(ours: Tokenizer, case: Case) -> None:
    expected = read(ours, case)
    tokens, detokenizer = run(ours, case, case.groups)
    assert (detokenizer.stopped, detokenizer.num_tokens) == (expected.stopped, expected.num_tokens)
    assert "".join(token.text for token in tokens) == expected.text
    # One that adds nothing to the text may have been settled before the stop string began where it stands.
    adds = [bool(own) for own in visible_bytes(ours, case)]
    shown = [(token.index, token.text, True) for token in tokens if token.visible]
    assert [t for t in shown if adds[t[0]] or t[1]] == [t for t in expected.tokens if adds[t[0]] or t[1]]
    if case.stop:
        # Whatever is released in between: the same tokens, however they came.
        assert tokens == run(ours, case, [1] * len(case.token_ids))[0] == run(ours, case, [])[0]

    flags, data = hidden(ours, case), visible_bytes(ours, case)
    visible = [token for token in tokens if token.visible]
    joined = b"".join(token.data for token in visible)
    assert joined.decode("utf-8", "replace") == expected.text
    assert b"".join(data).startswith(joined)
    assert [token.index for token in tokens] == sorted({token.index for token in tokens})
    so_far = b""
    for token in tokens:
        assert token.visible != flags[token.index]
        held = codecs.utf_8_decode(so_far, "replace", False)
        assert token.held == so_far[held[1] :]
        if token.visible:
            so_far += token.data
            assert data[token.index].startswith(token.data)
        else:
            assert token.text == ""
            assert token.data == ours.token_bytes(case.token_ids[token.index])
    if expected.stopped is None:
        assert [token.index for token in tokens] == list(range(len(case.token_ids)))
        assert joined == b"".join(data)


@st.composite
def cases(draw: st.DrawFn, ours: Tokenizer) -> Case:
    """Ids from real text, from single bytes of real text, special ones, random ones, ones without token."""
    by_byte = {ours.token_bytes(i): i for i in range(ours.vocab_size) if len(ours.token_bytes(i)) == 1}
    text = st.sampled_from(TEXTS)
    part = st.one_of(
        text.map(lambda text: ours.encode(text, add_special_tokens=False)),
        text.map(lambda text: [by_byte[bytes([byte])] for byte in text.encode()]),
        st.lists(st.integers(0, ours.vocab_size + 3), max_size=3),
        st.lists(st.sampled_from([by_byte[bytes([byte])] for byte in b"aab \xf0\x9f\x98\x80\xe6\xff"]), max_size=4),
        st.sampled_from(sorted(ours.special_token_ids)).map(lambda token_id: [token_id]),
    )
    token_ids = [token_id for ids in draw(st.lists(part, max_size=5)) for token_id in ids]
    token_ids = token_ids[: draw(st.integers(0, 40))] if draw(st.booleans()) else token_ids
    case = Case(
        token_ids,
        groups=draw(st.lists(st.integers(0, 5), max_size=len(token_ids))),
        stop=[],
        include_stop=draw(st.booleans()),
        skip=draw(st.booleans()),
        ended=draw(st.booleans()),
        min_tokens=draw(st.sampled_from([0, 0, 0, 1, 3, 8])),
        begins_text=draw(st.booleans()),
    )
    whole = b"".join(visible_bytes(ours, case)).decode("utf-8", "replace")
    for _ in range(draw(st.integers(0, 3))):
        if whole and draw(st.integers(0, 3)):
            start = draw(st.integers(0, len(whole) - 1))
            stop = whole[start : start + draw(st.integers(1, 6))]
            if not draw(st.integers(0, 3)):
                stop += draw(st.sampled_from("ab日😀\ufffd"))  # begins like the text, then does not
        else:
            stop = draw(st.text("ab ST\n日😀\ufffd", min_size=1, max_size=3))
        case.stop.append(stop)
    return case


@pytest.mark.rounds(400)
def test_random_sequences(pair: Pair, rounds: int) -> None:
    @settings(max_examples=rounds, deadline=None)
    @given(cases(pair.ours))
    def check(case: Case) -> None:
        check_case(pair.ours, case)

    check()


def split(ours: Tokenizer, *parts: bytes) -> list[int]:
    """Ids of which each has exactly the bytes given."""
    ids = {ours.token_bytes(i): i for i in range(ours.vocab_size)}
    return [ids[part] for part in parts]


def texts(tokens: list[TextToken]) -> list[str]:
    return [token.text for token in tokens]


def test_an_emoji_over_four_tokens(byte_level: Pair) -> None:
    ours = byte_level.ours
    detokenizer = Detokenizer(ours)
    ids = split(ours, b"a", b"\xf0", b"\x9f", b"\x98", b"\x80", b"b")
    steps = [detokenizer.step([token_id]) for token_id in ids]
    assert [texts(step) for step in steps] == [["a"], [], [], [], ["", "", "", "😀"], ["b"]]
    held = [token.held for token in steps[4]]
    assert held == [b"", b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98"]
    assert [token.data for token in steps[4]] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]


def test_a_reply_cut_inside_an_emoji(byte_level: Pair) -> None:
    ours = byte_level.ours
    detokenizer = Detokenizer(ours)
    assert texts(detokenizer.step([*split(ours, b"a", b"\xf0", b"\x9f"), 2], ended=True)) == ["a"]
    rest = detokenizer.flush()
    assert texts(rest) == ["", "\ufffd", ""]
    assert [token.visible for token in rest] == [True, True, False]
    assert rest[2].data == b"<|im_end|>"


def test_an_end_token_alone(byte_level: Pair) -> None:
    detokenizer = Detokenizer(byte_level.ours)
    assert detokenizer.step([2], ended=True) == [TextToken(0, "", b"<|im_end|>", b"", False)]
    assert detokenizer.flush() == []
    assert detokenizer.num_tokens == 1


@pytest.mark.parametrize(
    ("include_stop", "skip", "special", "ordinary"),
    [(False, True, False, False), (False, False, False, False), (True, True, False, True), (True, False, True, True)],
)
def test_which_end_tokens_are_in_the_text(
    byte_level: Pair, include_stop: bool, skip: bool, special: bool, ordinary: bool
) -> None:
    ours = byte_level.ours
    for token_id, visible in ((2, special), (ours.encode("the")[0], ordinary)):
        detokenizer = Detokenizer(ours, include_stop=include_stop, skip_special_tokens=skip)
        (token,) = detokenizer.step([token_id], ended=True)
        assert token.visible is visible
        assert token.text == (ours.token_text(token_id) if visible else "")


def test_text_waits_only_while_a_stop_string_may_begin(byte_level: Pair) -> None:
    ours = byte_level.ours
    detokenizer = Detokenizer(ours, stop=["STOP"])
    ids = split(ours, b"a", b"S", b"T", b"S", b"T", b"O", b"x", b"P")
    assert [len(detokenizer.step([token_id])) for token_id in ids] == [1, 0, 0, 2, 0, 0, 4, 1]
    assert detokenizer.flush() == []


@pytest.mark.parametrize(("include_stop", "last", "data"), [(False, "do", b"do"), (True, "dog", b"dog")])
def test_a_token_across_the_cut_is_trimmed(byte_level: Pair, include_stop: bool, last: str, data: bytes) -> None:
    ours = byte_level.ours
    ids = split(ours, b"the", b" dog", b" answer")
    detokenizer = Detokenizer(ours, stop=["g", "answer"], include_stop=include_stop)
    tokens = detokenizer.step(ids)
    assert texts(tokens) == ["the", f" {last}"]
    assert tokens[1].data == b" " + data
    assert (detokenizer.stopped, detokenizer.num_tokens) == ("g", 2)
    assert detokenizer.step(ids) == []
    assert detokenizer.num_tokens == 2


def test_a_cut_inside_the_bytes_of_a_character(byte_level: Pair) -> None:
    """A token that ends in the first bytes of the stop string's character loses them."""
    ours = byte_level.ours
    ids = split(ours, b"c\xc3", b"\xa9")
    tokens = Detokenizer(ours, stop=["é"]).step(ids)
    assert [(token.text, token.data) for token in tokens] == [("c", b"c")]


def test_a_cut_after_a_broken_character_keeps_all_its_bytes(byte_level: Pair) -> None:
    ours = byte_level.ours
    across = next(i for i in range(ours.vocab_size) if ours.token_text(i) == "\ufffd本")
    broken = ours.token_bytes(across)[:1]
    tokens = Detokenizer(ours, stop=["本"]).step([*split(ours, b"\xf0"), across])
    assert [(token.text, token.data) for token in tokens] == [("", b"\xf0"), ("\ufffd", broken)]


def test_a_stop_string_at_the_very_start(byte_level: Pair) -> None:
    ours = byte_level.ours
    detokenizer = Detokenizer(ours, stop=["the"])
    assert detokenizer.step(split(ours, b"the", b" dog")) == []
    assert (detokenizer.stopped, detokenizer.num_tokens, detokenizer.flush()) == ("the", 1, [])


def test_the_earliest_then_the_shortest_stop_string(byte_level: Pair) -> None:
    ours = byte_level.ours
    detokenizer = Detokenizer(ours, stop=["swer", "answ", "an", "ans"])
    assert texts(detokenizer.step(split(ours, b" answer"))) == [" "]
    assert detokenizer.stopped == "an"


def test_a_stop_string_in_the_flushed_tail(byte_level: Pair) -> None:
    ours = byte_level.ours
    detokenizer = Detokenizer(ours, stop=["b\ufffd"])
    tokens = detokenizer.step(split(ours, b"a", b"b", b"\xf0")) + detokenizer.flush()
    assert texts(tokens) == ["a"]
    assert (detokenizer.stopped, detokenizer.num_tokens) == ("b\ufffd", 3)


def test_stop_strings_wait_for_min_tokens(byte_level: Pair) -> None:
    ours = byte_level.ours
    detokenizer = Detokenizer(ours, stop=["dog"], min_tokens=1)
    tokens = detokenizer.step(split(ours, b" dog", b"the", b" dog", b"the"))
    assert texts(tokens) == [" dog", "the", " "]
    assert detokenizer.num_tokens == 3


def test_the_leading_space_of_a_text_of_its_own(sentencepiece: Pair) -> None:
    ours = sentencepiece.ours
    ids = ours.encode("Hello there")
    for begins_text, first in ((True, "Hello there"), (False, " Hello there")):
        detokenizer = Detokenizer(ours, begins_text=begins_text)
        tokens = detokenizer.step(ids) + detokenizer.flush()
        assert "".join(texts(tokens)) == first
        assert b"".join(token.data for token in tokens if token.visible) == first.encode()
        assert detokenizer.alternative_text(ids[1], begins_text=begins_text) == tokens[1].text


def test_an_id_without_token_does_not_begin_a_text(sentencepiece: Pair) -> None:
    ours = sentencepiece.ours
    ids = [ours.vocab_size, *ours.encode("Hello", add_special_tokens=False)]
    assert "".join(texts(Detokenizer(ours, begins_text=True).step(ids))) == "Hello"


def test_alternatives_are_decoded_alone_after_the_held_bytes(byte_level: Pair) -> None:
    ours = byte_level.ours
    alternative = Detokenizer(ours).alternative_text
    smile, half, the = split(ours, b"\x80", b"\x98", b"the")
    assert alternative(smile, b"\xf0\x9f\x98") == "😀"
    assert alternative(half, b"\xf0\x9f") == ""
    assert alternative(the, b"\xf0\x9f") == "\ufffdthe"
    assert alternative(the) == "the"
    assert alternative(smile) == "\ufffd"
    assert alternative(2, b"\xf0") == "<|im_end|>"
    assert alternative(10**9) == ""


def test_the_sampled_token_as_its_own_alternative(pair: Pair) -> None:
    ours = pair.ours
    detokenizer = Detokenizer(ours)
    ids = ours.encode("naïve 日本 😀 text", add_special_tokens=False)
    for token in detokenizer.step(ids):
        assert detokenizer.alternative_text(ids[token.index], token.held) == token.text


def test_a_plain_token_costs_few_calls(byte_level: Pair) -> None:
    ids = byte_level.ours.encode("the quick brown fox " * 400)
    detokenizer = Detokenizer(byte_level.ours)
    calls = count_calls(lambda: detokenizer.step(ids))
    assert detokenizer.num_tokens == len(ids)
    assert calls < 3.1 * len(ids)  # a tuple made in two calls, and an append
