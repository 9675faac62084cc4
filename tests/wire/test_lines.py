"""Lines of the T/LP protocol, both ways: what each says, what is refused and why, and bytes that are no text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from neper.wire.lines import (
    AnswerLine,
    Done,
    Failed,
    Gen,
    Info,
    LineError,
    Logprobs,
    Notice,
    Progress,
    Quit,
    ReadyLine,
    RequestLine,
    Stop,
    Token,
    format_answer,
    format_request,
    parse_answer,
    parse_request,
)

INF = math.inf
FLOAT32_TENTH = -0.10000000149011612
"""The float32 next to -0.1."""

ANSWERS: list[tuple[str, AnswerLine]] = [
    ("T 15", Token(15)),
    ("T 2147483647", Token(2**31 - 1)),
    ("LP -0.25", Logprobs(-0.25)),
    ("LP 0", Logprobs(0.0)),
    ("LP -0.25 7:-0.25 3:-1.5e-05 9:-2", Logprobs(-0.25, [7, 3, 9], [-0.25, -1.5e-5, -2.0])),
    ("LP -1 3:-1 4:-inf", Logprobs(-1.0, [3, 4], [-1.0, -INF])),
    ("LP -1 3:-1 4:-1e39", Logprobs(-1.0, [3, 4], [-1.0, -INF])),
    ("LP 0.0001 3:0.001 4:-1", Logprobs(0.0, [3, 4], [0.0, -1.0])),
    ("LP 0 raw 15 -0.5 0", Logprobs(-0.5, index=0, token_id=15)),
    ("LP 12 raw 15 -0.5 2 7:-0.25 15:-0.5", Logprobs(-0.5, [7, 15], [-0.25, -0.5], index=12, token_id=15)),
    ("PP 512 2048", Progress(512, 2048)),
    ("PP 512 2048 103.5 4947.2 and more", Progress(512, 2048)),
    ("DONE 3 17 8.5 40.25 stop", Done(3, 17, 8.5, 40.25, "stop")),
    ("DONE 3 17 8 40 length 2 5 16", Done(3, 17, 8.0, 40.0, "length", 2, 5, 16)),
    ("DONE 3 17 8.5 40.25 grün 2 5 16 90 100", Done(3, 17, 8.5, 40.25, "grün", 2, 5, 16, 90, 100)),
    ("DONE 0 17 8.5 0.0 cancel 2 5 16 90 100 7 1.5 word", Done(0, 17, 8.5, 0.0, "cancel", 2, 5, 16, 90, 100)),
    ("ERR the prompt is longer than 4096", Failed("the prompt is longer than 4096")),
    ("ERR", Failed("")),
]
OF_ENGINE: list[tuple[str, AnswerLine]] = [
    ("READY 4096", ReadyLine(4096)),
    ("READY 4096 stop", ReadyLine(4096, True)),
    ("READY 4096 slots=1", ReadyLine(4096, False, 1)),
    ("READY 4096 stop slots=8 later=1", ReadyLine(4096, True, 8)),
    ("INFO kv=int8 logprobs=raw-v1 hello a=b=c kv=f16", Info("kv=int8 logprobs=raw-v1 hello a=b=c kv=f16")),
    ("INFO", Info("")),
    ("SLOT 1 busy", Notice("SLOT", "1 busy")),
    ("WAIT", Notice("WAIT", "")),
]
REQUESTS: list[tuple[str, RequestLine]] = [
    ("GEN 5 1,2,3", Gen(max_new=5, prompt_token_ids=[1, 2, 3])),
    (
        "GEN 0 temperature=.7 top_p=0.9 top_k=-1 min_p=0 seed=-5 penalty_repeat=1.1 penalty_freq=-0.5 "
        "penalty_present=2 penalty_last_n=-1 logprobs=20 allowed=7,5,7 9",
        Gen(
            max_new=0, prompt_token_ids=[9], temperature=0.7, top_p=0.9, top_k=-1, min_p=0.0, seed=-5,
            penalty_repeat=1.1, penalty_freq=-0.5, penalty_present=2.0, penalty_last_n=-1, logprobs=20,
            allowed=[7, 5, 7],
        ),
    ),
    ("GEN 5 colour=red seed=18446744073709551615 colour=blue 0", Gen(max_new=5, prompt_token_ids=[0], seed=2**64 - 1)),
    ("STOP", Stop()),
    ("QUIT", Quit()),
]  # fmt: skip


def named(line: Any, tag: str) -> Any:
    return type(line)(**{**{field: getattr(line, field) for field in line.__struct_fields__}, "tag": tag})


def identity(text: str) -> bytes:
    return text.encode()


ENDINGS: list[Callable[[str], bytes]] = [
    identity,
    lambda text: text.encode() + b"\n",
    lambda text: text.encode() + b"\r\n",
    lambda text: b" " + text.replace(" ", " \t ").encode() + b" \r\n",
]


@pytest.mark.parametrize("spell", ENDINGS)
@pytest.mark.parametrize(("text", "line"), ANSWERS)
def test_answers_of_a_request(text: str, line: AnswerLine, spell: Callable[[str], bytes]) -> None:
    assert parse_answer(spell(text), tagged=False) == line
    for tag in ("0", "421", "#", "é=1"):
        assert parse_answer(spell(f"{text} #{tag}"), tagged=True) == named(line, tag)


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("spell", ENDINGS)
@pytest.mark.parametrize(("text", "line"), OF_ENGINE)
def test_answers_of_the_engine_carry_no_tag(
    text: str, line: AnswerLine, spell: Callable[[str], bytes], tagged: bool
) -> None:
    assert parse_answer(spell(text), tagged=tagged) == line


@pytest.mark.parametrize("spell", ENDINGS)
@pytest.mark.parametrize(("text", "line"), REQUESTS)
def test_requests(text: str, line: RequestLine, spell: Callable[[str], bytes]) -> None:
    assert parse_request(spell(text), tagged=False) == line
    word, _, rest = text.partition(" ")
    if not isinstance(line, Quit):
        text, line = f"{word} r8 {rest}", named(line, "r8")
    assert parse_request(spell(text), tagged=True) == line


def test_what_a_line_says_further() -> None:
    assert Info("kv=int8 hello a=b=c kv=f16 =x y=").fields == {"kv": "f16", "a": "b=c", "": "x", "y": ""}
    assert [ReadyLine(1, False, slots).tagged for slots in (0, 1, 2, 8)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (Token(15), "T 15"),
        (Token(15, "8"), "T 15 #8"),
        (Logprobs(-0.25), "LP -0.25"),
        (Logprobs(FLOAT32_TENTH, [7, 3], [FLOAT32_TENTH, -INF], "8"), "LP -0.1 7:-0.1 3:-inf #8"),
        (Logprobs(-0.5, [7], [-0.25], "8", 0, 15), "LP 0 raw 15 -0.5 1 7:-0.25 #8"),
        (Progress(512, 2048, "8"), "PP 512 2048 #8"),
        (Done(3, 17, 8.5, 40.0, "stop", 1, 2, 4, 8, 16, "8"), "DONE 3 17 8.5 40.0 stop 1 2 4 8 16 #8"),
        (Failed("two\nlines \u2028 here ", "8"), "ERR two lines here #8"),
        (ReadyLine(4096), "READY 4096"),
        (ReadyLine(4096, True, 8), "READY 4096 stop slots=8"),
        (Info("kv=int8\nT 5"), "INFO kv=int8 T 5"),
        (Notice("WAIT", "1 2"), "WAIT 1 2"),
    ],
)
def test_written_answers(line: AnswerLine, text: str) -> None:
    assert format_answer(line) == text.encode() + b"\n"


def test_written_requests() -> None:
    assert format_request(Gen(max_new=5, prompt_token_ids=[1, 2])) == b"GEN 5 1,2\n"
    full = Gen(
        max_new=5, prompt_token_ids=[1, 2], tag="8", temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=-3,
        penalty_repeat=1.1, penalty_freq=0.0, penalty_present=-1e-7, penalty_last_n=64, logprobs=0, allowed=[5, 6],
    )  # fmt: skip
    assert format_request(full) == (
        b"GEN 8 5 temperature=0.7 top_p=0.9 top_k=40 min_p=0.05 seed=-3 penalty_repeat=1.1 penalty_freq=0.0 "
        b"penalty_present=-1e-07 penalty_last_n=64 logprobs=0 allowed=5,6 1,2\n"
    )
    assert [format_request(line) for line in (Stop(), Stop("8"), Quit())] == [b"STOP\n", b"STOP 8\n", b"QUIT\n"]


@pytest.mark.parametrize(
    "line",
    [Logprobs(math.nan), Logprobs(INF), Logprobs(-INF)]
    + [Logprobs(-1.0, [3, 4], [-INF, wrong]) for wrong in (math.nan, INF)],
)
def test_no_line_is_written_of_what_is_no_logprob(line: Logprobs) -> None:
    with pytest.raises(ValueError, match="not a number"):
        format_answer(line)


NO_PAIRS = (
    "-inf|nan|inf|x|-1_0|-1 5|-1 5:nan|-1 5:inf|-1 5:-Inf|-1 5:-infinity|-1 5:-1:6|-1 5:-1,6|-1,5:-1|-1 5 :-1|-1 5: -1"
    "|5:-1 -1|-1 #8|-1 [5]:-1|-1 5:null|-1 5:-1 raw|-1 5::-1|-1 ٣:-1"
)
NO_NUMBERS = "-.5|-1.|+1|-01|--1|1-|-|-1 5:|-1 :-1|-1 05:-1|-1 5:-inf5|-1 5:-inf.5|-1e999|-1 5:-1e999|-1e"
NO_ANSWER = [
    ("", "not a line that engines send"),
    (" \r\n", "not a line that engines send"),
    ("t 5", "not a line that engines send"),
    ("TOKEN 5", "not a line that engines send"),
    ("GEN 5 1", "not a line that engines send"),
    ("\0T 5", "not a line that engines send"),
    ("T", "T needs one id"),
    ("T 5 6", "T needs one id"),
    ("T 5 #8", "T needs one id"),
    *(
        (f"T {word}", "the id is not a whole number")
        for word in ("-1", "+5", "1_0", "٣", "0x5", "5.0", "1e3", "5\0", "1" * 99)
    ),
    ("T 2147483648", "the id is not from 0 to 2147483647"),
    ("LP", "LP needs a logprob"),
    *((f"LP {words}", "LP is not a finite logprob and pairs of id:logprob") for words in NO_PAIRS.split("|")),
    *((f"LP {words}", "LP has a malformed number") for words in NO_NUMBERS.split("|")),
    ("LP -1e39", "the logprob is not finite"),
    ("LP 0.0011", "a logprob is above 0"),
    ("LP -1 5:-1 6:0.0011", "a logprob is above 0"),
    *(
        (f"LP -1 5:-1 {word}:-1", "an alternative's id is not a whole number from 0 to 2147483647")
        for word in ("-6", "2147483648", "6.0", "6e0", "18446744073709551616")
    ),
    ("LP -1 5:-1 6:-2 5:-3", "an id is listed twice"),
    ("LP -1 raw", "LP needs index, raw, id, logprob and count"),
    ("LP 0 raw 5 -1", "LP needs index, raw, id, logprob and count"),
    ("LP -1 raw 5 -1 0", "the index is not a whole number"),
    ("LP 0 raw x -1 0", "the id is not a whole number"),
    ("LP 0 raw 5 -1 x", "the count is not a whole number"),
    ("LP 0 raw 5 -1 1", "the count is not that of the alternatives"),
    ("LP 0 raw 5 -1 1 6:-1 7:-1", "the count is not that of the alternatives"),
    ("LP 0 raw 5 nan 0", "LP is not a finite logprob and pairs of id:logprob"),
    ("LP 0 raw 5 -1 2 6:-1 6:-1", "an id is listed twice"),
    ("PP", "PP needs two counts"),
    ("PP 5", "PP needs two counts"),
    ("PP x 5", "the first count is not a whole number"),
    ("PP 5 -5", "the second count is not a whole number"),
    ("DONE 1 2 3 4", "DONE needs two counts, two times and a word"),
    ("DONE x 2 3 4 stop", "the generated tokens is not a whole number"),
    ("DONE 1 2.0 3 4 stop", "the prompt's tokens is not a whole number"),
    *(
        (f"DONE 1 2 {word} 4 stop", "the prompt's time is not a number")
        for word in ("nan", "inf", "1e999", "1_0", "x", "1" * 99, "1.2.3")
    ),
    ("DONE 1 2 3 -4 stop", "the decoding time is not from 0 to inf"),
    ("DONE 1 2 3 4 stop 5", "DONE ends in 0, 3 or 5 counts"),
    ("DONE 1 2 3 4 stop 5 6 7 8", "DONE ends in 0, 3 or 5 counts"),
    ("DONE 1 2 3 4 stop 5 6 7.5", "a count after the word is not a whole number"),
    ("READY", "READY needs the context's length"),
    ("READY stop", "the context's length is not a whole number"),
    ("READY 0", "the context's length is not from 1 to 9223372036854775807"),
    ("READY 4096 slots=", "slots is not a whole number"),
    ("READY 4096 slots=2 slots=3", "slots= is there twice"),
]
NO_REQUEST = [
    ("", "not GEN, STOP or QUIT"),
    ("gen 5 1", "not GEN, STOP or QUIT"),
    ("T 5", "not GEN, STOP or QUIT"),
    ("STOP 8", "more words than STOP has"),
    ("QUIT now", "more words than QUIT has"),
    ("GEN", "GEN needs max_new and the prompt's ids"),
    ("GEN 5", "GEN needs max_new and the prompt's ids"),
    ("GEN -5 1", "max_new is not a whole number"),
    ("GEN seed=1 1", "max_new is not a whole number"),
    ("GEN 5 1 2", "a word between max_new and the ids is not key=value"),
    ("GEN 5 1 seed=5", "a word between max_new and the ids is not key=value"),
    *(
        (f"GEN 5 {word}", "the prompt is not ids from 0 to 2147483647, with commas between")
        for word in (
            "seed=5",
            ",",
            "1,",
            ",1",
            "1,,2",
            "-1",
            "1.0",
            "1e3",
            "01",
            "2147483648",
            "1,18446744073709551616",
            "x",
        )
    ),
    ("GEN 5 seed=1 seed=1 1", "seed is there twice"),
    ("GEN 5 seed= 1", "seed is not a whole number"),
    ("GEN 5 seed=1.5 1", "seed is not a whole number"),
    ("GEN 5 seed=--1 1", "seed is not a whole number"),
    ("GEN 5 seed=18446744073709551616 1", "seed is not from -9223372036854775808 to 18446744073709551615"),
    ("GEN 5 temperature=nan 1", "temperature is not a number"),
    ("GEN 5 temperature=-0.5 1", "temperature is not from 0 to inf"),
    ("GEN 5 top_p=1.5 1", "top_p is not from 0 to 1"),
    ("GEN 5 min_p=x 1", "min_p is not a number"),
    ("GEN 5 top_k=-2 1", "top_k is not from -1 to 2147483647"),
    ("GEN 5 top_k=5.0 1", "top_k is not a whole number"),
    ("GEN 5 penalty_repeat=-1 1", "penalty_repeat is not from 0 to inf"),
    ("GEN 5 penalty_freq= 1", "penalty_freq is not a number"),
    ("GEN 5 penalty_present=inf 1", "penalty_present is not a number"),
    ("GEN 5 penalty_last_n=-2 1", "penalty_last_n is not from -1 to 2147483647"),
    ("GEN 5 logprobs=-1 1", "logprobs is not a whole number"),
    ("GEN 5 allowed= 1", "allowed is not ids from 0 to 2147483647, with commas between"),
    ("GEN 5 allowed=1,x 1", "allowed is not ids from 0 to 2147483647, with commas between"),
]


def answer_error(line: bytes, *, tagged: bool) -> LineError:
    with pytest.raises(LineError) as raised:
        parse_answer(line, tagged=tagged)
    return raised.value


def request_error(line: bytes, *, tagged: bool) -> LineError:
    with pytest.raises(LineError) as raised:
        parse_request(line, tagged=tagged)
    return raised.value


@pytest.mark.parametrize(("text", "reason"), NO_ANSWER)
def test_malformed_answers(text: str, reason: str) -> None:
    error = answer_error(text.encode(), tagged=False)
    assert (error.reason, error.line, error.tag) == (reason, text.strip(), None)
    if text.strip() and not text.startswith("READY"):
        error = answer_error(f"{text} #8".encode(), tagged=True)
        assert (error.reason, error.tag) == (reason, "8")


@pytest.mark.parametrize(("text", "reason"), NO_REQUEST)
def test_malformed_requests(text: str, reason: str) -> None:
    error = request_error(text.encode(), tagged=False)
    assert (error.reason, error.line, error.tag) == (reason, text, None)
    word, _, rest = text.partition(" ")
    if word in ("GEN", "STOP"):
        error = request_error(f"{word} 8 {rest}".encode(), tagged=True)
        assert (error.reason, error.tag) == (reason, "8")


@pytest.mark.parametrize(
    "text", ["T 5", "T 5 8", "T 5 #", "T 5# 8", "LP -1 5:-1", "DONE 1 2 3 4 stop", "ERR #8 failed"]
)
def test_a_tagged_answer_that_names_no_request(text: str) -> None:
    error = answer_error(text.encode(), tagged=True)
    assert (error.reason, error.tag) == ("it names no request", None)


def test_a_tagged_request_without_its_name() -> None:
    for text in (b"GEN", b"STOP"):
        assert request_error(text, tagged=True).reason == "it names no request"


def test_bytes_that_are_no_text() -> None:
    assert answer_error(b"T \xff", tagged=False).line == "T \ufffd"
    assert answer_error(b"LP -1 5:-1\xff", tagged=False).reason.startswith("LP is not")
    assert answer_error(b"DONE 1 2 3 4 \xff", tagged=False).reason == "the last word is not UTF-8"
    assert answer_error(b"T 5 #\xff", tagged=True).reason == "the request's name is not UTF-8"
    assert request_error(b"STOP \xff", tagged=True).reason == "the request's name is not UTF-8"
    assert parse_answer(b"ERR caf\xe9 \xc3\xa9", tagged=False) == Failed("caf\ufffd é")
    assert parse_answer(b"INFO name=\xff", tagged=True) == Info("name=\ufffd")
    assert format_answer(Failed("\ud800 half", "8")) == b"ERR ? half #8\n"


def test_an_error_repeats_the_beginning_of_a_long_line() -> None:
    error = answer_error(b"T " + "é".encode() * 5000, tagged=False)
    assert error.line == "T " + "é" * 197 + "…"
    assert str(error) == f"the id is not a whole number: {error.line!r}"
    assert isinstance(error, ValueError)
    exact = b"T " + b"x" * 198
    assert answer_error(exact, tagged=False).line == exact.decode()
