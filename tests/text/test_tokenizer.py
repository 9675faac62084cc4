"""Tokenizer: bytes per id against the libraries' decode, encoding, and what the configuration files say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from neper.errors import InvalidRequestError, ModelLoadError
from neper.text.tokenizer import Tokenizer
from tests.text.conftest import Pair

TEXTS = [
    "Hello, world!",
    " two  spaces",
    "日本語 😀👩‍👩‍👧 naïve\n\ttab",
    "",
    "   ",
    "<s>a<|im_end|>b",
    "\x00\x7f\xa0\xad",
]


def edited(pair: Pair, directory: Path, **config: Any) -> Tokenizer:
    """The same tokenizer with other values in its tokenizer_config.json; None removes one."""
    shutil.copytree(pair.path, directory, dirs_exist_ok=True)
    file = directory / "tokenizer_config.json"
    values = json.loads(file.read_text()) | config
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return Tokenizer.from_directory(directory)


@pytest.mark.parametrize("text", TEXTS)
def test_encode_is_the_librarys(pair: Pair, text: str) -> None:
    assert pair.ours.encode(text) == pair.oracle.encode(text)
    assert pair.ours.encode(text, add_special_tokens=False) == pair.oracle.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("text", [text for text in TEXTS if "<s>" not in text])
def test_a_texts_tokens_join_to_the_text(pair: Pair, text: str) -> None:
    assert pair.ours.decode_bytes(pair.ours.encode(text, add_special_tokens=False)) == text.encode()


def test_special_tokens_in_a_text_decode_as_the_library_decodes_them(pair: Pair) -> None:
    token_ids = pair.ours.encode("<s>a<|im_end|>b")
    assert pair.ours.decode_bytes(token_ids).decode() == pair.decode(token_ids)


@pytest.mark.rounds(150)
def test_random_ids_decode_as_the_library_decodes_them(pair: Pair, rounds: int) -> None:
    @settings(max_examples=rounds, deadline=None)
    @given(st.lists(st.integers(0, pair.ours.vocab_size - 1), max_size=12))
    def check(token_ids: list[int]) -> None:
        data = pair.ours.decode_bytes(token_ids)
        text = data.decode("utf-8", "replace")
        # For invalid bytes the library's ByteFallback writes one U+FFFD a byte, not one a broken character.
        if text.encode() == data or not pair.ours.strips_leading_space:
            assert text == pair.decode(token_ids)

    check()


def test_every_token_alone(pair: Pair) -> None:
    for token_id in range(pair.ours.vocab_size):
        text = pair.ours.token_text(token_id)
        expected = pair.decode([token_id])
        assert text in (expected, f" {expected}" if pair.ours.strips_leading_space else expected), token_id


def test_an_id_without_token_has_no_bytes(pair: Pair) -> None:
    for token_id in (pair.ours.vocab_size, 10**9, -1):
        assert pair.ours.token_bytes(token_id) == b""
        assert pair.ours.token_text(token_id) == ""
        assert pair.ours.pieces[token_id].data == b""


def test_byte_level_facts(byte_level: Pair) -> None:
    ours = byte_level.ours
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id) == (330, 1, 2)
    assert ours.special_token_ids == {0, 1, 2}
    assert not ours.adds_bos
    assert not ours.strips_leading_space
    assert ours.token_bytes(2) == b"<|im_end|>"
    singles = {ours.token_bytes(token_id) for token_id in range(330)}
    assert {bytes([byte]) for byte in range(256)} <= singles


def test_sentencepiece_facts(sentencepiece: Pair) -> None:
    ours = sentencepiece.ours
    assert ours.special_token_ids == {0, 1, 2}
    assert ours.adds_bos
    assert ours.strips_leading_space
    assert ours.encode("Hello")[0] == 1
    assert ours.token_bytes(3 + 0xF0) == b"\xf0"
    assert ours.token_bytes(ours.vocab_size - 1) == b"   "
    hello = ours.encode("Hello", add_special_tokens=False)
    assert b"".join(map(ours.token_bytes, hello)) == b" Hello"
    assert ours.decode_bytes([1, *hello]) == b"<s> Hello"


def test_special_tokens_that_only_the_configuration_names(byte_level: Pair, tmp_path: Path) -> None:
    ours = edited(byte_level, tmp_path, unk_token={"content": "the"}, extra_special_tokens=["er", "no such token"])
    assert ours.vocab_size == byte_level.ours.vocab_size
    assert ours.special_token_ids == {0, 1, 2, *ours.encode("the"), *ours.encode("er")}
    assert len(ours.special_token_ids) == 5


def test_tokens_that_only_the_configuration_lists(byte_level: Pair, tmp_path: Path) -> None:
    added = {"330": {"content": "<|é|>", "special": True}, "331": {"content": "<tool>", "special": False}}
    ours = edited(byte_level, tmp_path, added_tokens_decoder=added)
    assert ours.encode("<|é|><tool>") == [330, 331]
    assert ours.vocab_size == 332
    assert ours.decode_bytes([330, 331]) == "<|é|><tool>".encode()
    assert ours.special_token_ids == {0, 1, 2, 330}


def test_add_bos_token_is_heard(byte_level: Pair, tmp_path: Path) -> None:
    ours = edited(byte_level, tmp_path, add_bos_token=True)
    assert ours.adds_bos
    assert ours.encode("dog") == [1, *byte_level.ours.encode("dog")]
    assert ours.encode("dog", add_special_tokens=False) == byte_level.ours.encode("dog")


def test_truncation_and_padding_of_the_file_are_off(byte_level: Pair, tmp_path: Path) -> None:
    backend = Backend.from_file(str(byte_level.path / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=100)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "the quick brown fox"
    assert Tokenizer.from_directory(tmp_path).encode(text) == byte_level.ours.encode(text)


def test_an_older_form_is_converted(tmp_path: Path) -> None:
    vocabulary = {"<|endoftext|>": 0, "h": 1, "i": 2, "hi": 3, "Ġ": 4, "Ã": 5, "©": 6}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.encode("hi hié") == [3, 4, 3, 5, 6]
    assert ours.decode_bytes([3, 4, 3, 5, 6]) == "hi hié".encode()


def test_what_cannot_be_loaded(byte_level: Pair, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        Tokenizer.from_directory(tmp_path / "missing")
    with pytest.raises(ModelLoadError):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot read"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="does not hold a JSON object"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])]
)
def test_decoders_of_other_families_are_refused(decoder: Any) -> None:
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ModelLoadError, match="decoder"):
        Tokenizer(backend)


def test_a_byte_level_piece_outside_the_alphabet_is_literal() -> None:
    backend = Backend(models.BPE(vocab={"Ġa": 0, "a b": 1, "日": 2, "Ã©": 3, "\xad": 4}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    ours = Tokenizer(backend)
    assert [ours.token_bytes(i) for i in range(5)] == [b" a", b"a b", "日".encode(), "é".encode(), "\xad".encode()]
    assert all(ours.token_text(i) == backend.decode([i]) for i in range(5))


def test_metaspace_decoder() -> None:
    backend = Backend(models.BPE(vocab={"▁a": 0, "b": 1}, merges=[]))
    backend.decoder = decoders.Metaspace()
    ours = Tokenizer(backend)
    assert ours.strips_leading_space
    assert ours.decode_bytes([0, 0, 1]).decode() == backend.decode([0, 0, 1]) == "a ab"
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    assert not Tokenizer(backend).strips_leading_space


def test_a_special_token_keeps_its_own_text() -> None:
    backend = Backend(models.BPE(vocab={"▁a": 0, "<|a▁b|>": 1}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert Tokenizer(backend, {"eos_token": "<|a▁b|>"}).decode_bytes([0, 1]) == " a<|a▁b|>".encode()


def test_a_lone_surrogate_is_the_clients_error(pair: Pair) -> None:
    with pytest.raises(InvalidRequestError):
        pair.ours.encode("a\ud800")


def test_encoding_a_long_text_lets_other_threads_run(byte_level: Pair) -> None:
    started = threading.Event()

    def encode() -> None:
        started.set()
        byte_level.ours.encode("some words " * 50_000)

    worker = threading.Thread(target=encode)
    worker.start()
    started.wait()
    turns = 0
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10


def test_torch_is_not_imported() -> None:
    code = "import sys, neper.text.detokenizer; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
