"""Memory that reductions are written to, made once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from neper.ops import backends
from neper.ops.logprobs.api import TokenLogprobs


@dataclass(frozen=True)
class LogprobBuffers:
    """Memory for reductions of up to N rows with lists of up to K ids, made once and written again and again.

    The kernels' reduction into buffers does not wait for the device and allocates nothing, so it can be captured in a
    CUDA graph. (It allocates for lists of more than 64 ids, sets of more than 1,024, sets given as lists, and per-row
    arguments that are not contiguous. The reference always does.) The result is a view of `scores`, which the next
    reduction into the same buffers overwrites.

    Attributes:
        scores: fields [N, ...] as in TokenLogprobs, lists of width K.
        scratch: flat int32, what the kernels hand from one to the next; empty where the reference computes.
        vocab_size: the V that the scratch was sized for.
    """

    scores: TokenLogprobs
    scratch: Tensor
    vocab_size: int

    @staticmethod
    def allocate(rows: int, vocab_size: int, top_k: int, device: torch.device | str) -> LogprobBuffers:
        """Buffers for `rows` rows of `vocab_size` logits and lists of `top_k` ids."""
        words = backends.scoring(device).scratch_words(rows, vocab_size)
        return LogprobBuffers(
            scores=TokenLogprobs.empty(rows, top_k, device),
            scratch=torch.empty(words, dtype=torch.int32, device=device),
            vocab_size=vocab_size,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(t.numel() * t.element_size() for t in (*self.scores, self.scratch))

    def view(self, rows: int, top_k: int) -> TokenLogprobs:
        """The places of a reduction of `rows` rows with lists of `top_k`."""
        s = self.scores
        return TokenLogprobs(
            s.logprob[:rows], s.rank[:rows], s.top_ids[:rows, :top_k], s.top_logprobs[:rows, :top_k], s.valid[:rows]
        )
