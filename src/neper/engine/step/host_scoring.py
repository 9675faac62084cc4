"""Scoring on the host: whole rows of logits are copied there and reduced by the reference.

For what the device's reduction cannot do (`scoring: host`), and as the measure of what it saves.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from neper.engine.plan.scheduler import ScheduledChunk
from neper.ops import token_logprobs
from neper.ops.packing.reference import pack_scores
from neper.types import PackedRows


@dataclass(frozen=True)
class HostRows:
    """Rows of sampled tokens that are scored on the host.

    Attributes:
        logits: [n, V] on the host (on their way there until the step's copies have arrived).
        chunks: [n], the chunk of each row.
        top_k: [n], alternatives to list.
    """

    logits: Tensor
    chunks: tuple[ScheduledChunk, ...]
    top_k: tuple[int, ...]

    def copied(self) -> HostRows:
        """The same rows in memory of their own."""
        return replace(self, logits=self.logits.clone())


def score_rows(rows: HostRows, tokens: dict[ScheduledChunk, PackedRows]) -> None:
    """Put scores beside the sampled tokens of these rows, which are in `tokens` without them."""
    words = [tokens[chunk].words[0] for chunk in rows.chunks]
    token_ids = torch.tensor([int(word[0]) for word in words])
    valid = torch.tensor([bool(word[1]) for word in words])
    packed = score_logits(rows.logits, token_ids, rows.top_k, valid)
    tokens.update(zip(rows.chunks, packed, strict=True))


def score_logits(logits: Tensor, token_ids: Tensor, top_k: Items[int], valid: Tensor | None = None) -> list[PackedRows]:
    """Scores of rows of logits [n, V] on the host, of the tokens [n], each with its own number of alternatives.

    A row that `valid` [n] bool rules out is marked as invalid whatever its logits.
    """
    scores = token_logprobs(logits.float(), token_ids, max(top_k))
    if valid is not None:
        scores = scores._replace(rank=scores.rank.masked_fill(~valid, 0))
    packed = []
    for i, k in enumerate(top_k):
        row = slice(i, i + 1)
        packed.append(PackedRows(k, pack_scores(token_ids[row], scores.take(row), k).numpy().tobytes()))
    return packed
