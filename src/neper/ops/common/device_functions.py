"""Device functions that kernels of several families share: waiting for the one ahead, and how floats are ordered."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SPARE_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Low bits of a float32 pattern that a logit of this dtype never has; bisection skips them."""


@triton.jit
def await_turn(PDL: tl.constexpr):
    """Wait for the kernel ahead, then let the next one start: what is older than the two is complete."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def monotonic(x):
    """float32 -> int32 in the same order; both zeros are one value."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unsigned(x, SPARE: tl.constexpr):
    """float32 -> uint32 in the same order, above 0, without the SPARE low bits, which no logit of its dtype has."""
    return (monotonic(x).to(tl.uint32, bitcast=True) ^ 0x80000000) >> SPARE


@triton.jit
def count_digits(keys, found, unit):
    """Count the keys, at most 2^21 - 1, that reach found + 1, 2, 3 units: in one int64, 21 bits each."""
    first = (keys >= found + unit).to(tl.int64)
    second = (keys >= found + 2 * unit).to(tl.int64) << 21
    return tl.sum(first + second + ((keys >= found + 3 * unit).to(tl.int64) << 42))


@triton.jit
def digit_of(counts, k):
    """The largest of 0..3 units that k keys reach."""
    digit = ((counts & 0x1FFFFF) >= k).to(tl.uint32) + (((counts >> 21) & 0x1FFFFF) >= k).to(tl.uint32)
    return digit + ((counts >> 42) >= k).to(tl.uint32)


@triton.jit
def kth_largest(keys, k, BITS: tl.constexpr):
    """The k-th largest of uint32 `keys` < 2^BITS, of any shape; 0 where fewer than k are above 0.

    Two bits a step, from the top.
    """
    found = tl.full((), 0, tl.uint32)
    unit = tl.full((), 1, tl.uint32) << ((BITS + 1) // 2 * 2 - 2)
    for _ in range((BITS + 1) // 2):
        found += digit_of(count_digits(keys, found, unit), k) * unit
        unit = unit >> 2
    return found
