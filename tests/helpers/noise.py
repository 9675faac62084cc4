"""Seeds that give a wanted noise: the hash of `neper.ops.sampling.reference` written out once more, and run backwards.

For each position and id the map from a seed's 64 bits to the hash's 64 bits is one to one. So the chance of a draw is a
share of the hash's values, and rare draws can be looked at where they are instead of being waited for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Bits = npt.NDArray[np.int64]

ALL = 2**53

_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97
_INVERSES = [np.uint32(pow(factor, -1, 2**32)) for factor in (_FIRST, _SECOND)]
_LOW, _TURN = np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B)


def mix(x: Words) -> Words:
    for shift, factor in ((16, _FIRST), (15, _SECOND)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(15))


def unmix(x: Words) -> Words:
    """The word that `mix` turns into x."""
    x = x ^ (x >> np.uint32(15)) ^ (x >> np.uint32(30))
    x = x * _INVERSES[1]
    x = x ^ (x >> np.uint32(15)) ^ (x >> np.uint32(30))
    x = x * _INVERSES[0]
    return x ^ (x >> np.uint32(16))


def hashed(keys: npt.NDArray[np.int64], ids: npt.NDArray[np.int64]) -> tuple[Words, Words]:
    """The two words of each id [N] under each pair of keys [D, 2]: high, low [D, N]."""
    words = keys.astype(np.uint32)
    low = mix(ids.astype(np.uint32) + words[:, :1])
    return mix(low ^ words[:, 1:]), low


def bits_of(high: Words, low: Words) -> Bits:
    """The 53 bits that noise is made of: the largest noise has bits 0."""
    upper, lower = (high >> np.uint32(9)).astype(np.int64), (low & np.uint32(2**31 - 1)).astype(np.int64)
    return ((2**23 - 1 - upper) << 30) | (lower >> 1)


def words_of(bits: Bits) -> tuple[Words, Words]:
    """Two words that hold these bits; the others of a word, which do not count, are random."""
    others = np.random.default_rng(len(bits)).integers(0, 2**9, (3, len(bits)))
    high = ((2**23 - 1 - (bits >> 30)) << 9) | others[0]
    low = ((bits & (2**30 - 1)) << 1) | (others[1] & 1) | ((others[2] & 1) << 31)
    return high.astype(np.uint32), low.astype(np.uint32)


def gumbel_of(bits: Bits) -> npt.NDArray[np.float64]:
    """The noise of 53 bits in float64."""
    noise: npt.NDArray[np.float64] = -np.log(-np.log1p(-(bits + 0.5) / ALL))
    return noise


def roundings(noise: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How far float32 may be from this noise: its own rounding, and that of 1 - u, where u is close to 1."""
    exponential = np.exp(-noise)
    result: npt.NDArray[np.float64] = 2e-6 + 2.0**-24 * np.exp(exponential) / exponential
    return result


def seeds_for(bits: Bits, token_id: int, position: int) -> list[int]:
    """Seeds under which `token_id` has these 53 bits at `position`."""
    high, low = words_of(bits)
    with np.errstate(over="ignore"):
        first = unmix(low) - np.uint32(token_id)
        second = unmix(high) ^ low
        a = unmix(second) ^ first ^ _TURN
        b = unmix(first) - np.uint32(position)
        upper = unmix(b) ^ a
        lower = unmix(a) - _LOW
    return [int(seed) for seed in (upper.astype(np.uint64) << np.uint64(32)) | lower.astype(np.uint64)]
