"""Lines that nobody thought of: made up by the grammar, and then mutated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from neper.wire.lines import (
    AnswerLine,
    Done,
    Failed,
    Gen,
    Info,
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
)

INF = math.inf
ID = st.integers(0, 2**31 - 1)
COUNT = st.integers(0, 2**63 - 1)
FLOAT32 = st.floats(max_value=0.0, min_value=float(np.finfo(np.float32).min), width=32)
TIME = st.floats(0, allow_infinity=False, allow_nan=False)
REAL = st.floats(allow_infinity=False, allow_nan=False)
WORD = st.text(st.characters(codec="utf-8", exclude_characters=" \t\n\r\x0b\x0c"), min_size=1, max_size=8)
TAG = st.one_of(st.integers(0, 10**6).map(str), WORD)
TEXT = st.text(max_size=40)


@st.composite
def scores(draw: st.DrawFn, tag: str | None) -> Logprobs:
    ids = draw(st.lists(ID, max_size=24, unique=True))
    values = draw(st.lists(st.one_of(FLOAT32, st.just(-INF)), min_size=len(ids), max_size=len(ids)))
    raw = draw(st.booleans())
    index, token_id = (draw(COUNT), draw(ID)) if raw else (None, None)
    return Logprobs(draw(FLOAT32), ids, values, tag, index, token_id)


def answers(tag: str | None) -> st.SearchStrategy[AnswerLine]:
    name = st.just(tag)
    return st.one_of(
        st.builds(Token, ID, name),
        scores(tag),
        st.builds(Progress, COUNT, COUNT, name),
        st.builds(Done, COUNT, COUNT, TIME, TIME, WORD, COUNT, COUNT, COUNT, COUNT, COUNT, name),
        st.builds(Failed, TEXT, name),
        st.builds(ReadyLine, st.integers(1, 2**63 - 1), st.booleans(), COUNT),
        st.builds(Info, TEXT),
        st.builds(Notice, st.sampled_from(["SLOT", "WAIT"]), TEXT),
    )


def requests(tag: str | None) -> st.SearchStrategy[RequestLine]:
    def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(st.none(), strategy)

    gen = st.builds(
        Gen,
        prompt_token_ids=st.lists(ID, min_size=1, max_size=30),
        max_new=ID,
        tag=st.just(tag),
        temperature=maybe(TIME),
        top_p=maybe(st.floats(0, 1)),
        top_k=maybe(st.integers(-1, 2**31 - 1)),
        min_p=maybe(st.floats(0, 1)),
        seed=maybe(st.integers(-(2**63), 2**64 - 1)),
        penalty_repeat=maybe(TIME),
        penalty_freq=maybe(REAL),
        penalty_present=maybe(REAL),
        penalty_last_n=maybe(st.integers(-1, 2**31 - 1)),
        logprobs=maybe(ID),
        allowed=st.lists(ID, max_size=10),
    )
    return st.one_of(gen, st.just(Stop(tag)), st.just(Quit()))


MADE_ANSWER = st.one_of(st.none(), TAG).flatmap(lambda tag: st.tuples(answers(tag), st.just(tag is not None)))
MADE_REQUEST = st.one_of(st.none(), TAG).flatmap(lambda tag: st.tuples(requests(tag), st.just(tag is not None)))

PIECES = [
    *(
        b"",
        b" ",
        b":",
        b",",
        b"-",
        b".",
        b"e",
        b"_",
        b"+",
        b"#",
        b"=",
        b"[",
        b"]",
        b'"',
        b"0",
        b"9",
        b"\0",
        b"\n",
        b"\x1c",
    ),
    *(
        b"inf",
        b"-inf",
        b"nan",
        b"null",
        b"raw",
        b"1e999",
        b"-1e-400",
        b"-1e39",
        b"-3.4028236e38",
        b"2147483648",
        b" 5:-1",
        b"T ",
        b"LP ",
        b" #8",
    ),
    *(b"\xff", "٣".encode(), "\x85\u2028".encode()),
]


@st.composite
def mutated(draw: st.DrawFn, lines: st.SearchStrategy[bytes]) -> bytes:
    """A line with a few stretches replaced."""
    line = draw(lines)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(line)))
        end = draw(st.integers(start, min(len(line), start + 4)))
        line = line[:start] + draw(st.one_of(st.sampled_from(PIECES), st.binary(max_size=3))) + line[end:]
    return line


WRITTEN_ANSWER = MADE_ANSWER.map(lambda made: format_answer(made[0]))
WRITTEN_REQUEST = MADE_REQUEST.map(lambda made: format_request(made[0]))
WRITTEN_SCORES = scores(None).map(format_answer)


def rounded(line: Logprobs) -> Logprobs:
    """With float32 numbers."""
    values = np.array([line.logprob, *line.logprobs], np.float32).astype(float).tolist()
    return Logprobs(values[0], line.ids, values[1:], line.tag, line.index, line.token_id)
