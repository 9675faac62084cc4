"""Which ids a step's rows may sample: allowed sets, bad words and grammars as bit masks, made on the host."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from neper.engine.plan.scheduler import ScheduledChunk
from neper.engine.step.inputs import to_device
from neper.ops.sampling.reference import Masks

if TYPE_CHECKING:
    from neper.engine.plan.sequence import Sequence


def mask_words(vocab_size: int) -> int:
    """int32 words of a row's mask."""
    return -(-vocab_size // 32)


def build_masks(chunks: Items[ScheduledChunk], rows: Items[int], vocab_size: int, device: torch.device) -> Masks | None:
    """Masks of a step's `rows`, whose tokens these chunks sample, in the same order; None when there are none.

    The tokens before each must be known if the sequence `waits_for_tokens`.
    """
    if not rows:
        return None
    words = _words(chunks, vocab_size)
    return Masks(rows=to_device(np.array(rows, dtype=np.int64), device), words=to_device(words, device))


def leaves_nothing(chunk: ScheduledChunk, vocab_size: int) -> bool:
    """True where the request's fields ban every id that this chunk could sample, whatever the logits.

    The sequence must stand at this chunk: its tokens are those before the one that is sampled.
    """
    left = np.unpackbits(_words([chunk], vocab_size).view(np.uint8), bitorder="little")[:vocab_size]
    edits = chunk.seq.logit_edits(chunk.num_output_tokens)
    banned = edits.ids[np.isneginf(edits.values)]
    left[banned[(banned >= 0) & (banned < vocab_size)]] = 0
    return not left.any()


def _words(chunks: Items[ScheduledChunk], vocab_size: int) -> npt.NDArray[np.int32]:
    """Masks [n, ceil(V / 32)] of what these chunks may sample."""
    words = np.stack([_static_words(chunk.seq, vocab_size) for chunk in chunks])
    matchers = {place: chunk.seq.matcher for place, chunk in enumerate(chunks) if chunk.seq.matcher is not None}
    if matchers:
        from neper.text.matcher import fill_masks  # llguidance is loaded with the first grammar

        legal = np.empty((len(matchers), words.shape[1]), dtype=np.int32)
        fill_masks(list(matchers.values()), legal)
        words[list(matchers)] &= legal
    for place, chunk in enumerate(chunks):
        for banned in chunk.seq.completed_bad_words(chunk.end):
            words[place, banned // 32] &= ~np.int32(np.uint32(1 << banned % 32).view(np.int32))
    return words


def _static_words(seq: Sequence, vocab_size: int) -> npt.NDArray[np.int32]:
    """The mask of what never changes: the allowed ids without the bad words of one token. Made once a sequence."""
    if seq.static_mask is None:
        sampling = seq.request.sampling
        bits = np.zeros(32 * mask_words(vocab_size), dtype=np.uint8)
        allowed = np.array(sampling.allowed_token_ids, dtype=np.int64)
        bits[allowed if len(allowed) else slice(vocab_size)] = 1
        bits[[word[0] for word in sampling.bad_words if len(word) == 1]] = 0
        seq.static_mask = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)
    return seq.static_mask
