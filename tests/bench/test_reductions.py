"""The baselines say what the op says, and the check that goes before a timing sees what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from neper.bench.reductions import Scores, check, host_scan, log_softmax_top_k, logsumexp_top_k
from neper.errors import NeperError
from neper.ops import TokenLogprobs, token_logprobs


def scan(logits: Tensor, token_ids: Tensor, top_k: int) -> Scores:
    return host_scan(logits, token_ids, top_k, torch.empty_like(logits))


@pytest.mark.parametrize("top_k", [0, 1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduce", [log_softmax_top_k, logsumexp_top_k, scan])
def test_a_baseline_agrees_with_the_op(
    reduce: Callable[[Tensor, Tensor, int], Scores], dtype: torch.dtype, top_k: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 3000, generator=generator) * 3).to(dtype)
    token_ids = torch.randint(3000, (5,), generator=generator)
    ours, theirs = token_logprobs(logits, token_ids, top_k), reduce(logits, token_ids, top_k)
    torch.testing.assert_close(theirs.logprob, ours.logprob, rtol=0, atol=3e-5)
    torch.testing.assert_close(theirs.top_logprobs, ours.top_logprobs, rtol=0, atol=3e-5)
    assert theirs.rank.tolist() == ours.rank.tolist()
    for row in range(5):
        values, counts = logits[row].unique(return_counts=True)
        once = set(values[counts == 1].tolist())
        for our_id, their_id in zip(ours.top_ids[row].tolist(), theirs.top_ids[row].tolist(), strict=True):
            if float(logits[row, our_id]) in once:
                assert their_id == our_id


def scored() -> tuple[Tensor, TokenLogprobs]:
    logits = torch.tensor([[1.0, 5.0, 3.0, 5.0, -2.0, 0.5]])
    return logits, token_logprobs(logits, torch.tensor([2]), 3)


def test_a_right_row_passes() -> None:
    logits, got = scored()
    check("case", got, logits, torch.tensor([2]), 3)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("logprob", torch.tensor([-2.5]), "logprob[0] is -2.5, and -2.7727"),
        ("rank", torch.tensor([2], dtype=torch.int32), "rank[0] is 2, and 3 is right"),
        ("top_ids", torch.tensor([[3, 1, 2]], dtype=torch.int32), "top_ids[0, 0] is 3, and 1 is right"),
        ("top_logprobs", torch.tensor([[-0.8, -0.8, float("nan")]]), "top_logprobs[0, 0] is -0.8"),
        ("valid", torch.tensor([False]), "valid[0] is False, and True is right"),
        ("logprob", torch.tensor([torch.nan]), "logprob[0] is nan, and -2.7727"),
    ],
)
def test_a_wrong_row_is_seen(field: str, value: Tensor, says: str) -> None:
    logits, got = scored()
    # e^1 + 2 e^5 + e^3 + e^-2 + e^0.5 = 321.414: the logprob of id 2 is 3 - ln 321.414 = -2.77273.
    with pytest.raises(NeperError, match=re.escape(f"wrong result, nothing is timed: case: {says}")):
        check("case", got._replace(**{field: value}), logits, torch.tensor([2]), 3)


@pytest.mark.parametrize("size", [1, 50, 1024, 1025])
def test_sets_that_the_op_scored_pass(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(2, 3000, generator=generator) * 3
    sets = [torch.randperm(3000, generator=generator)[:size].sort().values for _ in range(2)]
    lists = [ids.tolist() for ids in sets]
    token_ids = torch.tensor([lists[0][0], 7])
    check("case", token_logprobs(logits, token_ids, 20, allowed=lists), logits, token_ids, 20, allowed=sets)
    named = token_logprobs(logits, token_ids, 20, logprob_token_ids=lists)
    check("case", named, logits, token_ids, 20, logprob_token_ids=sets)
    with pytest.raises(NeperError, match="wrong result"):
        check("case", named, logits, token_ids, 20, logprob_token_ids=sets[::-1])
