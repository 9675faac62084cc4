"""A model directory that a server can load, of a shape: random weights, and a byte-level tokenizer of as many ids."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from neper.models import shapes

# The average of a real vocabulary's tokens, a space included.
_TOKEN_BYTES = 6
_LETTERS = 26
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write(name: str, directory: Path, *, dtype: torch.dtype) -> None:
    """Write the model of the shape `name` into an existing directory.

    Raises:
        ModelLoadError: no shape has this name.
    """
    config = shapes.source(name).config
    shapes.write(config, directory, dtype=dtype)
    tokenizer(config.vocab_size).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": _CHAT_TEMPLATE}), encoding="utf-8")


def tokenizer(vocab_size: int) -> Tokenizer:
    """`vocab_size` ids (256 or more), each with a text of its own: the bytes, then a space and letters.

    There are no merges, so a text is encoded byte by byte.
    """
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [f"Ġ{_letters(number)}" for number in range(vocab_size - len(pieces))]
    backend = Tokenizer(models.BPE({piece: token_id for token_id, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _letters(number: int) -> str:
    letters = ""
    for _ in range(_TOKEN_BYTES - 1):
        number, letter = divmod(number, _LETTERS)
        letters = chr(ord("a") + letter) + letters
    return letters
