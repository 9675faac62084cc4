"""The kernels' values, ids and ranks on rows of every make, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.scoring import DEVICE, DTYPES, INTERPRETED, assert_same_bits, check, kernels, randint, randn, some

LARGE = [pytest.param(vocab, marks=pytest.mark.slow) for vocab in (151936, 248320)]
VOCABS = [1, 2, 127, 128, 129, 4097, 8193, 49152, *LARGE]
BFLOAT16_FIRST = some([torch.bfloat16], [torch.float32, torch.float16])
FLOAT32_FIRST = some([torch.float32], [torch.bfloat16, torch.float16])
LIST_LENGTHS = some([20], [0, 1, 5, 64])


def chosen_ids(logits: Tensor) -> Tensor:
    """The best id of the first row, the worst of the last, random ones between."""
    ids = randint(logits.shape[1], len(logits), seed=1)
    ids[0] = logits[0].float().argmax()
    ids[-1] = logits[-1].float().argmin()
    return ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("k", LIST_LENGTHS)
def test_random_rows(k: int, vocab: int, dtype: torch.dtype) -> None:
    logits = randn(1 if INTERPRETED and vocab > 40_000 else 2, vocab, seed=vocab, scale=4.0, dtype=dtype)
    check(logits, chosen_ids(logits), min(k, vocab))


@pytest.mark.parametrize("vocab", [129, 4097])
def test_list_lengths(vocab: int) -> None:
    logits = randn(1, vocab, seed=vocab, scale=4.0, dtype=torch.bfloat16)
    for k in (0, 1, 5, 8, 9, 32, 33, 64):
        check(logits, chosen_ids(logits), k)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BFLOAT16_FIRST)
@pytest.mark.parametrize("vocab", some([2, 129, 4097], [1, 127, 8193]))
@pytest.mark.parametrize("k", some([5, 64], [0, 1, 20]))
def test_ties_go_by_id(k: int, vocab: int, dtype: torch.dtype) -> None:
    two = randint(2, 1, vocab, seed=1)
    few = randint(5, 1, vocab, seed=2) - 2
    equal = torch.full((1, vocab), 1.5, device=DEVICE)
    rounded = randn(1, vocab, seed=3, scale=2.0).round()
    logits = torch.cat([two, few, equal, rounded]).to(dtype)
    check(logits, chosen_ids(logits), min(k, vocab))


@pytest.mark.slow
@pytest.mark.parametrize("k", some([20], [1, 64]))
def test_ties_in_a_large_vocabulary(k: int) -> None:
    vocab = 151936
    few = randint(7, 1, vocab, seed=4)
    equal = torch.full((1, vocab), -2.0, device=DEVICE)
    logits = torch.cat([few, equal]).bfloat16()
    check(logits, chosen_ids(logits), k)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BFLOAT16_FIRST)
def test_both_zeros_are_one_value(dtype: torch.dtype) -> None:
    vocab = 2049
    even = torch.where(torch.arange(vocab, device=DEVICE) % 2 == 0, -0.0, 0.0)
    mixed = torch.where(randint(2, vocab, seed=5) == 0, -0.0, 0.0)
    best = randn(vocab, seed=6).clamp(max=0.0)  # about half of the row is a tied best zero, of either sign
    best[::7] *= torch.where(best[::7] == 0, -1.0, 1.0)
    logits = torch.stack([even, mixed, best]).to(dtype)
    assert (logits.signbit() & (logits == 0)).any(1).all()
    for k in (0, 1, 20):
        check(logits, chosen_ids(logits), k)
    assert kernels(logits, None, 5).top_ids[:2].tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [129, 4097])
def test_values_that_differ_in_their_last_bit(vocab: int) -> None:
    """Neighbouring bit patterns: subtraction merges some, the order must not."""
    step = torch.randperm(vocab, generator=torch.Generator().manual_seed(7)).int().to(DEVICE)
    above = (torch.tensor(700.0).view(torch.int32).item() + step).view(torch.float32)
    below = -above
    tiny = (step + 1).view(torch.float32)  # subnormal, all of them
    across = tiny * torch.where(step % 2 == 0, -1.0, 1.0)
    logits = torch.stack([above, below, tiny, across])
    for k in (1, 64):
        check(logits, chosen_ids(logits), k)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_values_of_a_small_dtype(dtype: torch.dtype) -> None:
    """A row of every finite value in random order: the search must tell each from its neighbours."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    if INTERPRETED and dtype == torch.bfloat16:  # Triton 3.6's interpreter makes other numbers of subnormal ones
        values = values[(values == 0) | (values.abs() >= torch.finfo(dtype).smallest_normal)]
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(8))
    negative = values[order].abs().neg()
    logits = torch.stack([values[order], negative]).to(DEVICE)
    for k in (5, 64):
        check(logits, randint(logits.shape[1], 2, seed=k), k)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BFLOAT16_FIRST)
@pytest.mark.parametrize("k", some([0, 20], [1, 5, 64]))
def test_masked_ids(k: int, dtype: torch.dtype) -> None:
    vocab = 4097
    logits = randn(6, vocab, seed=9, dtype=dtype)
    logits[0, randint(2, vocab, seed=10) == 0] = -math.inf
    logits[1, 3:] = -math.inf  # fewer finite than k
    logits[2, :-1] = -math.inf  # one, the last
    logits[3] = -math.inf  # none: invalid
    logits[4, :4000] = -math.inf  # whole chunks
    logits[5] = -math.inf
    logits[5, 1024 * 2 + 256 * 3 + 17] = torch.finfo(dtype).min
    ids = torch.tensor([5, 0, 4096, 1, 4050, 0], device=DEVICE)
    got = check(logits, ids, k)
    assert got.valid.tolist() == [True, True, True, False, True, True]
    got = check(logits, torch.full_like(ids, 3000), k)  # mostly masked tokens: -inf, ranked behind all others
    assert got.logprob[1:].tolist() == [-math.inf] * 5


@pytest.mark.parametrize("dtype", FLOAT32_FIRST)
@pytest.mark.parametrize("k", some([5], [0, 64]))
def test_extremes(k: int, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    base = randn(10, 2049, seed=11, scale=1.0)
    base[0, 7], base[1, 7], base[2, 7] = 1e4, -1e4, limit
    base[3, 9] = -limit
    base[4] += 1e4  # a large common offset must not eat the low bits of the normaliser
    base[5] -= 1e4
    base[6, 0], base[6, 1:] = 120.0, -120.0  # softmax().log() would be -inf here
    base[7], base[7, 2048] = -limit, limit  # a gap beyond float32's range
    base[8] = limit
    base[9] = -limit
    logits = base.to(dtype)
    for token in (7, 9):
        got = check(logits, torch.full((10,), token, device=DEVICE), k)
        assert (got.logprob[7] == -math.inf) == (dtype != torch.float16)
    assert got.valid.all()
    assert got.logprob[9].item() == pytest.approx(-math.log(2049), abs=1e-6)


def chunk_ids(chunk: int) -> Tensor:
    """The ids of one of the kernels' chunks: 4 runs of 32."""
    piece, lane = torch.arange(4)[:, None], torch.arange(32)
    return ((chunk // 8) * 1024 + piece * 256 + (chunk % 8) * 32 + lane).flatten()


CLUSTERS = {
    "chunk": lambda vocab: chunk_ids(3),
    "a later chunk": lambda vocab: chunk_ids(8 * 4 + 7),
    "the last chunk": lambda vocab: torch.arange(vocab // 1024 * 1024, vocab),
    "run": lambda vocab: torch.arange(1700, 2700),
    "every 1024th": lambda vocab: torch.arange(5, vocab, 1024),
    "every 32nd": lambda vocab: torch.arange(31, vocab, 32),
    "first id of each chunk": lambda vocab: torch.cat([chunk_ids(c)[:1] for c in range(vocab // 1024 * 8)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("vocab", some([8193], [49152 + 77]))
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(
    ("k", "dtype"), some([(20, torch.float32)], [(20, torch.bfloat16), (1, torch.float32), (64, torch.float32)])
)
def test_the_best_sit_together(k: int, dtype: torch.dtype, cluster: str, vocab: int) -> None:
    ids = CLUSTERS[cluster](vocab).to(DEVICE)
    ids = ids[ids < vocab]
    spread, tied, rising = randn(3, vocab, seed=12, scale=1.0)
    spread[ids] += 50.0
    tied[ids] = 50.0
    rising[ids] = 50.0 + torch.arange(len(ids), device=DEVICE) / 64
    logits = torch.stack([spread, tied, rising]).to(dtype)
    inside, outside = ids[len(ids) // 2], torch.tensor(0, device=DEVICE)
    check(logits, torch.stack([inside, outside, inside]), k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "k"), some([(4097, 20)], [(49152, 0), (49152, 5), (49152, 64)]))
def test_sorted_rows(vocab: int, k: int, dtype: torch.dtype) -> None:
    ramp = torch.linspace(-20, 20, vocab, device=DEVICE)
    logits = torch.stack([ramp, ramp.flip(0)]).to(dtype)
    check(logits, torch.tensor([vocab - 1, 7], device=DEVICE), k)


@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("vocab", some([1, 1001], [8193]))
@pytest.mark.parametrize("k", some([5], [0, 64]))
def test_an_invalid_row_is_flagged_and_changes_no_neighbour(k: int, poison: float, vocab: int) -> None:
    clean = randn(4, vocab, seed=13)
    ids = randint(vocab, 4, seed=14)
    want = kernels(clean, ids, k)
    for place in sorted({0, vocab // 2, vocab - 1}):
        broken = clean.clone()
        broken[1, place] = poison
        broken[3] = -math.inf
        got = check(broken, ids, k)
        assert got.valid.tolist() == [True, False, True, False]
        assert_same_bits([field[::2] for field in want], [field[::2] for field in got])


@pytest.mark.parametrize("dtype", BFLOAT16_FIRST)
def test_invalid_where_much_is_masked(dtype: torch.dtype) -> None:
    """NaN or +inf beside -inf alone, and both in one row."""
    logits = torch.full((5, 2050), -math.inf, dtype=dtype, device=DEVICE)
    logits[0, 9], logits[1, 2049] = math.nan, math.inf
    logits[2, 3], logits[2, 2000] = math.inf, math.nan
    logits[3] = math.nan
    logits[4, 0] = 1.0
    for ids in (None, torch.tensor([9, 2049, 3, 0, 0], device=DEVICE)):
        got = check(logits, ids, 3)
        assert got.valid.tolist() == [False, False, False, False, True]
        assert got.top_ids[4].tolist() == [0, -1, -1]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BFLOAT16_FIRST)
@pytest.mark.parametrize(("vocab", "k"), some([(129, 5), (4096, 0)], [(4097, 20), (8192, 64)]))
def test_views_of_wider_rows(vocab: int, k: int, dtype: torch.dtype) -> None:
    """Any row stride and any base, with NaN all around: nothing outside the rows is read into them."""
    rows = randn(2, vocab, seed=15, dtype=dtype)
    ids = randint(vocab, 2, seed=16)
    want = check(rows, ids, k)
    for stride, first in ((vocab + 1, 0), (vocab + 1, 1), (vocab + 7, 3), (2 * vocab + 64, 16), (vocab + 8, 8)):
        view = torch.full((2, stride), math.nan, dtype=dtype, device=DEVICE)[:, first : first + vocab]
        view.copy_(rows)
        assert_same_bits(kernels(view, ids, k), want)
    every_second = torch.full((4, vocab), math.nan, dtype=dtype, device=DEVICE)[1::2]
    every_second.copy_(rows)
    assert_same_bits(kernels(every_second, ids, k), want)
    same = kernels(rows[1].expand(3, vocab), ids[[1, 1, 1]], k)  # row stride 0
    for r in range(3):
        assert_same_bits([field[r] for field in same], [field[1] for field in want])
