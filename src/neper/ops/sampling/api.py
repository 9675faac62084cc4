"""Sampling: what is asked of a step's rows, as the reference and as the kernels take it, and what the kernels offer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from neper.ops.common.variants import Variants

FARTHEST = 1e12
"""A logit farther below the row's best counts as being so far in top-n-sigma's deviation: squares stay in float32."""

SIGMA_SLACK = 1 + 1e-5
"""Factor of top-n-sigma's distance: rounding must not decide on an id at its very edge. Of two ids the worse one is
exactly two deviations below the best.
"""


@dataclass(frozen=True)
class Penalties:
    """Penalties of the P rows that have any.

    Attributes:
        rows: [P] int64, their rows in the step's logits.
        repetition, frequency, presence: [P, 1] float32; 1, 0, 0 where off.
        output_counts: [P, V] int32, how often each id was generated.
        in_prompt: [P, V] bool.
    """

    rows: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    output_counts: Tensor
    in_prompt: Tensor


@dataclass(frozen=True)
class Bias:
    """Additions to single logits, n of them over the step's rows: rows, ids [n] int64, values [n] float32.

    A value of -inf bans the id.
    """

    rows: Tensor
    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class Masks:
    """The ids that the M restricted rows may sample: one bit per id.

    Attributes:
        rows: [M] int64, their rows in the step's logits.
        words: [M, ceil(V / 32)] int32; bit i of word w says whether id 32 w + i may be sampled.
    """

    rows: Tensor
    words: Tensor

    def allowed(self, vocab_size: int) -> Tensor:
        """[M, V] bool."""
        bits = torch.arange(32, dtype=torch.int32, device=self.words.device)
        return ((self.words.unsqueeze(-1) >> bits) & 1).view(len(self.words), -1)[:, :vocab_size].bool()


Column = TypeVar("Column")


@dataclass(frozen=True)
class DrawRows(Generic[Column]):
    """The parameters of S draws, a column each: tensors, or what the engine knows of each column.

    Attributes:
        temperature: [S] float32; a row below 1e-5 takes its best token, whatever its other parameters.
        top_p: [S] float32; 1 = off.
        min_p: [S] float32; 0 = off.
        top_n_sigma: [S] float32; 0 = off.
        top_k: [S] integers; off where <= 0 or >= V.
        keys: [S, 2] integers of which the lower 32 bits count, from `neper.ops.sampling.reference.noise_keys`.
    """

    temperature: Column
    top_p: Column
    min_p: Column
    top_n_sigma: Column
    top_k: Column
    keys: Column

    def columns(self) -> dict[str, Column]:
        """The columns by name; of a subclass these alone."""
        return {field.name: getattr(self, field.name) for field in fields(DrawRows)}


@dataclass(frozen=True)
class DrawInputs(DrawRows[Tensor]):
    """Parameters of the rows that are sampled (not greedy), D of them.

    Attributes:
        rows: [D] int64, their rows in the step's logits.
        filtered: whether any row has a filter: known on the host.
    """

    rows: Tensor
    filtered: bool

    def take(self, index: Tensor) -> DrawInputs:
        """The parameters of some of the rows."""
        columns = {name: column[index] for name, column in self.columns().items()}
        return DrawInputs(rows=self.rows[index], filtered=self.filtered, **columns)


class SamplingKernels(Protocol):
    """Kernels that choose the tokens of rows without sorting."""

    def scratch_words(self, rows: int, vocab_size: int) -> int:
        """int32 words that `choose` and `best` need for `rows` rows of logits."""

    def best(self, logits: Tensor, scratch: Tensor) -> None:
        """Leave the best id of each tile of each row in `scratch`, for `choose` and for `PackingKernels`.

        Args:
            logits: [S, V] float32, bfloat16 or float16, V <= 2^20; unit stride along V, rows at any distance. It is
                quick where rows begin at multiples of 16 bytes and V fills such units.
            scratch: flat int32 from a multiple of 16 bytes on, at least `scratch_words(S, V)`. Its contents do not
                matter.
        """

    def choose(
        self, logits: Tensor, draws: DrawRows[Tensor], scratch: Tensor, out_ids: Tensor, out_valid: Tensor
    ) -> None:
        """Choose a token for each row, as `neper.ops.sampling.reference.sample` does. Allocates nothing, never waits.

        A row's token depends on its logits and parameters alone. It is that of `sample` but for ties to within
        float32's rounding: between the two noisiest ids, or at the edge of what top-p or min-p leave.

        Args:
            logits, scratch: as in `best`.
            draws: on the device of the logits, contiguous, of 32 bits each.
            out_ids: [S] int32, written: the token; 0 in an invalid row.
            out_valid: [S] bool, written: False where the row holds NaN or +inf, or nothing above -inf.
        """

    def variants(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Variants:
        """All that choosing from logits of `dtype`, or from edited ones in float32, needs."""
