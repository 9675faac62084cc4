"""Whatever the line: it is read as it was written, or refused by a LineError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neper.wire.lines import (
    AnswerLine,
    Failed,
    Info,
    LineError,
    Logprobs,
    Notice,
    Quit,
    ReadyLine,
    RequestLine,
    format_answer,
    format_request,
    parse_answer,
    parse_request,
)
from tests.wire.made_up import MADE_ANSWER, MADE_REQUEST, WRITTEN_ANSWER, WRITTEN_REQUEST, mutated, rounded

Line = TypeVar("Line")


def attempt(parse: Callable[..., Line], line: bytes, tagged: bool) -> tuple[Line | None, LineError | None]:
    try:
        return parse(line, tagged=tagged), None
    except LineError as error:
        return None, error


def as_read(line: AnswerLine) -> AnswerLine:
    """What is to be read of a line that was written: white space in texts is spaces by then, and scores are float32."""
    if isinstance(line, Failed):
        return Failed(" ".join(line.message.split()), line.tag)
    if isinstance(line, Info):
        return Info(" ".join(line.text.split()))
    if isinstance(line, Notice):
        return Notice(line.kind, " ".join(line.text.split()))
    return rounded(line) if isinstance(line, Logprobs) else line


def answer_comes_back(made: tuple[AnswerLine, bool]) -> None:
    line, tagged = made
    written = format_answer(line)
    assert written.count(b"\n") == 1
    assert written.endswith(b"\n")
    again = parse_answer(written, tagged=tagged)
    assert as_read(again) == as_read(line)
    # Repeated with the sign of zero, which comparison does not see.
    assert format_answer(again) == format_answer(as_read(line))


def request_comes_back(made: tuple[RequestLine, bool]) -> None:
    line, tagged = made
    written = format_request(line)
    assert written.count(b"\n") == 1
    assert written.endswith(b"\n")
    assert parse_request(written, tagged=tagged) == line


def an_answer_or_refused(line: bytes, tagged: bool) -> None:
    found, error = attempt(parse_answer, line, tagged)
    again, same_error = attempt(parse_answer, line, tagged)
    assert again == found
    if found is None:
        assert error is not None
        assert same_error is not None
        assert str(error) == str(same_error)
        assert len(error.line) <= 200
        assert error.tag is None or (tagged and line.split()[-1] == b"#" + error.tag.encode())
        return
    if not isinstance(found, Info | Notice | ReadyLine):
        assert (found.tag is not None) == tagged
    answer_comes_back((found, tagged))


def a_request_or_refused(line: bytes, tagged: bool) -> None:
    found, error = attempt(parse_request, line, tagged)
    again, same_error = attempt(parse_request, line, tagged)
    assert again == found
    if found is None:
        assert error is not None
        assert str(error) == str(same_error)
        assert len(error.line) <= 200
        assert error.tag is None or (tagged and error.tag == line.split()[1].decode())
        return
    assert isinstance(found, Quit) or (found.tag is not None) == tagged
    request_comes_back((found, tagged))


PROPERTIES: dict[str, tuple[Callable[..., None], tuple[st.SearchStrategy[Any], ...]]] = {
    "an answer": (answer_comes_back, (MADE_ANSWER,)),
    "a request": (request_comes_back, (MADE_REQUEST,)),
    "any bytes as an answer": (an_answer_or_refused, (st.binary(max_size=80), st.booleans())),
    "any bytes as a request": (a_request_or_refused, (st.binary(max_size=80), st.booleans())),
    "a mutated answer": (an_answer_or_refused, (mutated(WRITTEN_ANSWER), st.booleans())),
    "a mutated request": (a_request_or_refused, (mutated(WRITTEN_REQUEST), st.booleans())),
}


@pytest.mark.rounds(200)
@pytest.mark.parametrize("kind", PROPERTIES)
def test_random_lines(kind: str, rounds: int) -> None:
    check, strategies = PROPERTIES[kind]
    settings(max_examples=rounds, deadline=None)(given(*strategies)(check))()
