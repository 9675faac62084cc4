"""The reduction: what it returns, and what an implementation of it offers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from neper.ops.common.variants import Variants
from neper.ops.logprobs.token_sets import TokenSets

LIST_SIZES = (8, 32, 64)
"""The sizes of lists that kernels are compiled for; longer lists are the reference's everywhere."""


class TokenLogprobs(NamedTuple):
    """Scores of R rows, on the device of the logits.

    Attributes:
        logprob: [R] float32, natural log, of the row's token.
        rank: [R] int32, 1 + the number of ids with a strictly greater logit; 0 in an invalid row.
        top_ids: [R, k] int32, by (logit descending, id ascending); -1 in unused places.
        top_logprobs: [R, k] float32; -inf in unused places.
        valid: [R] bool; False where the row holds NaN or +inf, or nothing above -inf. All else of such a row is
            filled: logprob -inf, rank 0, an empty list.
    """

    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    valid: Tensor

    @staticmethod
    def empty(rows: int, top_k: int, device: torch.device | str) -> TokenLogprobs:
        """Uninitialised fields for `rows` rows and lists of `top_k` ids."""
        return TokenLogprobs(
            logprob=torch.empty(rows, dtype=torch.float32, device=device),
            rank=torch.empty(rows, dtype=torch.int32, device=device),
            top_ids=torch.empty(rows, top_k, dtype=torch.int32, device=device),
            top_logprobs=torch.empty(rows, top_k, dtype=torch.float32, device=device),
            valid=torch.empty(rows, dtype=torch.bool, device=device),
        )

    def take(self, rows: slice) -> TokenLogprobs:
        """The scores of some rows."""
        return TokenLogprobs(*(field[rows] for field in self))


class ScoringOps(Protocol):
    """An implementation of the reduction; its arguments are checked already."""

    def token_logprobs(
        self,
        logits: Tensor,
        token_ids: Tensor | None,
        top_k: int,
        *,
        out: TokenLogprobs,
        scratch: Tensor | None = None,
        row_top_k: Tensor | None = None,
        temperature: Tensor | None = None,
        allowed: TokenSets | None = None,
        named: TokenSets | None = None,
        rows: Tensor | None = None,
    ) -> None:
        """Score rows into `out`; see `neper.ops.token_logprobs.token_logprobs`.

        Args:
            top_k: no longer than the lists of `out`; more than V lists V.
            out: fields of exactly these rows; their lists hold every list of the call.
            scratch: flat int32, of `scratch_words`; made for this call where it is absent or too small.
            named: the sets of logprob_token_ids.
        """

    def scratch_words(self, rows: int, vocab_size: int) -> int:
        """int32 words of scratch for a reduction of `rows` rows."""

    def variants(self, vocab_size: int, dtype: torch.dtype, max_top_k: int, device: torch.device) -> Variants:
        """All that reductions of such logits need, for sets and lists of up to `max_top_k` ids."""


def list_sizes(max_top_k: int) -> list[int]:
    """Those of LIST_SIZES that lists of up to `max_top_k` ids need."""
    smaller = (0, *LIST_SIZES)
    return [size for size, before in zip(LIST_SIZES, smaller, strict=False) if before < max(1, max_top_k)]
