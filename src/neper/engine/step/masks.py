"""Masks of the ids that a step's rows may sample: allowed sets, bad words and grammars, as bits made on the host."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from neper.engine.plan.scheduler import SampledRow
from neper.engine.plan.sequence import Sequence
from neper.engine.step.inputs import to_device
from neper.ops import Masks

Words = npt.NDArray[np.int32]


def mask_words(vocab_size: int) -> int:
    """int32 words of a row's mask."""
    return -(-vocab_size // 32)


class MaskBuilder:
    """Makes the masks of rows, and keeps the part of each sequence's that never changes as long as the sequence."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._static: WeakKeyDictionary[Sequence, Words] = WeakKeyDictionary()

    def build(self, rows: Items[SampledRow], places: Items[int], device: torch.device) -> Masks | None:
        """Masks of the rows at these places of a step; None when there are none.

        The tokens before each must be known if the sequence `waits_for_tokens`. Rows of one chunk stand in order.
        """
        if not rows:
            return None
        words = np.stack([self._static_words(row.seq) for row in rows])
        firsts = {place: row for place, row in enumerate(rows) if row.place == 0}
        matchers = {place: row.seq.matcher for place, row in firsts.items() if row.seq.matcher is not None}
        if matchers:
            from neper.text.matcher import fill_masks  # llguidance is loaded with the first grammar

            legal = np.empty((len(matchers), words.shape[1]), dtype=np.int32)
            fill_masks(list(matchers.values()), legal)
            words[list(matchers)] &= legal
            for place, matcher in matchers.items():
                drafts = rows[place].chunk.drafts
                if drafts:
                    words[place + 1 : place + 1 + len(drafts)] &= matcher.masks_after(drafts)
        for place, row in enumerate(rows):
            _ban(words[place], row.seq.completed_bad_words(row.chunk.end_of_own, row.drafts))
        return Masks(rows=to_device(np.array(places, dtype=np.int64), device), words=to_device(words, device))

    def leaves_nothing(self, seq: Sequence) -> bool:
        """True where the request's fields ban every id that could be its next token, whatever the logits."""
        words = self._static_words(seq).copy()
        if seq.matcher is not None:
            legal = np.empty_like(words)
            seq.matcher.fill(legal)
            words &= legal
        _ban(words, seq.completed_bad_words(len(seq.token_ids)))
        left = np.unpackbits(words.view(np.uint8), bitorder="little")[: self._vocab_size]
        edits = seq.logit_edits(len(seq.token_ids) - seq.num_prompt_tokens)
        banned = edits.ids[np.isneginf(edits.values)]
        left[banned[(banned >= 0) & (banned < self._vocab_size)]] = 0
        return not left.any()

    def _static_words(self, seq: Sequence) -> Words:
        """The mask of what never changes: the allowed ids without the bad words of one token. Made once a sequence."""
        words = self._static.get(seq)
        if words is None:
            sampling = seq.request.sampling
            bits = np.zeros(32 * mask_words(self._vocab_size), dtype=np.uint8)
            allowed = np.array(sampling.allowed_token_ids, dtype=np.int64)
            bits[allowed if len(allowed) else slice(self._vocab_size)] = 1
            bits[[word[0] for word in sampling.bad_words if len(word) == 1]] = 0
            words = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)
            self._static[seq] = words
        return words


def _ban(words: Words, token_ids: Iterable[int]) -> None:
    """Clear the bits of these ids."""
    for banned in token_ids:
        words[banned // 32] &= ~np.int32(np.uint32(1 << banned % 32).view(np.int32))
