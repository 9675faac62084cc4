"""The reference's attention against norm, rotation and softmax in float64, token by token."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from neper.ops.attention import reference as attention
from neper.ops.attention.api import AttentionGroup
from tests.helpers.attention import Case, Step

SHAPES = [(4, 2, 16), (9, 3, 64), (3, 1, 20), (2, 2, 8)]
MIXED = Case((1, 1, 1, 12, 9), (7, 1, 30, 12, 25))


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_mixed_batch_is_exact(heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    Step(replace(MIXED, heads=heads, kv_heads=kv_heads, dim=dim, window=window)).check(atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_block_sizes(block_size: int) -> None:
    Step(replace(MIXED, block_size=block_size)).check(atol=1e-5)


@pytest.mark.parametrize(("queries", "contexts"), [((1,), (9,)), ((1, 1), (9, 1)), ((12,), (12,)), ((5,), (30,))])
def test_a_single_group(queries: tuple[int, ...], contexts: tuple[int, ...]) -> None:
    step = Step(replace(MIXED, query_lens=queries, context_lens=contexts))
    assert step.check(atol=1e-5).is_contiguous()


def test_without_norms() -> None:
    Step(replace(MIXED, normed=False)).check(atol=1e-5)


def test_bfloat16() -> None:
    Step(replace(MIXED, heads=8, dim=64, dtype=torch.bfloat16)).check(atol=3e-2)


def test_rows_may_be_apart() -> None:
    step = Step(MIXED)
    wide = torch.full((len(step.qkv), step.qkv.shape[1] + 5), math.nan)
    wide[:, : step.qkv.shape[1]] = step.qkv
    assert torch.equal(step.run(wide[:, : step.qkv.shape[1]]), step.run())


def test_unknown_context_is_the_width_of_the_tables() -> None:
    step = Step(MIXED)
    want = step.run()
    groups = [AttentionGroup(g.start, g.first_seq, g.num_seqs, g.query_len, 0) for g in step.inputs.groups]
    step.inputs = replace(step.inputs, groups=tuple(groups), _memo={})
    torch.testing.assert_close(step.run(), want)


def test_invalid_sequence_leaves_the_others_alone() -> None:
    step = Step(MIXED)
    want = step.run()
    ill = step.qkv.clone()
    ill[1] = math.nan
    got = step.run(ill)
    assert got[1].isnan().all()
    rows = [0, *range(2, len(ill))]
    assert torch.equal(got[rows], want[rows])


def test_counts_the_rows_of_short_sequences() -> None:
    assert Step(MIXED).inputs.few_rows == 3 + 12 + 9
    assert Step(Case((16, 17), (16, 25))).inputs.few_rows == 16
    assert Step(Case((17,), (25,))).inputs.few_rows == 0


def test_reference_needs_no_scratch() -> None:
    assert attention.allocate_scratch(64, 4, 2, 16, torch.device("cpu")) is None
