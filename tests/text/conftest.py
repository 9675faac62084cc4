"""Two tiny tokenizers, one of each family, with the Hugging Face object that each came from as the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from neper.text.tokenizer import Tokenizer
from tests.helpers.tiny import CORPUS, write_tokenizer


class Pair(NamedTuple):
    ours: Tokenizer
    oracle: PreTrainedTokenizerFast
    path: Path

    def decode(self, token_ids: list[int]) -> str:
        text = self.oracle.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def write_sentencepiece(directory: Path) -> PreTrainedTokenizerFast:
    """As Llama 2's and Mistral's: BPE over U+2581 for spaces, bytes for what has no piece (all but ASCII here)."""
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(
        [line for line in CORPUS if line.isascii()], trainers.BpeTrainer(vocab_size=120, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    backend = Backend(
        models.BPE(
            vocab={name: place for place, name in enumerate(names)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("▁▁▁", normalized=False)])  # runs of spaces, as Gemma adds them
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True
    )
    fast.save_pretrained(directory)
    return fast


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("byte_level")
    oracle = write_tokenizer(path)
    return Pair(Tokenizer.from_directory(path), oracle, path)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("sentencepiece")
    oracle = write_sentencepiece(path)
    return Pair(Tokenizer.from_directory(path), oracle, path)


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def pair(request: pytest.FixtureRequest) -> Pair:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Pair)
    return found
