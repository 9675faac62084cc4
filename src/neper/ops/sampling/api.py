"""Sampling: what is asked of a step's rows, as the reference and as the kernels take it, and what the kernels offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from neper.ops.common.variants import Variants


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


@dataclass(frozen=True)
class DrawInputs:
    """Parameters of the rows that are sampled (not greedy), D of them.

    Attributes:
        rows: [D] int64, their rows in the step's logits.
        temperature: [D] float32, >= 1e-5.
        top_k: [D] int64, V where off. top_p: [D] float32, 1 where off. min_p: [D] float32, 0 where off.
        keys: [D, 2] int64 in 0..2^32, from `noise_keys`.
        filtered: whether any row has a top-k, top-p or min-p: known on the host.
    """

    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    filtered: bool

    def take(self, index: Tensor) -> DrawInputs:
        """The parameters of some of the rows."""
        return DrawInputs(
            rows=self.rows[index],
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            keys=self.keys[index],
            filtered=self.filtered,
        )


@dataclass(frozen=True)
class DrawRows:
    """How the tokens of S rows are chosen, on the device of the logits; all contiguous.

    Attributes:
        temperature: [S] float32; a row below 1e-5 takes its best token, whatever its other parameters.
        top_p: [S] float32; 1 = off.
        min_p: [S] float32; 0 = off.
        top_k: [S] int32; off where <= 0 or >= V.
        keys: [S, 2] int32, the 32 bits of the row's two numbers from `neper.ops.sampling.reference.noise_keys`.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    keys: Tensor


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

    def choose(self, logits: Tensor, draws: DrawRows, scratch: Tensor, out_ids: Tensor, out_valid: Tensor) -> None:
        """Choose a token for each row, as `neper.ops.sampling.reference.sample` does. Allocates nothing, never waits.

        A row's token depends on its logits and parameters alone. It is that of `sample` but for ties to within
        float32's rounding: between the two noisiest ids, or at the edge of what top-p or min-p leave.

        Args:
            logits, scratch: as in `best`.
            out_ids: [S] int32, written: the token; 0 in an invalid row.
            out_valid: [S] bool, written: False where the row holds NaN or +inf, or nothing above -inf.
        """

    def variants(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Variants:
        """All that choosing from logits of `dtype`, or from edited ones in float32, needs."""
