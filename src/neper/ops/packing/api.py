"""Packing by kernels: where the results of rows go, and what the kernels offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from neper.ops.common.variants import Variants
from neper.ops.logprobs.api import TokenLogprobs


@dataclass(frozen=True)
class PackRows:
    """Where the results of S rows go, on the device of the logits; all [S] int32 and contiguous.

    Attributes:
        offsets: the row's first word in `words`; -1 = a padding row, for which nothing is written.
        listed: alternatives of the row; -1 = a row without scores.
        slots: the row's place in `last_tokens`.
    """

    offsets: Tensor
    listed: Tensor
    slots: Tensor


class PackingKernels(Protocol):
    """Rows of any width packed at places that the host knows, and the table of last tokens."""

    def pack_best(self, rows: PackRows, words: Tensor, last_tokens: Tensor, scratch: Tensor, vocab_size: int) -> None:
        """Write each row's best token, of which `SamplingKernels.best` left the parts in `scratch`: `[id, valid]`.

        Args:
            rows: none of them has scores; `listed` is not read.
            words: flat int32.
            last_tokens: [slots] int32; the row's slot gets its token too, 0 in an invalid row.
            scratch: as given to `best`, whose logits were [S, vocab_size].
        """

    def keep(
        self,
        rows: PackRows,
        kept: PackRows,
        last_tokens: Tensor,
        ids: Tensor,
        valid: Tensor,
        scratch: Tensor,
        vocab_size: int,
        *,
        chosen: bool,
    ) -> None:
        """Keep the tokens for the next step, and what `pack_chosen` needs when the rows' own fields may be others'.

        Args:
            kept: where the fields of `rows` are copied to.
            last_tokens: [slots] int32; the slot of each row that is no padding gets its token.
            ids, valid: [S] int32 and [S] bool: what was chosen, or where each row's best token and its validity go.
            scratch: of `best`, whose logits were [S, vocab_size]; not read if `chosen`.
        """

    def pack_chosen(
        self,
        rows: PackRows,
        words: Tensor,
        last_tokens: Tensor,
        ids: Tensor,
        valid: Tensor,
        scores: TokenLogprobs | None,
    ) -> None:
        """Write each row's token, and what it has of scores, as `neper.types.PackedRows` describes.

        A row with scores is invalid, rank 0, where either `valid` or its scores say so; one without where `valid` does.

        Args:
            words: flat int32.
            last_tokens: [slots] int32; the row's slot gets its token too, 0 in an invalid row.
            ids, valid: [S] int32 and [S] bool.
            scores: fields [S, ...] int32, float32 and bool, lists at least as long as the longest listed; None where no
                row has scores.
        """

    def variants(self, vocab_size: int, device: torch.device) -> Variants:
        """All that packing tokens of a vocabulary needs."""
