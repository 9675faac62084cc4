"""Encoding of long texts piece by piece, so that it can be ended in between: when nobody waits, or at too many ids.

A piece ends between a letter and a space, if the tokenizer is known to begin anew there. For other tokenizers, and
texts without such a place, the whole text is one piece. Its beginnings are then encoded first, each twice as long as
the one before. So a text that is far too long is refused without encoding all of it.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from neper.text.vocabulary import component_steps

Progress = Callable[[int], None]
"""progress(ids): there are at least so many ids. An error from it ends the encoding."""

PIECE = 32 * 1024
"""Characters of a piece, about: 20 ms of work."""

_PLACE = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_PROBES = ("the fox", "I'm he", "x's y", "Ab cD", "we'LL go", "ЖЖ a b c", "1a b", "-a b", "\na b", " a b", "日本a b")


class PieceEncoder:
    """Encodes long texts with a backend, without the special tokens around a text.

    Attributes:
        begins_anew: the ids of a text are those of its pieces, one after the other.
        longest: most characters of an id; None where there is no such bound.
    """

    def __init__(self, backend: Backend, longest: int) -> None:
        self._backend = backend
        steps = component_steps(backend.pre_tokenizer)
        self.begins_anew = _begins_anew(backend, steps)
        self.longest = longest if self.begins_anew and _covers_text(backend, steps) else None

    def encode(self, text: str, progress: Progress) -> array[int]:
        """Ids of a text. Raises TypeError for a text that UTF-8 cannot spell."""
        if self.longest:
            progress(-(-len(text) // self.longest))
        ids = array("I")
        for piece in self._pieces(text):
            size = 2 * PIECE
            while 2 * size < len(piece):
                # More text can change the last ids, but never half of them.
                progress(len(ids) + len(self._encode(piece[:size])) // 2)
                size *= 2
            ids.extend(self._encode(piece))
            progress(len(ids))
        return ids

    def _encode(self, text: str) -> list[int]:
        # Unlike `encode`, the batch call lets other threads run meanwhile.
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _pieces(self, text: str) -> Iterator[str]:
        start = 0
        while self.begins_anew and (place := _PLACE.search(text, start + PIECE)):
            yield text[start : place.start()]
            start = place.start()
        yield text[start:]


def _begins_anew(backend: Backend, steps: list[dict[str, Any]]) -> bool:
    """True where a regular expression without look-behind splits words from the space after them."""
    if not isinstance(backend.model, BPE) or backend.model.dropout:
        return False
    if any(step["type"] != "NFC" for step in component_steps(backend.normalizer)):
        return False
    if not steps or not all(map(_splits, steps)):
        return False
    for token in backend.get_added_tokens_decoder().values():
        if _PLACE.search(token.content) or (token.rstrip and token.content[-1:].isalpha()):
            return False
    splitter = backend.pre_tokenizer
    for probe in _PROBES:
        pieces = [text for text, _ in splitter.pre_tokenize_str(probe)]
        cut = _PLACE.search(probe)
        while cut:
            halves = probe[: cut.start()], probe[cut.start() :]
            if pieces != [text for half in halves for text, _ in splitter.pre_tokenize_str(half)]:
                return False
            cut = _PLACE.search(probe, cut.end())
    return True


def _splits(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"]
    if step["type"] == "Split":
        kept = step["behavior"] == "Isolated" or (step["behavior"] == "Removed" and step["invert"])
        return kept and "(?<" not in str(step["pattern"])
    return bool(step["type"] == "Digits")


def _covers_text(backend: Backend, steps: list[dict[str, Any]]) -> bool:
    """True where every character of a text has an id: none is dropped, joined or taken in by the token beside it."""
    return (
        backend.normalizer is None
        and any(step["type"] == "ByteLevel" for step in steps)
        and all(step.get("behavior") != "Removed" for step in steps)
        and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    )
