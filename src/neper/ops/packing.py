"""Packs a step's results into one flat int32 tensor, so that one copy brings them to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from neper.ops.results import TokenLogprobs


def pack_tokens(token_ids: Tensor, valid: Tensor) -> Tensor:
    """Rows without scores: `[id, valid]` words, flat [2 R] int32."""
    return torch.stack([token_ids.int(), valid.int()], 1).view(-1)


def pack_scores(token_ids: Tensor, scores: TokenLogprobs, top_k: int) -> Tensor:
    """Rows with scores: `[id, rank, logprob bits, top_k ids, top_k logprob bits]` words, flat int32.

    `scores` may list more than top_k alternatives: the first top_k are taken.
    """
    return torch.cat(
        [
            token_ids.int().unsqueeze(1),
            scores.rank.unsqueeze(1),
            scores.logprob.view(torch.int32).unsqueeze(1),
            scores.top_ids[:, :top_k],
            scores.top_logprobs.contiguous().view(torch.int32)[:, :top_k],
        ],
        1,
    ).view(-1)
