"""The cut between a prompt and its continuations, held to the whole text as transformers encodes it."""

from __future__ import annotations

import pytest

from neper.errors import InvalidRequestError
from neper.text.boundary import find_boundary
from tests.helpers.tiny import CORPUS
from tests.text.conftest import Pair

SENTENCE = CORPUS[0]
CUTS = [
    (SENTENCE[:end], [SENTENCE[end : end + length] for length in (1, 2, 5, 11)] + [" dog", "x", "日本", "."])
    for end in (3, 9, 10, 13, 20, 40, 41, 60)
]
CUTS += [
    ("Hello, world! ", ["Hello", " there", "\n"]),
    ("Hello there.\n\n", [" A", "B", "\nC"]),
    ("日本", ["語の", "x"]),
    (SENTENCE * 30, [" fox", "x", " the dog sleeps"]),
]


def common(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


@pytest.mark.parametrize(("prompt", "continuations"), CUTS, ids=[text[-9:] for text, _ in CUTS])
def test_the_whole_is_what_it_is_as_one_text(pair: Pair, prompt: str, continuations: list[str]) -> None:
    ids = pair.ours.encode(prompt)
    wholes = [list(pair.oracle(prompt + text)["input_ids"]) for text in continuations]
    given = [*continuations, [7, 8]]
    found = find_boundary(pair.ours, ids, given)
    assert [ids[: found.position] + list(part) for part in found.token_ids[:-1]] == wholes
    assert found.position == min(common(ids, whole) for whole in wholes)
    assert ids[: found.position] + list(found.token_ids[-1]) == [*ids, 7, 8]
    assert found.kind == ("clean" if found.position == len(ids) else "merged")
    spelled = b"".join(map(pair.ours.token_bytes, ids[found.position :])).decode()
    assert found.text == spelled
    assert prompt.endswith(spelled.removeprefix(" "))


def test_a_merge_moves_all_candidates(byte_level: Pair) -> None:
    ids = byte_level.ours.encode("the quick bro")
    alone = find_boundary(byte_level.ours, ids, [" dog"])
    assert (alone.kind, alone.position, alone.text) == ("clean", len(ids), "")
    both = find_boundary(byte_level.ours, ids, ["wn", " dog", [9]])
    assert both.kind == "merged"
    assert both.position < len(ids)
    assert both.token_ids[1] == (*ids[both.position :], *alone.token_ids[0])
    assert both.token_ids[2] == (*ids[both.position :], 9)


def test_ids_that_are_no_encoding_stay(sentencepiece: Pair) -> None:
    tokenizer = sentencepiece.ours
    odd = [token_id for letter in "the" for token_id in tokenizer.encode_after("\n", [letter])[0][-1:]]
    assert tokenizer.encode("the", add_special_tokens=False) != odd
    found = find_boundary(tokenizer, odd, ["fox", " fox"])
    assert (found.kind, found.position) == ("separate", 3)
    assert [tokenizer.spelled(ids) for ids in found.token_ids] == ["fox", " fox"]
    assert find_boundary(tokenizer, odd, [[5, 6]]).kind == "clean"


def test_a_prompt_that_ends_inside_a_character(byte_level: Pair) -> None:
    [*ids, _] = byte_level.ours.encode("a 😀")
    found = find_boundary(byte_level.ours, ids, [" fox"])
    assert found.kind == "separate"
    assert byte_level.ours.spelled(found.token_ids[0]) == " fox"


def test_control_tokens_in_continuations(byte_level: Pair) -> None:
    tokenizer = byte_level.ours
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi <|im_end|>"}])
    texts = ["<|im_end|>", "Hello<|im_end|>", "Hello"]
    as_tokens = find_boundary(tokenizer, ids, texts)
    assert (as_tokens.kind, as_tokens.token_ids[0]) == ("clean", (tokenizer.eos_token_id,))
    as_text = find_boundary(tokenizer, ids, texts, special_tokens=False)
    assert as_text.kind == "clean"
    assert [tokenizer.spelled(ids) for ids in as_text.token_ids] == texts
    assert not tokenizer.special_token_ids & {token_id for ids in as_text.token_ids for token_id in ids}
    assert as_text.token_ids[2] == as_tokens.token_ids[2]


def test_what_cannot_be_cut(byte_level: Pair) -> None:
    tokenizer = byte_level.ours
    with pytest.raises(InvalidRequestError, match="whole prompt"):
        find_boundary(tokenizer, tokenizer.encode("t"), ["he"])
    for given in (["a", ""], ["a", []]):
        with pytest.raises(InvalidRequestError, match=r"candidates\[1\] has no tokens"):
            find_boundary(tokenizer, [5], given)
    with pytest.raises(InvalidRequestError, match="Unicode"):
        find_boundary(tokenizer, tokenizer.encode("a b"), ["\ud800"])
