"""The tokenizer inside a GGUF file, rebuilt in Hugging Face form (tokenizer.json, tokenizer_config.json)."""

from __future__ import annotations

import json
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from neper.errors import ModelLoadError
from neper.files import one_line
from neper.models.gguf_metadata import Metadata

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")

# tokenizer.ggml.pre → the way to cut text into words before the merges.
_GPT2 = ("gpt-2", "gpt2", "default")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact")
_LLAMA3 = ("llama-bpe", "llama-v3", "llama3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")


# Control tokens with which models end a reply. A file may name only one of several.
_END_TOKENS = frozenset(
    [
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>", "<eos>", "<EOT>"),
        *("<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<end_of_utterance>", "<|END_OF_TURN_TOKEN|>"),
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ]
)
# Where replies have channels, the second of these ends only one channel.
_CHANNELS = ("<|channel|>", "<|end|>")


class _TokenType(IntEnum):
    CONTROL = 3
    USER_DEFINED = 4


def write_tokenizer(metadata: Metadata, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; ModelLoadError where the kind of tokenizer is not supported."""
    build_tokenizer(metadata).save(str(directory / "tokenizer.json"))
    text = json.dumps(_tokenizer_config(metadata), indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def end_token_ids(metadata: Metadata) -> list[int]:
    """The tokens that end a reply: those that the file names, and known control tokens."""
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens")
    types: list[int] = metadata.need("tokenizer.ggml.token_type")
    named = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    control = {token: place for place, token in enumerate(tokens) if types[place] == _TokenType.CONTROL}
    channel, end_of_channel = _CHANNELS
    known = [
        place
        for token, place in control.items()
        if token in _END_TOKENS and not (token == end_of_channel and channel in control)
    ]
    return list(dict.fromkeys([*(place for place in named if place is not None), *known]))


def check_kind(metadata: Metadata) -> None:
    """Check before anything is built that the kind of tokenizer is supported; ModelLoadError otherwise."""
    kind = metadata.need("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelLoadError(
            f"GGUF tokenizer {one_line(repr(kind))} is not supported (supported is byte-level BPE, 'gpt2'); "
            "use the model's Hugging Face directory or hub id instead"
        )
    _pre_tokenizer(metadata.need("tokenizer.ggml.pre"))


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """The byte-level BPE tokenizer of a GGUF file, its control tokens special, its user-defined ones merely added."""
    check_kind(metadata)
    pre = metadata.need("tokenizer.ggml.pre")
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens")
    types: list[int] = metadata.need("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in metadata.need("tokenizer.ggml.merges")]
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens):
        raise ModelLoadError(f"the GGUF tokenizer's {len(tokens)} tokens are not distinct, or not all have a type")
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3)
    except Exception as error:  # the tokenizers library raises no narrower class
        raise ModelLoadError(f"the GGUF tokenizer's merges are damaged: {error}") from error

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    added = [
        AddedToken(token, special=kind == _TokenType.CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_TokenType.CONTROL, _TokenType.USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    if _adds_bos(metadata):
        number = metadata.need("tokenizer.ggml.bos_token_id")
        bos = tokens[number]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, number)]
        )
    return tokenizer


def _pre_tokenizer(pre: str) -> Any:
    if pre in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    words = _LLAMA3_WORDS if pre in _LLAMA3 else _QWEN2_WORDS if pre in _QWEN2 else None
    if words is None:
        known = ", ".join(_GPT2 + _SINGLE_DIGITS + _LLAMA3 + _QWEN2)
        raise ModelLoadError(
            f"GGUF pre-tokenizer {one_line(repr(pre))} is not supported (supported are {known}); "
            "use the model's Hugging Face directory or hub id instead"
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _adds_bos(metadata: Metadata) -> bool:
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        raise ModelLoadError("tokenizer.ggml.add_eos_token is set, which is not supported: prompts would end at once")
    # Where the file does not tell, only Llama 3's tokenizer begins a text with BOS.
    return bool(metadata.get("tokenizer.ggml.add_bos_token", metadata["tokenizer.ggml.pre"] in _LLAMA3))


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata.need(f"{metadata.architecture}.context_length"),
        "add_bos_token": _adds_bos(metadata),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            if not 0 <= number < len(tokens):
                raise ModelLoadError(f"tokenizer.ggml.{key}_token_id {number} is not one of {len(tokens)} tokens")
            config[f"{name}_token"] = tokens[number]
    templates = {
        name.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": source
        for name, source in metadata.items()
        if name == "tokenizer.chat_template" or name.startswith("tokenizer.chat_template.")
    }
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": source} for name, source in templates.items()]
    return config
