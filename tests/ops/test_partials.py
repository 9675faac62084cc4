"""Merged partial scores against the reduction of the whole row, for vocabularies cut at any place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neper.errors import InvalidRequestError
from neper.ops.logprobs.api import TokenLogprobs
from neper.ops.logprobs.partials import (
    PartialLogprobs,
    finish_partials,
    merge_partials,
    partial_logprobs,
    target_logits,
)
from neper.ops.token_logprobs import token_logprobs

VOCAB = 3001
CUTS = {
    1: [],
    2: [1500],
    3: [1, 2995],
    8: [3, 40, 41, 168, 1000, 2000, 3000],
}


def shards(logits: Tensor, cuts: Sequence[int]) -> list[tuple[int, Tensor]]:
    """Each shard with its first id."""
    borders = [0, *cuts, logits.shape[1]]
    return [(a, logits[:, a:b]) for a, b in pairwise(borders)]


def parts(logits: Tensor, ids: Tensor, k: int, cuts: Sequence[int]) -> list[PartialLogprobs]:
    cut = shards(logits, cuts)
    targets = torch.stack([target_logits(shard, ids, first) for first, shard in cut]).amax(0)
    return [partial_logprobs(shard, targets, k, first) for first, shard in cut]


def assert_same(got: TokenLogprobs, want: TokenLogprobs) -> None:
    """Order, ids, ranks and flags to the bit, values within 1e-6."""
    assert torch.equal(got.valid, want.valid)
    assert torch.equal(got.rank, want.rank)
    assert torch.equal(got.top_ids, want.top_ids)
    assert [field.dtype for field in got] == [field.dtype for field in want]
    for a, b in ((got.logprob, want.logprob), (got.top_logprobs, want.top_logprobs)):
        assert torch.equal(a == -math.inf, b == -math.inf)
        bound = torch.maximum(torch.tensor(1e-6), b.abs() * 2.0**-22)
        assert ((a == b) | ((a - b).abs() <= bound)).all()
        assert (a <= 0).all()


def rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of many kinds, and a token for each."""
    x = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    x[1] = x[1].round()  # ties across all borders
    x[2] = 1.5
    x[3, :1500] = -math.inf  # a shard, or several, wholly masked
    x[4] = -math.inf
    x[4, [2, 3000]] = 7.0
    x[5, 2000:] = -math.inf
    x[6] += 1000.0
    x[7, 1500:] = 300.0  # one side far above the other
    x[8] = torch.where(torch.arange(VOCAB) % 2 == 0, -0.0, 0.0)
    x[9, 2999] = math.nan
    x[10, 0] = math.inf
    x[11] = -math.inf
    ids = torch.tensor([5, 1499, 1500, 7, 3000, -1, 0, 3, 4, 5, 6, 7])
    return x.to(dtype), ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 1, 5, 20, 200])
@pytest.mark.parametrize("count", sorted(CUTS))
def test_shards_together_are_the_whole_row(count: int, k: int, dtype: torch.dtype) -> None:
    logits, ids = rows(dtype)
    want = token_logprobs(logits, ids, k)
    got = finish_partials(merge_partials(parts(logits, ids, k, CUTS[count])))
    assert want.valid.tolist() == [True] * 9 + [False] * 3
    assert_same(got, want)


def test_any_grouping_gives_the_same_order() -> None:
    logits, ids = rows(torch.float32)
    want = token_logprobs(logits, ids, 20)
    p = parts(logits, ids, 20, CUTS[8])
    sequence = p[0]
    for part in p[1:]:
        sequence = merge_partials([sequence, part])
    tree = p
    while len(tree) > 1:
        tree = [merge_partials(tree[i : i + 2]) for i in range(0, len(tree), 2)]
    shuffled = merge_partials([p[i] for i in (5, 2, 7, 0, 1, 6, 4, 3)])
    uneven = merge_partials([merge_partials(p[:5]), merge_partials(p[5:])])
    for merged in (sequence, tree[0], shuffled, uneven, merge_partials([merge_partials(p)])):
        assert_same(finish_partials(merged), want)


def test_the_same_cuts_repeat_to_the_bit() -> None:
    logits, ids = rows(torch.float32)
    once = finish_partials(merge_partials(parts(logits, ids, 20, CUTS[3])))
    again = finish_partials(merge_partials(parts(logits[[0, 6]].clone(), ids[[0, 6]], 20, CUTS[3])))
    for a, b in zip(once, again, strict=True):
        assert torch.equal(a[[0, 6]], b)


def test_a_masked_shard_contributes_nothing() -> None:
    part = partial_logprobs(torch.full((2, 5), -math.inf), torch.tensor([1.0, -math.inf]), 3, first_id=100)
    assert part.maximum.tolist() == [-math.inf] * 2
    assert part.sum_exp.tolist() == [0.0] * 2
    assert part.above.tolist() == [0, 0]
    assert part.top_ids.tolist() == [[-1] * 3] * 2
    assert part.top_values.tolist() == [[-math.inf] * 3] * 2


@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 1600, 3000])
def test_one_shards_poison_makes_the_row_invalid_and_no_other(poison: float, place: int) -> None:
    clean = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    broken = clean.clone()
    broken[1, place] = poison
    ids = torch.tensor([1, 2, 3])
    for cuts in CUTS.values():
        want = finish_partials(merge_partials(parts(clean, ids, 5, cuts)))
        got = finish_partials(merge_partials(parts(broken, ids, 5, cuts)))
        assert got.valid.tolist() == [True, False, True]
        assert got.rank[1] == 0
        assert got.logprob[1] == -math.inf
        assert (got.top_ids[1] == -1).all()
        assert (got.top_logprobs[1] == -math.inf).all()
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a[[0, 2]], b[[0, 2]])


def test_targets() -> None:
    shard = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], dtype=torch.float16)
    got = target_logits(shard, torch.tensor([11, 9, 12, -1], dtype=torch.int32), first_id=10)
    assert got.dtype == torch.float32
    assert got.tolist() == [2.0, -math.inf, -math.inf, math.inf]


def test_no_rows() -> None:
    logits, ids = torch.empty(0, 50), torch.empty(0, dtype=torch.long)
    assert_same(finish_partials(merge_partials(parts(logits, ids, 3, [20]))), token_logprobs(logits, ids, 3))


def test_what_does_not_fit_is_an_error() -> None:
    x = torch.zeros(2, 5)
    for shard in (torch.zeros(5), torch.zeros(2, 0), torch.zeros(2, 5, dtype=torch.long)):
        with pytest.raises(InvalidRequestError, match="shard"):
            partial_logprobs(shard, torch.zeros(2), 1)
    with pytest.raises(InvalidRequestError, match="targets"):
        partial_logprobs(x, torch.zeros(3), 1)
    with pytest.raises(InvalidRequestError, match="top_k"):
        partial_logprobs(x, torch.zeros(2), -1)
    with pytest.raises(InvalidRequestError, match="at least one"):
        merge_partials([])
    with pytest.raises(InvalidRequestError, match="same length"):
        merge_partials([partial_logprobs(x, torch.zeros(2), k) for k in (1, 2)])


def test_elsewhere_than_on_a_cpu_nothing_depends_on_values() -> None:
    """Meta tensors have no values: an op that looks at one fails."""
    logits, ids = torch.zeros(4, 9000, device="meta"), torch.zeros(4, dtype=torch.long, device="meta")
    assert finish_partials(merge_partials(parts(logits, ids, 5, [4000]))).top_ids.shape == (4, 5)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_cut_of_any_row(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 12))
    special = st.sampled_from([-math.inf, -0.0, 1.0, 2.0, 1e4, -1e4, 3e38, -3e38])
    logit = st.one_of(special, special, st.floats(-50, 50, width=32), st.just(math.nan))
    logits = torch.tensor(data.draw(st.lists(st.lists(logit, min_size=vocab, max_size=vocab), min_size=1, max_size=3)))
    ids = torch.tensor(data.draw(st.lists(st.integers(-1, vocab - 1), min_size=len(logits), max_size=len(logits))))
    cuts = sorted(data.draw(st.sets(st.integers(1, vocab - 1)))) if vocab > 1 else []
    k = data.draw(st.integers(0, 14))
    assert_same(finish_partials(merge_partials(parts(logits, ids, k, cuts))), token_logprobs(logits, ids, k))
