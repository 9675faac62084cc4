"""token_logprobs against float64 and against the order written out in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neper.errors import InvalidRequestError
from neper.ops import token_logprobs
from neper.ops.reference import ordered_top_k

VOCABS = [1, 2, 127, 128, 129, 4097, 49152]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def oracle(row: Tensor) -> np.ndarray:
    """log-softmax of one row in float64."""
    x = row.double().numpy()
    m = x.max()
    return (x - m) - math.log(math.fsum(np.exp(x - m)))


def order(row: Tensor) -> list[int]:
    """All ids above -inf, by (value descending, id ascending)."""
    values = row.double().tolist()
    return sorted((i for i, v in enumerate(values) if v > -math.inf), key=lambda i: (-values[i], i))


def assert_rows_right(logits: Tensor, ids: Tensor, k: int) -> None:
    got = token_logprobs(logits, ids, k)
    naive = torch.log_softmax(logits.float(), -1)
    worst = worst_naive = 0.0
    for r, row in enumerate(logits):
        exact, values = oracle(row), row.double()
        chosen = int(ids[r])
        best = order(row)[:k]
        assert got.valid[r]
        assert got.rank[r] == 1 + int((values > values[chosen]).sum())
        assert got.top_ids[r].tolist() == best + [-1] * (k - len(best))
        assert got.top_logprobs[r, len(best) :].tolist() == [-math.inf] * (k - len(best))
        listed = [(chosen, got.logprob[r]), *zip(best, got.top_logprobs[r], strict=False)]
        for token, value in listed:
            assert value <= 0
            if exact[token] < -3.3e38:  # a gap beyond float32's range
                assert value < -3.3e38
                continue
            error = abs(float(value) - exact[token])
            assert error <= max(3e-5, 2.0**-22 * abs(exact[token]))
            worst, worst_naive = max(worst, error), max(worst_naive, abs(float(naive[r, token]) - exact[token]))
    if math.isfinite(worst_naive):
        assert worst <= worst_naive + 1e-6 + np.spacing(np.float32(abs(worst_naive)))


def chosen_ids(logits: Tensor) -> Tensor:
    """The best id, the worst, and random ones between, by row."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(logits.shape[1], (len(logits),), generator=generator)
    ids[0] = logits[0].float().argmax()
    ids[-1] = logits[-1].float().argmin()
    return ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
def test_random_rows_agree_with_float64(vocab: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)) * 4).to(dtype)
    for k in {0, 1, 5, 20, min(vocab, 4097)}:
        assert_rows_right(logits, chosen_ids(logits), k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 127, 4097])
def test_ties_go_by_id(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(3, (3, vocab), generator=generator).to(dtype)  # three values: ties run past any margin
    equal = torch.full((3, vocab), 1.5, dtype=dtype)
    zeros = torch.where(torch.arange(vocab) % 2 == 0, -0.0, 0.0).expand(3, -1).to(dtype)
    for logits in (few, equal, zeros):
        for k in (0, 1, 5, 20, 64, vocab):
            assert_rows_right(logits, chosen_ids(logits), k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_and_offsets(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    base = torch.randn(6, 515, generator=torch.Generator().manual_seed(3))
    base[0, 7], base[1, 7], base[2, 7] = 1e4, -1e4, limit
    base[3, 9] = -limit
    base[4] += 1e4  # a large common offset must not eat the low bits of the normaliser
    base[5, 0], base[5, 1:] = 120.0, -120.0  # softmax().log() would be -inf here
    logits = base.to(dtype)
    for k in (0, 5, 515):
        assert_rows_right(logits, torch.full((6,), 7), k)


def test_masked_ids_are_never_listed() -> None:
    logits = torch.full((2, 300), -math.inf)
    logits[0, [5, 200]] = torch.tensor([1.0, 2.0])
    logits[1, 299] = -3.0
    got = token_logprobs(logits, torch.tensor([5, 0]), 4)
    assert got.top_ids.tolist() == [[200, 5, -1, -1], [299, -1, -1, -1]]
    assert got.top_logprobs[1].tolist() == [0.0, -math.inf, -math.inf, -math.inf]
    assert got.logprob[1] == -math.inf
    assert got.rank.tolist() == [2, 2]
    assert got.logprob[0] == pytest.approx(-1.3132616875, abs=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.nan])
@pytest.mark.parametrize("place", [0, 511, 1000])
def test_an_invalid_row_is_flagged_and_changes_no_neighbour(poison: float, place: int) -> None:
    clean = torch.randn(4, 1001, generator=torch.Generator().manual_seed(4))
    broken = clean.clone()
    broken[1, place] = poison
    broken[3] = -math.inf
    ids = torch.tensor([1, 2, 3, 4])
    want, got = token_logprobs(clean, ids, 20), token_logprobs(broken, ids, 20)
    assert got.valid.tolist() == [True, False, True, False]
    for field_want, field_got in zip(want, got, strict=True):
        assert torch.equal(field_want[[0, 2]], field_got[[0, 2]])
    assert got.rank[[1, 3]].tolist() == [0, 0]
    assert (got.top_ids[[1, 3]] == -1).all()
    assert (got.logprob[[1, 3]] == -math.inf).all()
    assert not got.top_logprobs.isnan().any()


@pytest.mark.parametrize("vocab", [3, 129, 1000, 8193, 49152, 50257])
def test_a_rows_bits_do_not_depend_on_k_count_index_or_company(vocab: int) -> None:
    logits = torch.randn(11, vocab, generator=torch.Generator().manual_seed(5)) * 3
    ids = torch.randint(vocab, (11,), generator=torch.Generator().manual_seed(6))
    want = token_logprobs(logits, ids, 20)
    for k in (0, 1, 20, 64):
        for rows in ([0], [10], [3, 4], [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]):
            index = torch.tensor(rows)
            for got in (
                token_logprobs(logits[index], ids[index], k),
                token_logprobs(logits, ids[index], k, rows=index),
            ):
                shared = min(k, 20)
                assert torch.equal(got.logprob, want.logprob[index])
                assert torch.equal(got.rank, want.rank[index])
                assert torch.equal(got.top_ids[:, :shared], want.top_ids[index, :shared])
                assert torch.equal(got.top_logprobs[:, :shared], want.top_logprobs[index, :shared])


@pytest.mark.parametrize(("rows", "vocab"), [(65, 3), (33, 1000), (9, 50257), (9, 49152)])
def test_a_rows_bits_depend_neither_on_threads_nor_on_where_their_shares_end(rows: int, vocab: int) -> None:
    """torch cuts an elementwise op into equal shares; the last elements of a share must come out as all others do."""
    generator = torch.Generator().manual_seed(5)
    threads = 7
    share = -(-rows * vocab // threads)
    before = torch.get_num_threads()
    try:
        for _ in range(8):
            # Two ids hold a row's mass, one of them at the end of the row or of a share: its last bit shows.
            logits = torch.full((rows, vocab), -200.0)
            logits[:, 0] = 0.0
            logits[:, -1] = -torch.rand(rows, generator=generator)
            ends = torch.arange(1, threads) * share - 1
            logits.view(-1)[ends] = -torch.rand(threads - 1, generator=generator)
            ids = torch.zeros(rows, dtype=torch.long)
            torch.set_num_threads(1)
            want = token_logprobs(logits, ids, 2)
            alone = [token_logprobs(logits[r : r + 1], ids[:1], 2) for r in range(rows)]
            torch.set_num_threads(threads)
            got = token_logprobs(logits, ids, 2)
            for one, all_at_once, threaded in zip(zip(*alone, strict=True), want, got, strict=True):
                assert torch.equal(torch.cat(one), all_at_once)
                assert torch.equal(threaded, all_at_once)
    finally:
        torch.set_num_threads(before)


def test_strided_rows() -> None:
    wide = torch.randn(3, 2000, generator=torch.Generator().manual_seed(7))
    for view in (wide[:, :777], wide[:, ::3], wide.T.contiguous().T):
        got = token_logprobs(view, torch.tensor([0, 1, 2]), 5)
        want = token_logprobs(view.contiguous(), torch.tensor([0, 1, 2]), 5)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_no_rows() -> None:
    got = token_logprobs(torch.empty(0, 50), torch.empty(0, dtype=torch.long), 3)
    assert [tuple(field.shape) for field in got] == [(0,), (0,), (0, 3), (0, 3), (0,)]


def test_a_list_longer_than_the_vocabulary_is_padded() -> None:
    got = token_logprobs(torch.tensor([[1.0, 2.0]]), torch.tensor([0]), 4)
    assert got.top_ids.tolist() == [[1, 0, -1, -1]]
    assert got.top_logprobs[0, 2:].tolist() == [-math.inf, -math.inf]


def test_without_ids_the_best_is_scored() -> None:
    logits = (torch.randn(5, 6000, generator=torch.Generator().manual_seed(9)) * 2).bfloat16()
    logits[3, [9, 4000]] = 100.0
    logits[4, 5] = math.nan
    best = torch.tensor([order(row)[0] for row in logits[:4]] + [0])
    for k in (1, 20):
        got, want = token_logprobs(logits, None, k), token_logprobs(logits, best, k)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert got.top_ids[:4, 0].tolist() == best[:4].tolist()


def test_wrong_shapes_are_errors() -> None:
    with pytest.raises(InvalidRequestError, match="one id per row"):
        token_logprobs(torch.zeros(2, 5), torch.tensor([1]))
    with pytest.raises(InvalidRequestError, match="top_k"):
        token_logprobs(torch.zeros(1, 5), torch.tensor([1]), -2)
    with pytest.raises(InvalidRequestError, match="at least 1"):
        token_logprobs(torch.zeros(1, 5), None)
    with pytest.raises(InvalidRequestError, match="float tensor"):
        token_logprobs(torch.zeros(1, 5, dtype=torch.long), torch.tensor([1]))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(
        st.lists(st.one_of(st.integers(-3, 3).map(float), st.floats(-1e4, 1e4, width=32)), min_size=9, max_size=9),
        min_size=1,
        max_size=4,
    ),
    k=st.integers(0, 12),
)
def test_properties(rows: list[list[float]], k: int) -> None:
    logits = torch.tensor(rows)
    got = token_logprobs(logits, torch.zeros(len(rows), dtype=torch.long), k)
    for r in range(len(rows)):
        ids = [i for i in got.top_ids[r].tolist() if i >= 0]
        assert len(set(ids)) == len(ids) == min(k, 9)
        values = got.top_logprobs[r, : len(ids)].tolist()
        assert values == sorted(values, reverse=True)
        for token, value in zip(ids, values, strict=True):
            assert token_logprobs(logits[r : r + 1], torch.tensor([token])).logprob.item() == value
    whole = token_logprobs(logits, torch.zeros(len(rows), dtype=torch.long), 9)
    assert torch.allclose(whole.top_logprobs.double().exp().sum(-1), torch.ones(len(rows)).double(), atol=1e-6)


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
