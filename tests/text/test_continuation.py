"""Continuations at a border of tokens: ids whose bytes are the text's, also where a tokenizer puts a space before."""

from __future__ import annotations

from pathlib import Path

import pytest

from neper.text.continuation import encode_continuations
from neper.text.tokenizer import Tokenizer
from tests.server.conftest import byte_level_tokenizer
from tests.text.conftest import write_sentencepiece

TEXTS = ['"good"', ' "bad",', "true", " false}", '":"é"', "日本\n", "<|im_end|>"]


def sentencepiece(directory: Path) -> Tokenizer:
    write_sentencepiece(directory)
    return Tokenizer.from_directory(directory)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_ids_spell_the_texts_and_no_space_before_them(kind: str, tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer() if kind == "byte level" else sentencepiece(tmp_path)
    found = encode_continuations(tokenizer, TEXTS)
    assert found is not None
    assert [b"".join(map(tokenizer.token_bytes, ids)) for ids in found] == [text.encode() for text in TEXTS]
    assert not tokenizer.special_token_ids.intersection(*found)
