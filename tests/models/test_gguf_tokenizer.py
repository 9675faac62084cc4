"""Tokenizers rebuilt from GGUF metadata: the original's ids, each family's words, specials kept apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from neper.models.gguf_metadata import Metadata
from neper.models.gguf_tokenizer import build_tokenizer, write_tokenizer
from tests.helpers.tiny import CORPUS
from tests.helpers.tiny import write_tokenizer as write_tiny_tokenizer


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    return directory


def _metadata(original: Path, **changes: Any) -> Metadata:
    saved = json.loads((original / "tokenizer.json").read_text())
    tokens = sorted(saved["model"]["vocab"], key=saved["model"]["vocab"].get)
    values = {
        "general.architecture": "llama",
        "llama.context_length": 77,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in saved["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}<|im_end|>",
    }
    return Metadata(values | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})


def _words(original: Path, pre: str, text: str) -> list[str]:
    pre_tokenizer = build_tokenizer(_metadata(original, pre=pre)).pre_tokenizer
    return [word.replace("Ġ", " ").replace("Ċ", "\n") for word, _ in pre_tokenizer.pre_tokenize_str(text)]


def test_ids_of_the_original(original: Path) -> None:
    ours, theirs = build_tokenizer(_metadata(original)), AutoTokenizer.from_pretrained(original)
    for text in [*CORPUS, "  two  spaces\n\ttab 2024 ", "<|im_start|>user\nhi<|im_end|>", "", "\x00\x7f"]:
        ids = ours.encode(text).ids
        assert ids == theirs(text).input_ids
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'll pay 12345 now", ["I", "'ll", " pay", " 12345", " now"]),
        ("default", "x 12345", ["x", " 12345"]),
        ("smollm", "I'll pay 123 now", ["I", "'ll", " pay", " ", "1", "2", "3", " now"]),
        ("llama-bpe", "I'LL pay 12345", ["I", "'LL", " pay", " ", "123", "45"]),
        ("llama-bpe", "a.b\n\n  c", ["a", ".b", "\n\n", " ", " c"]),
        ("qwen2", "I'LL pay 123", ["I", "'LL", " pay", " ", "1", "2", "3"]),
        ("qwen2", "x!!\n\ny", ["x", "!!\n\n", "y"]),
    ],
)
def test_words(original: Path, pre: str, text: str, words: list[str]) -> None:
    assert _words(original, pre, text) == words


def test_qwen2_composes_characters(original: Path) -> None:
    decomposed, composed = "cafe\u0301", "caf\u00e9"
    qwen2, gpt2 = (build_tokenizer(_metadata(original, pre=pre)) for pre in ("qwen2", "gpt-2"))
    assert qwen2.encode(decomposed).ids == qwen2.encode(composed).ids
    assert gpt2.encode(decomposed).ids != gpt2.encode(composed).ids


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({}, False),
        ({"add_bos_token": True}, True),
        ({"add_bos_token": False, "pre": "llama-bpe"}, False),
        ({"pre": "llama-bpe"}, True),
    ],
)
def test_bos_as_the_file_says(original: Path, changes: dict[str, Any], begins: bool, tmp_path: Path) -> None:
    write_tokenizer(_metadata(original, **changes), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer("hello").input_ids[0] == 1) is begins
    assert tokenizer("hello", add_special_tokens=False).input_ids[0] != 1
    assert len(tokenizer("hello", "hello").input_ids) == 2 * len(tokenizer("hello").input_ids)


def test_control_tokens_are_special_and_user_defined_ones_are_not(original: Path) -> None:
    types = [3] * 3 + [1] * 327
    types[2] = 4
    tokenizer = build_tokenizer(_metadata(original, token_type=types))
    ids = tokenizer.encode("<|im_start|>hello<|im_end|>").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "hello<|im_end|>"


def test_tokenizer_config(original: Path, tmp_path: Path) -> None:
    write_tokenizer(_metadata(original, unknown_token_id=0, padding_token_id=0), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|endoftext|>", "<|endoftext|>")
    assert tokenizer.model_max_length == 77
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hey"}], tokenize=False)
    assert rendered == "hey<|im_end|>"
