"""The stop string automaton against plain searches of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neper.text.stop_strings import Match, StopMatcher
from tests.helpers.calls import count_calls

SMALL = st.text("ab日", min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.lists(SMALL, min_size=1, max_size=4), st.lists(st.text("ab日", max_size=5), max_size=6))
def test_matches_and_partial_match_are_those_of_a_plain_search(stops: list[str], parts: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = ""
    for part in parts:
        before, text = len(text), text + part
        ends = [
            (start, len(stop), stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > before
        ]
        expected = None
        if ends:
            start, length, stop = min(ends)
            expected = Match(stop, len(text) - start - length)
        assert matcher.feed(part) == expected
        prefixes = {stop[:length] for stop in stops for length in range(len(stop) + 1)}
        assert matcher.partial == max(
            length for length in range(len(text) + 1) if text[len(text) - length :] in prefixes
        )


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_time_is_linear_in_a_text_that_almost_matches() -> None:
    matcher = StopMatcher(["a" * 20_000 + "b", "ab" * 10_000 + "c"])
    for _ in range(100_000):  # quadratic work would be 10^9 steps
        assert matcher.feed("a") is None
    assert matcher.partial == 20_000
    assert matcher.feed("b") == Match("a" * 20_000 + "b", 0)


def test_searches_of_the_same_strings_share_the_automaton_and_not_their_places() -> None:
    stops = [chr(ord("a") + i) * 1000 + "!" for i in range(16)]
    first = StopMatcher(stops)
    others: list[StopMatcher] = []
    calls = count_calls(lambda: others.extend(StopMatcher(stops) for _ in range(127)))
    assert calls < 1000  # an automaton takes 176,000
    first.feed("a" * 1000)
    assert (first.partial, others[0].partial) == (1000, 0)
    assert others[0].feed("!") is None
    assert first.feed("!") == Match(stops[0], 0)
