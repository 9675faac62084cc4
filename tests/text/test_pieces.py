"""Long texts in pieces: the ids are those of the whole, and nothing that fits is ever called too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from neper.text import pieces, tokenizer
from neper.text.pieces import PieceEncoder
from neper.text.tokenizer import Tokenizer as OurTokenizer

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog's den",
    "I'm here; you're there, we'LL see  them",
    "日本 a b é é",
]


def backend(pre_tokenizer: Any, normalizer: Any = None, *tokens: AddedToken) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizer
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens(list(tokens))
    return made


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior, invert),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
MARK = AddedToken("<|end|>", special=True, normalized=False)
STRIPPING = AddedToken("<|end|>", special=True, normalized=False, lstrip=True, rstrip=True)
BEGIN_ANEW: dict[str, Tokenizer] = {
    "gpt2": backend(GPT2, None, MARK),
    "digits": backend(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]), None, MARK),
    "cl100k": backend(split(CL100K), None, MARK),
    "o200k": backend(split(O200K), None, STRIPPING),
    "removed": backend(split(CL100K, "removed", True), None, MARK),
    "nfc": backend(split(CL100K), normalizers.NFC(), STRIPPING),
}
WHOLE: dict[str, Callable[[], Tokenizer]] = {
    "prefix space": lambda: backend(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "no regular expression": lambda: backend(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "looks behind": lambda: backend(split(r"(?<=x) |\p{L}+|\s+")),
    "words with their space": lambda: backend(split(r"\w+\s?|\s+|[^\w\s]+")),
    "metaspace": lambda: backend(pre_tokenizers.Metaspace()),
    "spaces removed": lambda: backend(pre_tokenizers.WhitespaceSplit()),
    "replacing": lambda: backend(GPT2, normalizers.Replace(Regex(" +"), " ")),
    "words in a token": lambda: backend(GPT2, None, AddedToken("the end", special=True)),
    "a word that takes spaces": lambda: backend(GPT2, None, AddedToken("end", special=True, rstrip=True)),
    "no pre-tokenizer": lambda: Tokenizer(models.BPE()),
    "unigram": lambda: Tokenizer(models.Unigram([("a", 0.0)])),
}
FRAGMENTS = [
    *"abAZ 1.,-'_$\n\t\r\x00éЖ日。😀\u0301\u00a0\u3000\u200b",
    *("the", " fox", "'s", "'LL", " I'm", "\r\n", "  ", "23", "e\u0301", "<|end|>", "<|end", "👩\u200d👩"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=60).map("".join)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 5)
    monkeypatch.setattr(tokenizer, "PIECE", 5)


def check(made: Tokenizer, text: str) -> None:
    told: list[int] = []
    longest = max(len(token.encode()) for token in made.get_vocab())
    ids = PieceEncoder(made, longest).encode(text, told.append).tolist()
    assert ids == made.encode(text, add_special_tokens=False).ids
    assert max(told) == len(ids)


@pytest.mark.rounds(40)
@pytest.mark.parametrize("name", BEGIN_ANEW)
def test_case_111_pieces_are_the_whole(name: str, rounds: int) -> None:
    made = BEGIN_ANEW[name]
    settings(max_examples=rounds, deadline=None)(given(text=TEXTS)(lambda text: check(made, text)))()


@pytest.mark.parametrize("name", BEGIN_ANEW)
def test_texts_are_cut(name: str) -> None:
    encoder = PieceEncoder(BEGIN_ANEW[name], 10)
    assert encoder.begins_anew
    assert len(list(encoder._pieces("the fox jumps over a dog and so on"))) > 3
    # Spaces that a token takes in, and what a normalizer makes shorter, need no ids.
    assert (encoder.longest is None) == (name in ("o200k", "removed", "nfc"))


@pytest.mark.parametrize("name", WHOLE)
def test_other_tokenizers_get_the_whole(name: str) -> None:
    encoder = PieceEncoder(WHOLE[name](), 10)
    assert not encoder.begins_anew
    assert encoder.longest is None
    assert list(encoder._pieces("the fox jumps over a dog and so on")) == ["the fox jumps over a dog and so on"]


class TooLong(Exception):
    pass


def refuse_above(limit: int) -> Callable[[int], None]:
    def progress(num_ids: int) -> None:
        if num_ids > limit:
            raise TooLong(num_ids)

    return progress


@pytest.mark.parametrize("name", ["gpt2", "nfc", "no regular expression"])
@pytest.mark.parametrize("text", ["a " * 50_000, "a" * 100_000, "é1" * 30_000])
def test_case_111_what_is_far_too_long_is_known_early(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = PieceEncoder(BEGIN_ANEW[name] if name in BEGIN_ANEW else WHOLE[name](), 2**20)
    encoded: list[int] = []
    plain = encoder._encode

    def counted(text: str) -> list[int]:
        encoded.append(len(text))
        return plain(text)

    monkeypatch.setattr(encoder, "_encode", counted)
    with pytest.raises(TooLong):
        encoder.encode(text, refuse_above(100))
    assert sum(encoded) < 10_000


def test_case_111_text_beyond_context_times_longest_token_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = PieceEncoder(BEGIN_ANEW["gpt2"], 8)
    monkeypatch.setattr(encoder, "_encode", None)
    with pytest.raises(TooLong, match="101"):
        encoder.encode("a" * 801, refuse_above(100))


def test_special_tokens_stand_around_all_pieces() -> None:
    made = backend(GPT2, None, AddedToken("<s>", special=True), AddedToken("</s>", special=True))
    ours = OurTokenizer(made, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True})
    text = "the fox jumps over a dog"
    for special in (True, False):
        assert ours.encode(text, add_special_tokens=special, progress=int) == ours.encode(
            text, add_special_tokens=special
        )
