"""Named sets of ids through the kernels: restricted rows, listed rows, and both beside plain ones."""

from __future__ import annotations

import math

import pytest
import torch

from neper.ops.logprobs.token_sets import TokenSets
from tests.kernels.scoring import DEVICE, assert_same_bits, check, kernels, randint, randn, some

VOCAB = 5007
BFLOAT16_FIRST = some([torch.bfloat16], [torch.float32, torch.float16])


def subset(size: int, seed: int, vocab: int = VOCAB) -> list[int]:
    """`size` distinct ids in no particular order."""
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))[:size].tolist()


RAGGED = [subset(size, seed=size) for size in (1, 2, 31, 33, 128, 1000, 1024, 1025, 5000)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BFLOAT16_FIRST)
@pytest.mark.parametrize("count", [7, 9])  # all listed whole, by a kernel, or not all, by a sort
def test_allowed_sets(count: int, dtype: torch.dtype) -> None:
    sets = RAGGED[:count]
    logits = randn(count, VOCAB, seed=1, dtype=dtype)
    ids = torch.tensor([ids[len(ids) // 2] for ids in sets], device=DEVICE)
    for k in (0, 20):
        got = check(logits, ids, k, allowed=sets)
        assert got.top_ids.shape[1] == 1024
        assert (got.top_ids >= 0).sum(-1).tolist() == [1, 2, 31, 33, 128, 1000, 1024, k, k][:count]
    whole = got.top_logprobs[:7].double().exp().sum(-1)
    torch.testing.assert_close(whole, torch.ones_like(whole), atol=1e-6, rtol=0)
    assert got.logprob[0] == 0.0
    assert got.rank[0] == 1


def test_allowed_sets_without_a_token() -> None:
    logits = randn(3, VOCAB, seed=2)
    sets = [RAGGED[i] for i in (0, 3, 7)]
    got = check(logits, None, 5, allowed=sets)
    assert got.rank.tolist() == [1] * 3
    assert_same_bits([got.logprob], [got.top_logprobs[:, 0]])
    assert_same_bits(check(logits, torch.full((3,), -1, device=DEVICE), 5, allowed=sets), got)


def test_a_set_far_below_the_rows_best() -> None:
    """The set's own maximum counts: the row's would underflow all of it."""
    logits = randn(3, VOCAB, seed=3)
    sets = [subset(40, seed=4), subset(2000, seed=5), subset(1, seed=6)]
    for row, ids in enumerate(sets):
        logits[row] += 400.0
        logits[row, ids] -= 800.0
    got = check(logits, torch.tensor([ids[0] for ids in sets], device=DEVICE), 20, allowed=sets)
    assert (got.logprob > -40).all()


def test_a_token_outside_its_set() -> None:
    logits = randn(2, VOCAB, seed=7)
    sets = [[5, 6, 7], [i for i in subset(3000, seed=8) if i != 4]]
    got = kernels(logits, torch.tensor([4, 4], device=DEVICE), 3, allowed=sets)
    assert got.logprob.tolist() == [-math.inf, -math.inf]
    want = check(logits, torch.tensor([5, sets[1][0]], device=DEVICE), 3, allowed=sets)
    assert_same_bits([got.top_ids, got.top_logprobs, got.valid], [want.top_ids, want.top_logprobs, want.valid])


@pytest.mark.slow
@pytest.mark.parametrize("k", some([20], [0, 1, 64]))
def test_ties_and_masked_ids_in_allowed_sets(k: int) -> None:
    logits = randn(5, VOCAB, seed=9).round()
    logits[1, ::2] = -math.inf
    logits[2] = 0.5
    logits[3, ::2] = -math.inf
    logits[3, 1::2] = -0.0
    logits[3, 1::4] = 0.0
    logits[4, 3:] = -math.inf
    sets = [subset(1024, seed=10), subset(1000, seed=11), subset(1100, seed=12), subset(1500, seed=13)]
    sets.append([*range(1, 1200)])  # 2 above -inf, and too many to be listed whole
    token = torch.tensor([ids[0] for ids in sets], device=DEVICE)
    together = check(logits, token, k, allowed=sets)
    whole = check(logits[:2], token[:2], k, allowed=sets[:2])  # by the kernel, where the sort did it above
    assert_same_bits(whole, [field[:2] for field in together])


def test_a_set_of_masked_ids_alone() -> None:
    """There is no distribution over it."""
    logits = randn(2, VOCAB, seed=30)
    logits[0, [4, 5]] = -math.inf
    got = check(logits, torch.tensor([4, 9], device=DEVICE), 3, allowed=[[4, 5], [8, 9]])
    assert got.valid.tolist() == [False, True]
    assert got.top_ids[0].tolist() == [-1] * 3


@pytest.mark.parametrize("dtype", BFLOAT16_FIRST)
def test_listed_sets(dtype: torch.dtype) -> None:
    sets = [subset(size, seed=size) for size in (1, 31, 33, 128, 129, 1000)]
    logits = randn(len(sets), VOCAB, seed=14, dtype=dtype)
    logits[3, sets[3][:50]] = -math.inf  # named ids are listed even so
    logits[5] = logits[5].round()
    ids = randint(VOCAB, len(sets), seed=15)
    got = check(logits, ids, 20, logprob_token_ids=sets)
    plain = kernels(logits, ids, 0)
    assert_same_bits([got.logprob, got.rank, got.valid], [plain.logprob, plain.rank, plain.valid])
    assert (got.top_ids >= 0).sum(-1).tolist() == [len(ids) for ids in sets]
    check(logits[:2], None, 1, logprob_token_ids=sets[:2])
    check(logits[:1], None, 1, logprob_token_ids=[subset(5000, seed=31)])


@pytest.mark.slow
def test_rows_of_every_kind() -> None:
    count = 8
    logits = randn(count, VOCAB, seed=16, dtype=torch.bfloat16)
    logits[6, 17], logits[7, 17] = math.nan, math.nan
    allowed = [[], subset(7, seed=17), [], subset(3000, seed=18), [], [], subset(9, seed=19), []]
    named = [[], [], subset(50, seed=20), [], [8, 8, 2], [], [], subset(9, seed=21)]
    ids = randint(VOCAB, count, seed=22)
    ids[1], ids[3] = allowed[1][0], allowed[3][0]
    options = {
        "row_top_k": torch.tensor([5, 5, 5, 5, 5, 0, 5, 5], dtype=torch.int32, device=DEVICE),
        "temperature": torch.tensor([1.0, 0.5, 2.0, 0.7, 0.0, 1.0, 1.0, 1.0], device=DEVICE),
    }
    got = check(logits, ids, 10, allowed=allowed, logprob_token_ids=named, **options)
    assert got.valid.tolist() == [True] * 6 + [False] * 2
    assert (got.top_ids >= 0).sum(-1).tolist() == [5, 7, 50, 5, 2, 0, 0, 0]
    made = TokenSets.of(allowed, DEVICE), TokenSets.of(named, DEVICE)
    assert_same_bits(kernels(logits, ids, 10, allowed=made[0], logprob_token_ids=made[1], **options), got)
    for row in range(count):  # a row's bits depend on that row and its set alone
        alone = kernels(
            logits,
            ids[row : row + 1],
            10,
            allowed=[allowed[row]],
            logprob_token_ids=[named[row]],
            rows=torch.tensor([row], device=DEVICE),
            **{name: values[row : row + 1] for name, values in options.items()},
        )
        width = alone.top_ids.shape[1]
        together = [got.logprob, got.rank, got.top_ids[:, :width], got.top_logprobs[:, :width], got.valid]
        assert_same_bits(alone, [field[row : row + 1] for field in together])


def test_sets_in_views_and_row_subsets() -> None:
    wide = torch.full((4, VOCAB + 5), math.nan, device=DEVICE)[:, 3 : VOCAB + 3]
    wide.copy_(randn(4, VOCAB, seed=23))
    rows = torch.tensor([3, 0, 3], dtype=torch.int32, device=DEVICE)
    check(
        wide, torch.tensor([8, -1, 8], device=DEVICE), 4, rows=rows, allowed=[[8, 5006, 0], subset(2000, seed=24), []]
    )
    check(wide, None, 4, rows=rows, logprob_token_ids=[[8, 5006, 0], [], subset(300, seed=25)])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["allowed", "logprob_token_ids"])
def test_sets_of_20000(kind: str) -> None:
    vocab = 49152
    sets = [
        subset(20_000, seed=26, vocab=vocab),
        subset(1, seed=27, vocab=vocab),
        [],
        subset(19_999, seed=28, vocab=vocab),
    ]
    logits = randn(4, vocab, seed=29, dtype=torch.bfloat16)
    check(logits, torch.tensor([sets[0][5], sets[1][0], 3, sets[3][5]], device=DEVICE), 20, **{kind: sets})
