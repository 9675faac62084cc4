"""The k best of a row against the order written out in plain Python."""

from __future__ import annotations

import torch

from neper.ops.common.order import ordered_top_k, top_k_by_key
from tests.helpers.oracle import order


def test_the_chunked_search_is_the_same_as_the_plain_one() -> None:
    generator = torch.Generator().manual_seed(8)
    for vocab in (20_000, 20_001, 20_479):
        x = (torch.randn(4, vocab, generator=generator) * 2).bfloat16().float()
        x[1, 5000:5100] = 50.0  # one chunk, then its neighbour, hold all the best
        x[2] = -torch.inf
        x[2, [7, 19_999]] = -1.0
        x[3] = x[3].round()
        for k in (1, 2, 20, 39):
            values, ids = ordered_top_k(x, k)
            for row in range(4):
                want = order(x[row])[:k]
                assert ids[row, : len(want)].tolist() == want
                assert values[row, : len(want)].tolist() == x[row, want].tolist()
                assert (values[row, len(want) :] == -torch.inf).all()
                assert (ids[row] < vocab).all()


def test_keys_order_minus_infinity_by_id_too_and_both_zeros_as_one() -> None:
    x = torch.tensor([[-torch.inf, -0.0, 3.0, 0.0, -torch.inf]])
    values, ids = top_k_by_key(x, torch.tensor([4, 9, 2**31 - 1, 11, 7]), 5)
    assert ids.tolist() == [[2**31 - 1, 9, 11, 4, 7]]
    assert values.tolist() == [[3.0, 0.0, 0.0, -torch.inf, -torch.inf]]
