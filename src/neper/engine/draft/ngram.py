"""Drafts by lookup: what followed the same few tokens earlier, in the prompt, the reply or a given prediction."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from neper.engine.plan.sequence import Sequence
from neper.engine.step.runner import BegunStep

ORDERS = (5, 3)
"""Lengths of the n-grams that are looked up, the longest first. Pairs of tokens repeat by chance."""

_FACTOR = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: its multiples spread evenly
_WORD = 2**64 - 1
_LEAST_SIZE = 64
# Tokens before an n-gram that is found which are compared as well.
_LONGEST_MATCH = 16
# Tokens of a text that are indexed at a time, in half a millisecond.
_PIECE = 4096


class NgramIndex:
    """Where the n-grams of a growing text occurred last.

    Each order has a table of positions by the n-gram's hash. A hash that two n-grams share costs the older one its
    place, and what is found is compared. An index takes 8 to 32 bytes per token and order beside the tokens, and time
    in proportion to the tokens.
    """

    def __init__(self, token_ids: Items[int] = ()) -> None:
        self.token_ids: list[int] = []
        self._bits = 0
        self._tables: list[npt.NDArray[np.int32]] = []
        self.extend(token_ids)

    def extend(self, token_ids: Items[int]) -> None:
        before = len(self.token_ids)
        self.token_ids += token_ids
        size = len(self.token_ids)
        if not self._tables or 2 * size > 1 << self._bits:
            self._bits = max(_LEAST_SIZE, 4 * size - 1).bit_length()
            self._tables = [np.full(1 << self._bits, -1, dtype=np.int32) for _ in ORDERS]
            before = 0
        for table, order in zip(self._tables, ORDERS, strict=True):
            # The n-gram that ends the text is left out: nothing follows it yet.
            first, last = max(order, before), size - 1
            if last - first < 8:
                for end in range(first, last + 1):
                    table[self._place(self.token_ids[end - order : end])] = end
            else:
                ids = np.array(self.token_ids[first - order : last], dtype=np.uint64)
                hashes: npt.NDArray[Any] = np.zeros(last + 1 - first, dtype=np.uint64)
                for step in range(order):
                    hashes = (hashes + ids[step : step + len(hashes)] + np.uint64(1)) * np.uint64(_FACTOR)
                table[hashes >> np.uint64(64 - self._bits)] = np.arange(first, last + 1, dtype=np.int32)

    def find(self, token_ids: Items[int]) -> tuple[int, int]:
        """The place after the last occurrence of the longest known n-gram that ends these tokens.

        Returns:
            That place, below the length of the text, and how many tokens before it match; (-1, 0) where there is none.
        """
        own = self.token_ids
        for table, order in zip(self._tables, ORDERS, strict=True):
            if len(token_ids) < order:
                continue
            suffix = list(token_ids[-order:])
            end = int(table[self._place(suffix)])
            if end < 0 or own[end - order : end] != suffix:
                continue
            most = min(len(token_ids), end, _LONGEST_MATCH)
            length = order
            while length < most and own[end - length - 1] == token_ids[-length - 1]:
                length += 1
            return end, length
        return -1, 0

    def _place(self, ngram: Items[int]) -> int:
        value = 0
        for token_id in ngram:
            value = (value + token_id + 1) * _FACTOR & _WORD
        return value >> (64 - self._bits)


class _Known:
    """The index of a sequence's text, that of its prediction, and the place of the reply in the prediction."""

    def __init__(self, seq: Sequence, predicted: NgramIndex) -> None:
        self._text = NgramIndex()
        self._predicted = predicted
        self._followed = seq.num_prompt_tokens  # tokens that the cursor has followed
        self._cursor = 0

    def next_tokens(self, seq: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that may follow."""
        ids, prediction = seq.token_ids, seq.request.prediction_token_ids
        _index_more(self._text, ids)
        if prediction:
            _index_more(self._predicted, prediction)
            tokens = self._of_prediction(seq, prediction, most)
            if tokens:
                return tokens
        place, length = self._text.find(ids)
        if place < 0:
            return []
        most = min(most, length)
        drafts = ids[place : place + most]
        period = len(drafts)  # a text that repeats itself ends before the drafts do
        while len(drafts) < most:
            drafts.append(drafts[-period])
        return drafts

    def _of_prediction(self, seq: Sequence, prediction: tuple[int, ...], most: int) -> list[int]:
        new = seq.token_ids[self._followed :]
        self._followed += len(new)
        if list(prediction[self._cursor : self._cursor + len(new)]) == new:
            self._cursor += len(new)
        else:
            first = max(seq.num_prompt_tokens, len(seq.token_ids) - _LONGEST_MATCH)
            place, _ = self._predicted.find(seq.token_ids[first:])
            # Nothing is expected until an n-gram is met again.
            self._cursor = place if place >= 0 else len(prediction)
        return list(prediction[self._cursor : self._cursor + most])


def _index_more(index: NgramIndex, token_ids: Items[int]) -> None:
    """Index the next tokens of a text, not all of a long one at once: steps wait for it."""
    known = len(index.token_ids)
    if known < len(token_ids):
        index.extend(token_ids[known : known + _PIECE])


class NgramDrafter:
    """Looks up drafts; it has no weights. It satisfies `neper.engine.draft.drafter.Drafter`."""

    writes = False

    def __init__(self) -> None:
        self._known: dict[Sequence, _Known] = {}
        # Those of choices that run; the choices of a request share theirs.
        self._predictions: WeakValueDictionary[tuple[int, ...], NgramIndex] = WeakValueDictionary()

    def ready(self, seq: Sequence) -> bool:
        # The first of these tokens stands for the pending one.
        return len(self._next_tokens(seq, 2)) > 1

    def observe(self, step: BegunStep) -> None:
        """It reads tokens, no hidden states."""

    def propose(self, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Items[int]]:
        return {seq: self._next_tokens(seq, most) for seq, most in wanted.items()}

    def accepted(self, seq: Sequence, num_accepted: int) -> None:
        """Needs nothing: the sequence itself has the tokens."""

    def forget(self, seq: Sequence) -> None:
        self._known.pop(seq, None)

    def _next_tokens(self, seq: Sequence, most: int) -> list[int]:
        known = self._known.get(seq)
        if known is None:
            index = self._predictions.setdefault(seq.request.prediction_token_ids, NgramIndex())
            known = self._known[seq] = _Known(seq, index)
        return known.next_tokens(seq, most)
