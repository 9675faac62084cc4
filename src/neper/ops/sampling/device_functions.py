"""Shared by the kernels that choose tokens: keys of the order, tiles of logits, the noise, and masses."""

from __future__ import annotations

import triton
import triton.language as tl

from neper.ops.common.device_functions import monotonic
from neper.ops.sampling import api

_NONE = tl.constexpr(-float("inf"))
_DEAD = tl.constexpr(-(2**63))  # below every key
_FAR = tl.constexpr(api.FARTHEST)
_SLACK = tl.constexpr(api.SIGMA_SLACK)


@triton.jit
def order_key(x, ids):
    """int64 in the order (value, id descending): the best id by the order of the house has the largest."""
    return (monotonic(x).to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def key_id(key):
    """The id in a key, int32."""
    return (0xFFFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32)


@triton.jit
def key_value(key):
    """The value in a key, float32."""
    high = (key >> 32).to(tl.int32)
    return (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_of_row(scratch, row, row_words, num_tiles, PP: tl.constexpr):
    """The key of a row's best id, from what `best_kernel` left; its value is not finite in an invalid row."""
    tile = tl.arange(0, PP)
    keys = (scratch + row.to(tl.int64) * row_words).to(tl.pointer_type(tl.int64))
    return tl.max(tl.load(keys + tile, mask=tile < num_tiles, other=_DEAD))


@triton.jit
def load_tile(base, begin, V, ROWS: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr):
    """[ROWS, VEC] logits as float32 from id `begin` on, -inf beyond V, and their ids."""
    first = begin + tl.arange(0, ROWS) * VEC
    ids = first[:, None] + tl.arange(0, VEC)[None, :]
    if UNIT == VEC:  # V is a multiple of VEC: the mask is seen to be the same for all that a lane loads at once
        inside = tl.broadcast_to((first < V)[:, None], [ROWS, VEC])
    else:
        inside = ids < V
    return tl.load(base + ids, mask=inside, other=_NONE).to(tl.float32), ids


@triton.jit
def store_moments(moments, tile, num_tiles, x, best):
    """Store what `floor_of` needs of a tile of logits x whose best is `best`.

    That is of the logits above -inf: how many there are, the mean of what they have more than the best, and the sum of
    the squares of what they have more than that.
    """
    there = x > _NONE
    count = tl.sum(tl.sum(there.to(tl.int32), axis=1))
    gap = tl.where(there, tl.maximum(x - best, -_FAR), 0.0)
    mean = tl.div_rn(tl.sum(tl.sum(gap, axis=1)), tl.maximum(count, 1).to(tl.float32))
    apart = tl.where(there, gap - mean, 0.0)
    floats = moments.to(tl.pointer_type(tl.float32))
    tl.store(moments + tile, count)
    tl.store(floats + num_tiles + tile, mean)
    tl.store(floats + 2 * num_tiles + tile, tl.sum(tl.sum(apart * apart, axis=1)))


@triton.jit
def floor_of(words, moments, n, maximum, num_tiles, PP: tl.constexpr):
    """The least logit that top-n-sigma leaves of a row, whose best keys are in `words`; -inf where it is off."""
    floor = tl.full((), _NONE, tl.float32)
    if n > 0:
        tile = tl.arange(0, PP)
        there = tile < num_tiles
        best = key_value(tl.load(words.to(tl.pointer_type(tl.int64)) + tile, mask=there, other=_DEAD))
        floats = moments.to(tl.pointer_type(tl.float32))
        count = tl.load(moments + tile, mask=there, other=0)
        mean = tl.load(floats + num_tiles + tile, mask=there, other=0.0)
        squares = tl.load(floats + 2 * num_tiles + tile, mask=there, other=0.0)
        weight = count.to(tl.float32)
        total = tl.sum(count).to(tl.float32)
        mean = tl.where(count > 0, tl.maximum(best - maximum, -_FAR) + mean, 0.0)
        apart = mean - tl.div_rn(tl.sum(weight * mean), total)
        variance = tl.div_rn(tl.sum(squares + weight * apart * apart), total)
        floor = maximum - n * tl.sqrt_rn(variance) * _SLACK
    return floor


@triton.jit
def load_left(base, begin, V, floor, ROWS: tl.constexpr, VEC: tl.constexpr, UNIT: tl.constexpr):
    """Load a tile like `load_tile`, with -inf below the floor."""
    x, ids = load_tile(base, begin, V, ROWS, VEC, UNIT)
    return tl.where(x >= floor, x, _NONE), ids


@triton.jit
def best_key(x, ids):
    """The largest key of x [ROWS, VEC]; NaN must not be among them."""
    value = tl.max(x, axis=1)
    id = tl.min(tl.where(x == value[:, None], ids, 0x7FFFFFFF), axis=1)
    return tl.max(order_key(value, id))


@triton.jit
def _mix(x):
    """A hash of 32 bits in two multiply-xorshift rounds; see `neper.ops.sampling.reference`."""
    return _mix_shifted(x ^ (x >> 16))


@triton.jit
def _mix_shifted(x):
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def log_of_bits(high, low):
    """log(1 - u) of the uniform u of two hashed words; see `neper.ops.sampling.reference.uniform_of_bits`.

    1 - u = 2^e (1 + m) with m in [-1/3, 1/3); log(1 + m) = m + m^2 q(m), where q is the polynomial of least relative
    error: 3e-7 of the logarithm. Quicker than the general logarithm, which takes branches for other numbers.

    The lower bits are subtracted from m: where e is 0 that is exact, and m is -u itself to float32's rounding, as small
    as u may be. Elsewhere they are less than the rounding of 1 - u.
    """
    # The middle of one of 2^23 parts of (0, 1): the upper bits as a float from 1 on, less 1 - 2^-24.
    middle = ((high >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375
    bits = middle.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) & -0x800000
    m = (bits - exponent).to(tl.float32, bitcast=True) - 0.999999940395355224609375
    # From the upper edge of the part down, by a fraction of it: an odd number, so that u is never 0.
    fraction = ((low & 0x7FFFFFFF) | 1).to(tl.int32, bitcast=True).to(tl.float32)
    m = tl.fma(fraction, -5.551115123125783e-17, m)  # 2^-54
    q = tl.fma(m, -0.15266811847686768, 0.16990552842617035)
    q = tl.fma(q, m, -0.1644081175327301)
    q = tl.fma(q, m, 0.19818170368671417)
    q = tl.fma(q, m, -0.2500632405281067)
    q = tl.fma(q, m, 0.33336734771728516)
    q = tl.fma(q, m, -0.49999961256980896)
    return tl.fma(exponent.to(tl.float32), 8.262958395e-08, tl.fma(m * q, m, m))  # log(2) / 2^23


@triton.jit
def noisy_of(x, ids, maximum, scale, first, second):
    """A number to draw ids by: of two, the one with the larger tempered logit plus Gumbel noise has the larger.

    With t the tempered logit less the best, (x - maximum) * scale in powers of 2, and the noise -log(-log(1 - u)), that
    is -exp(-(t + noise)) = log(1 - u) exp(-t): one logarithm instead of two. It is -inf where t is below -88, and such
    ids are never drawn: the noise is between -2.9 and 37.5, and the best id has t = 0.
    """
    low = _mix(ids.to(tl.uint32) + first)
    # _mix(low ^ second), whose first shift is taken of both parts, since that of `second` is the same for all ids.
    high = _mix_shifted(low ^ (low >> 16) ^ (second ^ (second >> 16)))
    return log_of_bits(high, low) * tl.exp2((maximum - x) * scale)


@triton.jit
def power_scale(temperature):
    """The factor from differences of logits to powers of 2, float32; above 0, since 0 times -inf is no number."""
    return tl.maximum(tl.div_rn(1.4426950408889634, temperature), 1.1754943508222875e-38)


@triton.jit
def share_of(x, maximum, scale):
    """Probability over that of the best id, float32."""
    return tl.exp2((x - maximum) * scale)


@triton.jit
def units(share):
    """A share, or the sum of a few, in integer units of mass."""
    return (share * 1099511627776.0).to(tl.int64)


@triton.jit
def precedes(x, ids, cut, cut_id):
    """True where an id precedes (cut, cut_id) in the order."""
    return (x > cut) | ((x == cut) & (ids < cut_id))
