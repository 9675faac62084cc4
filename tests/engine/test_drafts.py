"""Drafters and their depth, held to plain searches."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from neper.engine.draft.depth import Depth
from neper.engine.draft.drafting import Drafting
from neper.engine.draft.ngram import ORDERS, NgramDrafter, NgramIndex
from neper.engine.plan.sequence import Sequence
from neper.types import Request, SamplingParams


def found(text: list[int], suffix: list[int]) -> int:
    """The place after the last occurrence of the longest n-gram of ORDERS that ends `suffix`, by trying all."""
    for order in ORDERS:
        wanted = suffix[-order:]
        for end in range(len(text) - 1, order - 1, -1):
            if len(wanted) == order and text[end - order : end] == wanted:
                return end
    return -1


def test_an_index_finds_what_a_search_finds() -> None:
    chance, same, asked = random.Random(0), 0, 0
    for _ in range(30):
        text = [chance.randrange(6) for _ in range(chance.randrange(1, 300))]
        index, begin = NgramIndex(), 0
        while begin < len(text):
            end = min(len(text), begin + chance.choice([1, 1, 2, 30]))
            index.extend(text[begin:end])
            begin = end
            place, length = index.find(text[:begin])
            if place >= 0:
                assert place < begin
                assert text[place - length : place] == text[begin - length : begin]
            same += place == found(text[:begin], text[:begin])
            asked += 1
        assert index.token_ids == text
    # Of two n-grams that share a place in a table the later one stays, so that a few are not found.
    assert same > 0.9 * asked


def test_an_index_knows_nearly_all_ngrams_of_a_long_text() -> None:
    chance = random.Random(0)
    text = [chance.randrange(50_000) for _ in range(20_000)]
    index = NgramIndex(text)
    right = sum(index.find(text[end - 5 : end]) == (end, 5) for end in range(5, len(text)))
    assert right > 0.75 * len(text)


def sequence(prompt: list[int], prediction: tuple[int, ...] = ()) -> Sequence:
    request = Request(
        request_id="0",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=50),
        prediction_token_ids=prediction,
    )
    return Sequence(request, 1000)


def test_drafts_follow_what_the_prompt_says_after_the_same_tokens() -> None:
    seq, drafter = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4]), NgramDrafter()
    assert drafter.propose({seq: 8}) == {seq: [5, 6, 7]}  # as many as match
    for token_id in (5, 6, 7):
        seq.append(token_id)
    assert drafter.propose({seq: 8}) == {seq: [8, 9, 2, 3, 4, 5]}
    assert drafter.propose({seq: 2}) == {seq: [8, 9]}
    assert drafter.ready(seq)
    seq.append(77)
    assert drafter.propose({seq: 8}) == {seq: []}
    assert not drafter.ready(seq)


def test_drafts_repeat_what_repeats_itself() -> None:
    seq, drafter = sequence([1, 8, 9, 8, 9, 8, 9, 8, 9]), NgramDrafter()
    assert drafter.propose({seq: 6}) == {seq: [8, 9, 8, 9, 8, 9]}


def test_drafts_follow_a_prediction_from_its_beginning_and_find_it_again() -> None:
    seq, drafter = sequence([1, 2], prediction=(10, 11, 12, 13, 14, 15, 16, 17)), NgramDrafter()
    assert drafter.propose({seq: 3}) == {seq: [10, 11, 12]}
    for token_id in (10, 11, 99):
        seq.append(token_id)
    assert drafter.propose({seq: 3}) == {seq: []}
    for token_id in (12, 13, 14):
        seq.append(token_id)
    assert drafter.propose({seq: 3}) == {seq: [15, 16, 17]}


def test_a_long_prompt_is_indexed_in_pieces() -> None:
    chance = random.Random(0)
    text = [chance.randrange(50_000) for _ in range(20_000)]
    seq, drafter = sequence(text + text[100:110]), NgramDrafter()
    found_after = next(calls for calls in range(1, 10) if drafter.propose({seq: 3})[seq])
    assert 1 <= found_after < 9
    assert drafter.propose({seq: 3}) == {seq: text[110:113]}
    late = sequence(text + text[19_000:19_010])
    proposed = [drafter.propose({late: 3})[late] for _ in range(6)]
    assert proposed[0] == []
    assert proposed[-1] == text[19_010:19_013]


def test_choices_share_the_index_of_their_prediction() -> None:
    prediction = tuple(range(10, 60))
    drafter = NgramDrafter()
    choices = [sequence([1, 2], prediction), sequence([1, 2], prediction)]
    for place, seq in enumerate(choices):
        for token_id in (99, 20 + place, 21 + place, 22 + place):
            seq.append(token_id)
    proposed = drafter.propose(dict.fromkeys(choices, 2))
    assert [proposed[seq] for seq in choices] == [[23, 24], [24, 25]]
    assert len(drafter._predictions) == 1
    for seq in choices:
        drafter.forget(seq)
    assert not drafter._predictions


class Stubborn:
    """A drafter that proposes the same token at every step."""

    writes = False

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id
        self.asked: list[int] = []

    def ready(self, seq: Sequence) -> bool:
        return True

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        self.asked += wanted.values()
        return {seq: [self._token_id] * most for seq, most in wanted.items()}

    def accepted(self, seq: Sequence, num_accepted: int) -> None: ...

    def forget(self, seq: Sequence) -> None: ...


@pytest.mark.parametrize("useless", [3, -1, 100])
def test_drafts_that_can_never_be_accepted_are_paused_as_well(useless: int) -> None:
    """An end token, and no token: they are cut to nothing before the model sees them."""
    request = Request(
        request_id="0", prompt_token_ids=[1, 2], sampling=SamplingParams(max_tokens=50), eos_token_ids=(3,)
    )
    seq, drafter = Sequence(request, 1000), Stubborn(useless)
    seq.num_computed_tokens = 1
    drafting = Drafting(drafter, most=8, rows=64, vocab_size=100)
    for _ in range(40):
        assert drafting.propose([seq], lambda _, count: count) == {}
        drafting.follow(seq, 0, 0)
    assert len(drafter.asked) < 8


def test_no_more_is_drafted_than_a_reply_can_take() -> None:
    seq, drafter = sequence([1, 2]), Stubborn(9)
    drafting = Drafting(drafter, most=8, rows=64, vocab_size=100)
    for _ in range(50):
        seq.num_computed_tokens = len(seq.token_ids) - 1
        drafts = drafting.propose([seq], lambda _, count: count)
        assert len(drafts.get(seq, ())) <= max(0, 49 - (len(seq.token_ids) - 2))
        drafting.follow(seq, len(drafts.get(seq, ())), len(drafts.get(seq, ())))
        seq.append(9)
    assert drafter.asked[-3:] == [3, 2, 1]


def test_useful_drafts_end_before_the_reply_does() -> None:
    request = Request(
        request_id="0",
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(max_tokens=5, stop_token_ids=(7,)),
        eos_token_ids=(3,),
    )
    seq = Sequence(request, 1000)
    assert seq.useful_drafts([4, 4, 4, 4, 4, 4]) == (4, 4, 4, 4)
    assert seq.useful_drafts([4, 7, 4]) == (4,)
    assert seq.useful_drafts([3, 4]) == ()
    for token_id in (4, 4, 4, 4):
        seq.append(token_id)
    assert seq.useful_drafts([4]) == ()


def test_depth_grows_with_what_is_accepted_and_pauses_where_nothing_is() -> None:
    depth = Depth(8)
    assert depth.wanted == 8
    depth.follow(8, 2)
    assert depth.wanted == 3
    depth.follow(3, 3)
    assert depth.wanted == 6
    depth.follow(6, 0)
    assert depth.wanted == 3  # one miss is an accident
    pauses = []
    for _ in range(3):
        depth.follow(depth.wanted, 0)
        pauses.append(0)
        while not depth.wanted:
            depth.follow(0, 0)
            pauses[-1] += 1
    assert pauses == [4, 8, 16]
    depth.follow(1, 1)
    assert depth.wanted == 2
