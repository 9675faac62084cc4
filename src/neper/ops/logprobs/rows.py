"""The rows of a reduction, as its kernels take them: their arguments, their norms in scratch, and reading them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from neper.ops.logprobs.api import TokenLogprobs


@dataclass(frozen=True)
class Given:
    """The per-row arguments of a reduction, as kernels take them.

    An argument that is absent is stood in for by a tensor of the type that it mostly has, and its flag is not set: a
    flag costs a branch, where None would be a variant to compile.

    Attributes:
        scores: where the results go.
        rows, token_ids, temperature, row_top_k: [R]; see `neper.ops.token_logprobs.token_logprobs`.
        flags: 1 rows, 2 token_ids, 4 temperature, 8 row_top_k.
    """

    scores: TokenLogprobs
    rows: Tensor
    token_ids: Tensor
    temperature: Tensor
    row_top_k: Tensor
    flags: int

    @staticmethod
    def of(
        scores: TokenLogprobs,
        rows: Tensor | None,
        token_ids: Tensor | None,
        temperature: Tensor | None,
        row_top_k: Tensor | None,
    ) -> Given:
        given = (rows, token_ids, temperature, row_top_k)
        rows, token_ids, temperature, row_top_k = (t.contiguous() if t is not None else None for t in given)
        int32, float32 = _stand_ins(scores.logprob.device)
        return Given(
            scores=scores,
            rows=int32 if rows is None else rows,
            token_ids=int32 if token_ids is None else token_ids,
            temperature=float32 if temperature is None else temperature,
            row_top_k=int32 if row_top_k is None else row_top_k,
            flags=sum(1 << bit for bit, tensor in enumerate(given) if tensor is not None),
        )

    @staticmethod
    def row_step(logits: Tensor) -> tuple[int, int]:
        """The row stride as a number of units, and the unit: 16 bytes where all rows begin at such places, else 1."""
        unit = 16 // logits.element_size()
        aligned = logits.data_ptr() % 16 == 0 and logits.stride(0) % unit == 0
        return (logits.stride(0) // unit, unit) if aligned else (logits.stride(0), 1)


@dataclass(frozen=True)
class Norms:
    """M and L of R rows, as the kernels leave them in their scratch.

    Attributes:
        words: int32, from the first row's M on: the bits of M and of L, then other things.
        stride: words from one row to the next.
    """

    words: Tensor
    stride: int

    def read(self, count: int) -> tuple[Tensor, Tensor]:
        """M and L of the first `count` rows, [count] float32 each, views of the scratch."""
        maximum, log_sum = self.words.as_strided((count, 2), (self.stride, 1)).view(torch.float32).unbind(1)
        return maximum, log_sum


@cache
def _stand_ins(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, device=device)


@triton.jit
def row_base(logits, row_step, UNIT: tl.constexpr, rows, row, given):
    """Where a row begins: row_step * UNIT logits after the one before it. The compiler sees that UNIT divides it."""
    source = row.to(tl.int64)
    if given & 1:
        source = tl.load(rows + row).to(tl.int64)
    return logits + source * row_step * UNIT


@triton.jit
def load_token(token_ids, row, given):
    """The row's token; -1 = its best."""
    token = tl.full((), -1, tl.int64)
    if given & 2:
        token = tl.load(token_ids + row).to(tl.int64)
    return token


@triton.jit
def load_factor(temperature, row, given):
    """1 / temperature, above 0; 1 for greedy rows and the raw view."""
    factor = tl.full((), 1.0, tl.float32)
    if given & 4:
        t = tl.load(temperature + row)
        factor = tl.where(t < 1e-5, 1.0, tl.div_rn(1.0, t))
        factor = tl.where(factor < 1.1754943508222875e-38, 1.1754943508222875e-38, factor)  # 0 times -inf is NaN
    return factor


@triton.jit
def load_logit(base, token, V):
    """The logit of one id; -inf for ids beyond the vocabulary."""
    return tl.load(base + token, mask=(token >= 0) & (token < V), other=-float("inf")).to(tl.float32)
