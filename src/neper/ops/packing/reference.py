"""Packs a step's results into one flat int32 tensor, so that one copy brings them to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from neper.ops.logprobs.api import TokenLogprobs


def pack_tokens(token_ids: Tensor, valid: Tensor) -> Tensor:
    """Rows without scores: `[id, valid]` words, flat [2 R] int32."""
    return torch.stack([token_ids.int(), valid.int()], 1).view(-1)


def pack_scores(token_ids: Tensor, scores: TokenLogprobs, top_k: int, out: Tensor | None = None) -> Tensor:
    """Rows with scores: `[id, rank, logprob bits, top_k ids, top_k logprob bits]` words, flat int32.

    `scores` may list more than top_k alternatives: the first top_k are taken. `out`: flat int32 words to write to.
    """
    count, width = len(token_ids), 3 + 2 * top_k
    if out is None:
        out = torch.empty(count * width, dtype=torch.int32, device=token_ids.device)
    words = out.view(count, width)
    words[:, 0] = token_ids
    words[:, 1] = scores.rank
    words[:, 2] = scores.logprob.view(torch.int32)
    words[:, 3 : 3 + top_k] = scores.top_ids[:, :top_k]
    words[:, 3 + top_k :] = scores.top_logprobs[:, :top_k].view(torch.int32)
    return out
