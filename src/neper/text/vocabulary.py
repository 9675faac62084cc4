"""The exact bytes of every token, read from the vocabulary's pieces and never through decode.

Two families of pieces exist. Byte-level BPE writes each byte as one printable character of GPT-2's alphabet.
SentencePiece writes a space as U+2581, and a byte that no piece covers as `<0xNN>`. A tokenizer's decoder shows its
family, so it is read here.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

from neper.errors import ModelLoadError

_MAX_IDS = 2**24
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(NamedTuple):
    """Attributes:
    table: id -> bytes; b"" where an id below the last one has no token.
    size: number of ids that have a token.
    strips_leading_space: the decoder drops the space that the tokenizer put before the first word of a text.
    """

    table: list[bytes]
    size: int
    strips_leading_space: bool


def read_vocabulary(backend: Backend) -> Vocabulary:
    """Every token's bytes. Raises ModelLoadError for a decoder of another family (WordPiece, CTC, …)."""
    if backend.decoder is None:
        raise ModelLoadError("the tokenizer has no decoder: its pieces cannot be turned into text")
    steps = component_steps(backend.decoder)
    kinds = {step["type"] for step in steps}
    added = backend.get_added_tokens_decoder()
    pieces = backend.get_vocab(with_added_tokens=True)
    last = max(pieces.values(), default=-1)
    if last >= _MAX_IDS:
        raise ModelLoadError(f"the tokenizer has a token with the id {last}; ids from {_MAX_IDS} on are not supported")
    table = [b""] * (1 + last)
    strips = False
    if kinds == {"ByteLevel"}:
        to_byte = _latin_1_of_alphabet()
        for piece, token_id in pieces.items():
            table[token_id] = _byte_level(piece, to_byte)
    elif kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        strips = any(_strips_space(step) for step in steps)
        replacements = [_replacement(step) for step in steps if step["type"] in ("Replace", "Metaspace")]
        has_bytes = "ByteFallback" in kinds
        for piece, token_id in pieces.items():
            if has_bytes and (match := _BYTE_PIECE.fullmatch(piece)):
                table[token_id] = bytes.fromhex(match[1])
                continue
            text = piece
            for old, new in replacements:
                text = text.replace(old, new)
            table[token_id] = text.encode()
    else:
        raise ModelLoadError(f"the tokenizer's decoder ({', '.join(sorted(kinds))}) is not supported")
    for token_id, token in added.items():
        # An added token is its own text. SentencePiece models also add runs of spaces, spelled as pieces.
        if token.special or kinds == {"ByteLevel"}:
            table[token_id] = token.content.encode()
    return Vocabulary(table, len(pieces), strips)


def component_steps(component: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder, in the form of its JSON; none where it is None."""
    steps: list[dict[str, Any]] = []
    stack = [] if component is None else [json.loads(component.__getstate__())]
    while stack:
        step = stack.pop()
        if step["type"] == "Sequence":
            inner = step.get("normalizers") or step.get("pretokenizers") or step.get("decoders") or []
            stack.extend(reversed(inner))
        else:
            steps.append(step)
    return steps


def _strips_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    if step["type"] == "Strip":
        if step["content"] != " " or step["start"] > 1 or step["stop"] != 0:
            raise ModelLoadError(f"the tokenizer's decoder strips more than one leading space: {step}")
        return bool(step["start"] == 1)
    return False


def _replacement(step: dict[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if "String" not in step["pattern"]:
        raise ModelLoadError(f"the tokenizer's decoder replaces by a regular expression: {step['pattern']}")
    return step["pattern"]["String"], step["content"]


def _byte_level(piece: str, to_byte: dict[int, int]) -> bytes:
    try:
        return piece.translate(to_byte).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


def _latin_1_of_alphabet() -> dict[int, int]:
    """Code point -> byte, for `str.translate` and then latin-1.

    The alphabet is that of OpenAI's GPT-2 encoder: a printable latin-1 byte is its own character, the others are
    U+0100 onwards in order. A character outside the alphabet makes the whole piece literal text, as in the library: it
    is mapped to one that latin-1 lacks.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = dict.fromkeys(others, 0xFFFF)
    table.update({0x100 + place: byte for place, byte in enumerate(others)})
    return table
