"""What is not a reduction's argument is refused in words, before torch or a kernel sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from neper.errors import InvalidRequestError
from neper.ops import (
    LogprobBuffers,
    TokenSets,
    linear_logprobs,
    merge_partials,
    partial_logprobs,
    target_logits,
    token_logprobs,
    view_logprobs,
)

LOGITS = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([1, 2, 3, 4])
META = TokenSets.of([[1]] * 4, "meta")


@pytest.mark.parametrize(
    ("logits", "token_ids", "top_k", "options", "message"),
    [
        (LOGITS, [1, 2, 3, 4], 1, {}, "token_ids must be a torch tensor, got list"),
        (LOGITS, IDS.numpy(), 1, {}, "token_ids must be a torch tensor, got ndarray"),
        (LOGITS.numpy(), IDS, 1, {}, "logits must be a torch tensor, got ndarray"),
        (LOGITS, IDS, 1, {"temperature": 0.8}, "temperature must be a torch tensor, got float"),
        (LOGITS, IDS, 1, {"rows": [0, 1, 2, 3]}, "rows must be a torch tensor, got list"),
        (LOGITS, IDS, 1, {"rows": torch.tensor([0, 1, 2, 4])}, "rows holds 4, but there are 4 rows"),
        (LOGITS, IDS, 1, {"rows": torch.tensor([0, 1, 2, -1])}, "rows holds -1"),
        (LOGITS[0], IDS, 1, {}, "one row"),
        (LOGITS.int(), IDS, 1, {}, "float32, bfloat16 or float16, got int32"),
        (LOGITS.double(), IDS, 1, {}, "float32, bfloat16 or float16, got float64"),
        (LOGITS, IDS, 2.0, {}, "top_k must be an integer, got 2.0"),
        (LOGITS, IDS, None, {}, "top_k must be an integer"),
        (LOGITS, IDS, 10**9, {}, "beyond every vocabulary"),
        (LOGITS, IDS, 1, {"allowed": [1, 2, 3, 4]}, "set of row 0 is 1: give one list of ids per row"),
        (LOGITS, IDS, 1, {"allowed": [[1.5, 2]] * 4}, "must hold integers"),
        (LOGITS, IDS, 1, {"allowed": ["ab"] * 4}, "must hold integers"),
        (LOGITS, IDS, 1, {"allowed": [[2**40]] * 4}, "beyond every vocabulary"),
        (LOGITS, IDS, 1, {"allowed": META}, "allowed is on meta"),
        (LOGITS, IDS, 1, {"out": LogprobBuffers.allocate(4, 50, 1, "meta")}, "out is on meta"),
        (LOGITS, IDS, 1, {"out": LOGITS}, "out must be LogprobBuffers"),
    ],
)
def test_token_logprobs(logits: Any, token_ids: Any, top_k: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        token_logprobs(logits, token_ids, top_k, **options)


def test_sets_of_many_forms() -> None:
    sets = TokenSets.of([{3, 1}, None, np.array([5, 5]), (7,)])
    assert sets.ids.tolist() == [1, 3, 5, 7]
    assert sets.lengths.tolist() == [2, 0, 1, 1]


@pytest.mark.parametrize(
    ("head", "options", "message"),
    [
        (torch.zeros(50, 8, device="meta"), {}, "must be on cpu"),
        (torch.zeros(50, 8), {"bias": torch.zeros(50, device="meta")}, "must be on cpu"),
        (np.zeros((50, 8), np.float32), {}, "head must be a torch tensor, got ndarray"),
        (lambda hidden: None, {"vocab_size": 50}, "what head returns must be a torch tensor, got NoneType"),
        (torch.nn.Linear(8, 50), {"vocab_size": 49}, "vocab_size is 49, but head returned logits of 50"),
        (torch.zeros(50, 8), {"temperature": 0.8}, "temperature must be a torch tensor"),
    ],
)
def test_linear_logprobs(head: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        linear_logprobs(torch.zeros(4, 8), head, IDS, 1, **options)


def test_views() -> None:
    with pytest.raises(InvalidRequestError, match=r"raw_logprobs, tempered_logprobs or processed_logprobs, got 'raw'"):
        view_logprobs("raw", LOGITS, IDS)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="logprobs_mode"):
        view_logprobs(LOGITS, IDS, IDS)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="needs a temperature per row"):
        view_logprobs("tempered_logprobs", LOGITS, IDS)
    with pytest.raises(InvalidRequestError, match="float32, bfloat16 or float16"):
        view_logprobs("processed_logprobs", LOGITS.int(), IDS)


def test_partials() -> None:
    with pytest.raises(InvalidRequestError, match="see target_logits"):
        partial_logprobs(LOGITS, IDS, 1)
    left, right = LOGITS[:, :20], LOGITS[:, 20:]
    # Each shard with what it knows alone, the targets never joined: no rank can come of that.
    parts = [
        partial_logprobs(part, target_logits(part, IDS, first), 2, first) for part, first in ((left, 0), (right, 20))
    ]
    assert merge_partials(parts).maximum.isnan().all()
