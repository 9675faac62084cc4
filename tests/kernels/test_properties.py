"""Properties that hold for every row, on rows that hypothesis makes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.scoring import DEVICE, DTYPES, INTERPRETED, assert_same_bits, check, kernels

pytestmark = pytest.mark.slow
few = settings(deadline=None, max_examples=6 if INTERPRETED else 200)


@st.composite
def batches(draw: st.DrawFn) -> torch.Tensor:
    """1 to 4 rows; the values of a short drawn row repeat through a longer one, so that ties reach over chunks."""
    vocab = draw(st.sampled_from([1, 2, 5, 129, 1100]))
    values = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e4, 1e4, width=32), st.just(-0.0))
    drawn = draw(st.lists(st.lists(values, min_size=1, max_size=12), min_size=1, max_size=4))
    rows = [torch.tensor(row).repeat(-(-vocab // len(row)))[:vocab] for row in drawn]
    return torch.stack(rows).to(draw(st.sampled_from(DTYPES))).to(DEVICE)


@few
@given(logits=batches(), k=st.integers(1, 9 if INTERPRETED else 64), data=st.data())
def test_lists(logits: torch.Tensor, k: int, data: st.DataObject) -> None:
    count, vocab = logits.shape
    token = torch.tensor([data.draw(st.integers(0, vocab - 1)) for _ in range(count)], device=DEVICE)
    got = check(logits, token, k)
    for r in range(count):
        ids = [i for i in got.top_ids[r].tolist() if i >= 0]
        assert len(ids) == len(set(ids)) == min(k, vocab)
        values = got.top_logprobs[r, : len(ids)]
        assert values.tolist() == sorted(values.tolist(), reverse=True)
        gathered = kernels(logits, torch.tensor(ids, device=DEVICE), 0, rows=torch.full((len(ids),), r, device=DEVICE))
        assert_same_bits([gathered.logprob], [values])


@few
@given(logits=batches(), data=st.data())
def test_an_allowed_set_sums_to_one(logits: torch.Tensor, data: st.DataObject) -> None:
    count, vocab = logits.shape
    sets = [data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=40)) for _ in range(count)]
    token = torch.tensor([data.draw(st.sampled_from(ids)) for ids in sets], device=DEVICE)
    got = check(logits, token, 1, allowed=sets)
    total = got.top_logprobs.double().exp().sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-6, rtol=0)


@few
@given(logits=batches(), data=st.data())
def test_a_rows_bits_are_its_own(logits: torch.Tensor, data: st.DataObject) -> None:
    count, vocab = logits.shape
    token = torch.tensor([data.draw(st.integers(-1, vocab - 1)) for _ in range(count)], device=DEVICE)
    want = kernels(logits, token, 64)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=9)), device=DEVICE)
    k = data.draw(st.integers(0, 64))
    got = kernels(logits, token[rows], k, rows=rows)
    assert_same_bits(
        got,
        [want.logprob[rows], want.rank[rows], want.top_ids[rows, :k], want.top_logprobs[rows, :k], want.valid[rows]],
    )
