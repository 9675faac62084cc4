"""token_logprobs against float64 and against the order written out in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neper.errors import InvalidRequestError
from neper.ops.buffers import LogprobBuffers
from neper.ops.logprobs import reference
from neper.ops.logprobs.api import TokenLogprobs
from neper.ops.logprobs.token_sets import TokenSets
from neper.ops.token_logprobs import token_logprobs
from neper.types import LISTED_WHOLE
from tests.helpers.live_memory import LiveMemory
from tests.helpers.oracle import assert_right, expected, order

VOCABS = [1, 2, 127, 128, 129, 4097, 49152]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(logits: Tensor, ids: Tensor | None, k: int, **options: Any) -> TokenLogprobs:
    """token_logprobs, held to the oracle."""
    got = token_logprobs(logits, ids, k, **options)
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in options.items()}
    assert_right(got, expected(logits, None if ids is None else ids.tolist(), min(k, logits.shape[1]), **plain))
    return got


def same(got: TokenLogprobs, want: TokenLogprobs) -> bool:
    """Equal to the bit, in all that both list; what one lists beyond must be unused places."""
    places = min(got.top_ids.shape[1], want.top_ids.shape[1])
    return all(
        torch.equal(x, y) if x.dim() == 1 else torch.equal(x[:, :places], y[:, :places])
        for x, y in zip(got, want, strict=True)
    ) and all((scores.top_ids[:, places:] == -1).all() for scores in (got, want))


def part(scores: TokenLogprobs, rows: list[int]) -> TokenLogprobs:
    return TokenLogprobs(*(field[rows] for field in scores))


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
        check(logits, chosen_ids(logits), k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 127, 4097])
def test_ties_go_by_id(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    few = torch.randint(3, (3, vocab), generator=generator).to(dtype)  # three values: ties run past any margin
    equal = torch.full((3, vocab), 1.5, dtype=dtype)
    zeros = torch.where(torch.arange(vocab) % 2 == 0, -0.0, 0.0).expand(3, -1).to(dtype)
    for logits in (few, equal, zeros):
        for k in (0, 1, 5, 20, 64, vocab):
            check(logits, chosen_ids(logits), k)


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
        check(logits, torch.full((6,), 7), k)


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
    with pytest.raises(InvalidRequestError, match="got int64"):
        token_logprobs(torch.zeros(1, 5, dtype=torch.long), torch.tensor([1]))
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        token_logprobs(torch.zeros(2, 0), torch.tensor([0, 0]))
    ids = torch.tensor([1, 2])
    for name in ("row_top_k", "temperature"):
        with pytest.raises(InvalidRequestError, match=name):
            token_logprobs(torch.zeros(2, 5), ids, 1, **{name: torch.ones(3)})
    for name in ("allowed", "logprob_token_ids"):
        with pytest.raises(InvalidRequestError, match=f"{name} must hold one set per row"):
            token_logprobs(torch.zeros(2, 5), ids, 1, **{name: [[1]]})
        with pytest.raises(InvalidRequestError, match=f"{name} holds id 5"):
            token_logprobs(torch.zeros(2, 5), ids, 1, **{name: [[1], [5]]})
    with pytest.raises(InvalidRequestError, match="not both"):
        token_logprobs(torch.zeros(2, 5), ids, 1, allowed=[[1], []], logprob_token_ids=[[1], [2]])


@pytest.mark.parametrize(("wrong", "said"), [(5, "5"), (-2, "-2"), (2**31 - 1, "2147483647")])
def test_an_id_beyond_the_vocabulary_is_named(wrong: int, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"token id {said} "):
        token_logprobs(torch.zeros(3, 5), torch.tensor([4, wrong, -1]))


def test_where_ids_are_not_looked_at_one_beyond_the_vocabulary_scores_as_masked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "_check_ids", lambda ids, vocab: None)
    logits = torch.tensor([[1.0, 2.0, -math.inf]]).expand(2, -1)
    got = token_logprobs(logits, torch.tensor([3, 2**31 - 1]), 1, allowed=[[], [0, 1]])
    assert got.logprob.tolist() == [-math.inf] * 2
    assert got.rank.tolist() == [3, 3]


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


def mixed(rows: int = 9, vocab: int = 3000, seed: int = 11) -> Tensor:
    """Rows with ties, masked ids and a common offset."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    logits[1] = logits[1].bfloat16().float()
    logits[2, ::3] = -math.inf
    logits[3:4] += 5000.0
    return logits


def mixed_sets(rows: int, vocab: int) -> list[list[int]]:
    """No set, then one of a single id, a few, as many as are listed whole, one more, all ids; masked ids among them."""
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(12)).tolist()
    sizes = [0, 1, 7, LISTED_WHOLE, LISTED_WHOLE + 1, vocab]
    return [ids[: min(vocab, sizes[r % len(sizes)])] for r in range(rows)]


def test_minus_one_scores_the_rows_best() -> None:
    logits = mixed()
    logits[5, [700, 20]] = 50.0
    logits[6] = -math.inf
    ids = torch.tensor([-1, 7, -1, 2999, 0, -1, -1, -1, 5], dtype=torch.int32)
    for k in (0, 1, 20):
        got = check(logits, ids, k)
        best = torch.tensor(
            [
                order(row)[0] if i < 0 and r != 6 else max(i, 0)
                for r, (row, i) in enumerate(zip(logits, ids.tolist(), strict=True))
            ]
        )
        assert same(got, token_logprobs(logits, best, k))


def test_rows_may_list_fewer() -> None:
    logits = mixed()
    ids = torch.randint(3000, (9,), generator=torch.Generator().manual_seed(13))
    ids[4] = logits[4].argmax()
    whole = token_logprobs(logits, ids, 20)
    for counts in ([20] * 9, [0] * 9, [3] * 9, [0, 20, 1, 5, 0, 64, 2, 0, 19], [0, 0, 0, 0, 7, 0, 0, 0, 0]):
        row_top_k = torch.tensor(counts, dtype=torch.int32)
        got = check(logits, ids, 20, row_top_k=row_top_k)
        assert torch.equal(got.logprob, whole.logprob)
        assert torch.equal(got.rank, whole.rank)
        for r, n in enumerate(counts):
            assert torch.equal(got.top_logprobs[r, :n], whole.top_logprobs[r, :n])
        assert same(
            token_logprobs(logits, None, 20, row_top_k=row_top_k),
            token_logprobs(logits, torch.full((9,), -1), 20, row_top_k=row_top_k),
        )


def test_the_tempered_view() -> None:
    logits = mixed()
    ids = torch.tensor([0, 1, 2, 3, -1, 5, 6, 7, 8])
    temperature = torch.tensor([1.0, 0.7, 0.3, 2.0, 0.0, 9e-6, 1.0, 100.0, 1.3])
    got = check(logits, ids, 20, temperature=temperature)
    raw = token_logprobs(logits, ids, 20)
    assert torch.equal(got.rank, raw.rank)
    assert torch.equal(got.top_ids, raw.top_ids)
    untempered = [0, 4, 5, 6]  # 1, and greedy: the raw view to the bit
    assert same(part(got, untempered), part(raw, untempered))
    cold = check(mixed()[:1] * 100, torch.tensor([3]), 5, temperature=torch.tensor([0.01]))
    assert cold.top_logprobs[0, 0] == 0.0


def test_temperature_keeps_the_order_of_the_logits_where_it_merges_them() -> None:
    row = torch.tensor([[1.0, 1.0 + 2**-23, 30.0]])
    got = token_logprobs(row, torch.tensor([0]), 3, temperature=torch.tensor([20.0]))
    assert got.top_ids.tolist() == [[2, 1, 0]]
    assert got.rank.tolist() == [3]
    assert got.top_logprobs[0, 1] == got.top_logprobs[0, 2]


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("k", [0, 5, 1500])
def test_allowed_sets(k: int, temperature: float | None) -> None:
    logits = mixed(12)
    sets = mixed_sets(12, 3000)
    options: dict[str, Any] = {"allowed": sets}
    if temperature is not None:
        options["temperature"] = torch.full((12,), temperature)
    members = torch.tensor([ids[len(ids) // 2] if ids else 9 for ids in sets])
    strangers = torch.tensor([next(i for i in range(3000) if i not in ids or len(ids) == 3000) for ids in sets])
    for ids in (members, strangers, torch.full((12,), -1)):
        got = check(logits, ids, k, **options)
        for r, ids_of_row in enumerate(sets):
            if 0 < len(ids_of_row) <= LISTED_WHOLE:
                assert got.top_logprobs[r].double().exp().sum().item() == pytest.approx(1, abs=1e-6)
    limits = torch.tensor([0, 3, 1, 0, 4, 2, 9, 9, 9, 9, 0, 0], dtype=torch.int32)
    check(logits, members, k, row_top_k=limits, **options)
    if k:
        assert same(
            token_logprobs(logits, None, k, **options), token_logprobs(logits, torch.full((12,), -1), k, **options)
        )


def test_a_set_far_below_the_rows_best_has_its_own_maximum() -> None:
    row = torch.tensor([[500.0, -3.0, -4.0, -math.inf, -3.0]])
    got = token_logprobs(row, torch.tensor([4]), 0, allowed=[[4, 3, 2, 1]])
    assert got.top_ids.tolist() == [[1, 4, 2, 3]]
    assert got.top_logprobs[0, 3] == -math.inf
    assert got.top_logprobs.double().exp().sum().item() == pytest.approx(1, abs=1e-6)
    assert got.logprob[0] == got.top_logprobs[0, 1]
    assert got.rank.tolist() == [1]
    outside = token_logprobs(row, torch.tensor([0]), 0, allowed=[[4, 3, 2, 1]])
    assert outside.logprob.tolist() == [-math.inf]
    assert outside.rank.tolist() == [1]  # the place that its logit would have


def test_validity_of_restricted_rows_is_that_of_the_whole_row_and_of_the_set() -> None:
    logits = torch.zeros(4, 6)
    logits[0, 5] = math.nan
    logits[1, 5] = math.inf
    logits[2, :3] = -math.inf
    got = token_logprobs(logits, torch.zeros(4, dtype=torch.long), 2, allowed=[[0, 1, 2]] * 4)
    assert got.valid.tolist() == [False, False, False, True]
    assert got.rank.tolist() == [0, 0, 0, 1]
    assert (got.top_ids[:3] == -1).all()
    assert (got.logprob[:3] == -math.inf).all()
    assert (got.top_logprobs[:3] == -math.inf).all()
    named = token_logprobs(logits, torch.zeros(4, dtype=torch.long), 2, logprob_token_ids=[[0, 1, 2]] * 4)
    assert named.valid.tolist() == [False, False, True, True]
    assert named.top_ids.tolist() == [[-1] * 3, [-1] * 3, [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("temperature", [None, 1.7])
def test_named_ids_replace_the_top_k(temperature: float | None) -> None:
    logits = mixed(12)
    options = {} if temperature is None else {"temperature": torch.full((12,), temperature)}
    sets = [ids[:128] for ids in mixed_sets(12, 3000)]
    sets[2] = [0, 3, 6, 1]  # three are masked
    ids = torch.randint(3000, (12,), generator=torch.Generator().manual_seed(14))
    for k in (0, 5, 200):
        got = check(logits, ids, k, logprob_token_ids=sets, **options)
        plain = token_logprobs(logits, ids, k, **options)
        assert torch.equal(got.logprob, plain.logprob)
        assert torch.equal(got.rank, plain.rank)
    assert got.top_ids[2, :5].tolist() == [1, 0, 3, 6, -1]
    for place, token in enumerate(got.top_ids[1, : len(sets[1])].tolist()):
        alone = token_logprobs(logits[1:2], torch.tensor([token]), **{n: t[1:2] for n, t in options.items()})
        assert got.top_logprobs[1, place] == alone.logprob[0]


def test_both_kinds_of_sets_in_one_call_and_empty_ones() -> None:
    logits = mixed(6)
    ids = torch.arange(6)
    allowed = [[], [4, 1], [], [], [3, 9, 12], []]
    named = [[7], [], [], [0, 2], [], []]
    check(logits, ids, 3, allowed=allowed, logprob_token_ids=named)
    empty: list[list[int]] = [[]] * 6
    assert same(token_logprobs(logits, ids, 3, allowed=empty, logprob_token_ids=empty), token_logprobs(logits, ids, 3))
    as_sets = token_logprobs(logits, ids, 3, allowed=TokenSets.of(allowed), logprob_token_ids=TokenSets.of(named))
    assert same(as_sets, token_logprobs(logits, ids, 3, allowed=allowed, logprob_token_ids=named))


@pytest.mark.parametrize("vocab", [1030, 5000])
def test_bits_do_not_depend_on_company_with_sets_temperature_and_shorter_lists(vocab: int) -> None:
    count = 12
    logits = mixed(count, vocab)
    ids = torch.randint(-1, vocab, (count,), generator=torch.Generator().manual_seed(15))
    temperature = torch.rand(count, generator=torch.Generator().manual_seed(16)) * 2
    limits = torch.tensor([0, 3, 20] * 4, dtype=torch.int32)
    sets = mixed_sets(count, vocab)
    for name in ("allowed", "logprob_token_ids"):
        whole = token_logprobs(logits, ids, 20, temperature=temperature, row_top_k=limits, **{name: sets})
        for rows in ([0], [5], [11], [3, 4], list(reversed(range(count))), [4, 4, 4]):
            index = torch.tensor(rows)
            options: dict[str, Any] = {"temperature": temperature[index], name: [sets[r] for r in rows]}
            for k in (20, 21, 64):
                options["row_top_k"] = limits[index]
                assert same(token_logprobs(logits[index], ids[index], k, **options), part(whole, rows))
                assert same(token_logprobs(logits, ids[index], k, rows=index.int(), **options), part(whole, rows))


def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    count, vocab = 12, 2000
    logits = mixed(count, vocab)
    ids = torch.randint(-1, vocab, (count,), generator=torch.Generator().manual_seed(17))
    options: dict[str, Any] = {
        "temperature": torch.linspace(0.0, 2.0, count),
        "row_top_k": torch.tensor([0, 3, 20] * 4, dtype=torch.int32),
        "allowed": [s if r % 4 else [] for r, s in enumerate(mixed_sets(count, vocab))],
        "logprob_token_ids": [[] if r % 4 else [5, 1, 6] for r in range(count)],
    }
    index = torch.arange(count - 1, -1, -1)
    calls = [(logits, k, options) for k in (0, 3, 20, vocab)] + [(logits.flip(0), 20, options | {"rows": index})]
    want = [token_logprobs(x, ids, k, **extra) for x, k, extra in calls]
    for rows in (1, 5):
        monkeypatch.setattr(reference, "_TILE_BYTES", rows * vocab * reference.KEY_BYTES)
        for one, (x, k, extra) in zip(want, calls, strict=True):
            assert same(token_logprobs(x, ids, k, **extra), one)
    assert same(want[-1], want[2])


@pytest.mark.parametrize("k", [0, 5, 9, 10, -1])
def test_memory_is_bounded_whatever_the_number_of_rows(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 2**20
    monkeypatch.setattr(reference, "_TILE_BYTES", limit)
    logits = torch.randn(400, 5000, generator=torch.Generator().manual_seed(18)).bfloat16()
    ids = torch.zeros(400, dtype=torch.int32)
    rows = torch.arange(400)
    with LiveMemory() as memory:
        got = token_logprobs(logits, ids, k, rows=rows)
    assert memory.peak <= limit + sum(field.nbytes for field in got) + 400 * 64


def test_all_ids_in_order() -> None:
    logits = mixed(4, 700)
    got = check(logits, torch.zeros(4, dtype=torch.long), 700)
    assert same(token_logprobs(logits, torch.zeros(4, dtype=torch.long), -1), got)


def test_results_go_where_asked() -> None:
    logits = mixed(6)
    ids = torch.arange(6)
    buffers = LogprobBuffers.allocate(8, 3000, 30, "cpu")
    for field in buffers.scores:
        field.fill_(1)  # what is left over from another call
    for rows, k, sets in ((6, 20, None), (6, 0, [[1, 2]] * 6), (2, 30, None), (0, 3, None), (6, 5, None)):
        options: dict[str, Any] = {} if sets is None else {"allowed": sets}
        got = token_logprobs(logits[:rows], ids[:rows], k, out=buffers, **options)
        assert same(got, token_logprobs(logits[:rows], ids[:rows], k, **options))
        for field, memory in zip(got, buffers.scores, strict=True):
            assert field.data_ptr() == memory.data_ptr() or not field.numel()
    for call in ((logits.repeat(2, 1), 5), (logits, 31), (torch.zeros(1, 3001), 5)):
        with pytest.raises(InvalidRequestError, match="out holds 8 rows of 30 ids"):
            token_logprobs(call[0], torch.zeros(len(call[0]), dtype=torch.int32), call[1], out=buffers)


def test_no_rows_with_everything() -> None:
    nothing = torch.empty(0)
    got = token_logprobs(
        torch.empty(0, 50),
        nothing.long(),
        3,
        temperature=nothing,
        row_top_k=nothing.int(),
        allowed=[],
        rows=nothing.int(),
    )
    assert [tuple(field.shape) for field in got] == [(0,), (0,), (0, 3), (0, 3), (0,)]


def test_elsewhere_than_on_a_cpu_nothing_depends_on_values() -> None:
    """Meta tensors have no values: an op that looks at one fails."""
    meta = torch.device("meta")
    count, vocab = 12, 20_000
    for k in (0, 5, 100):
        for token_ids in (torch.zeros(count, dtype=torch.int32, device=meta), None):
            got = token_logprobs(
                torch.zeros(count + 1, vocab, dtype=torch.bfloat16, device=meta),
                token_ids,
                max(k, 1) if token_ids is None else k,
                temperature=torch.ones(count, device=meta),
                row_top_k=torch.ones(count, dtype=torch.int32, device=meta),
                allowed=[s if r % 4 else [] for r, s in enumerate(mixed_sets(count, vocab))],
                logprob_token_ids=[[] if r % 4 else [5, 1, 6] for r in range(count)],
                rows=torch.zeros(count, dtype=torch.int32, device=meta),
                out=LogprobBuffers.allocate(count, vocab, LISTED_WHOLE, meta),
            )
            assert got.top_ids.shape == (count, LISTED_WHOLE)


def test_logits_that_record_gradients() -> None:
    logits = mixed(3)
    ids = torch.tensor([1, 2, 3])
    got = token_logprobs(logits.clone().requires_grad_(), ids, 5, allowed=[[], [1], []])
    assert same(got, token_logprobs(logits, ids, 5, allowed=[[], [1], []]))
    assert not got.logprob.requires_grad


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_properties_of_sets_and_temperature(data: st.DataObject) -> None:
    vocab = 11
    logit = st.one_of(st.integers(-2, 2).map(float), st.floats(-1e4, 1e4, width=32), st.just(-math.inf))
    rows = data.draw(st.lists(st.lists(logit, min_size=vocab, max_size=vocab), min_size=1, max_size=3))
    logits = torch.tensor(rows)
    count = len(rows)
    subset = st.lists(st.integers(0, vocab - 1), max_size=6)
    allowed = data.draw(st.lists(subset, min_size=count, max_size=count))
    named = [[] if taken else data.draw(subset) for taken in allowed]
    ids = torch.tensor(data.draw(st.lists(st.integers(-1, vocab - 1), min_size=count, max_size=count)))
    temperature = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=count, max_size=count))
    )
    k = data.draw(st.integers(0, 12))
    options: dict[str, Any] = {"temperature": temperature, "allowed": allowed, "logprob_token_ids": named}
    got = token_logprobs(logits, ids, k, **options)
    for r in range(count):
        listed = [i for i in got.top_ids[r].tolist() if i >= 0]
        values = got.top_logprobs[r, : len(listed)].tolist()
        assert len(set(listed)) == len(listed)
        assert values == sorted(values, reverse=True)
        assert got.top_ids[r, len(listed) :].tolist() == [-1] * (got.top_ids.shape[1] - len(listed))
        assert (got.rank[r] > 0) == got.valid[r]
        if not got.valid[r]:
            assert not listed
            continue
        if allowed[r]:
            assert set(listed) == set(allowed[r])
            assert sum(math.exp(v) for v in values) == pytest.approx(1, abs=1e-6)
        elif named[r]:
            assert set(listed) == set(named[r])
        for token, value in zip(listed, values, strict=True):
            one = {name: given[r : r + 1] for name, given in options.items()}
            assert token_logprobs(logits[r : r + 1], torch.tensor([token]), **one).logprob.item() == value
