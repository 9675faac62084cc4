"""What a call says of each row: its token, subset, list length, temperature, and the memory it is written to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from neper.errors import InvalidRequestError
from neper.ops.buffers import LogprobBuffers
from neper.ops.logprobs.api import TokenLogprobs
from tests.kernels.scoring import DEVICE, assert_same_bits, by_reference, check, kernels, randint, randn, some

VOCAB = 1500


def on_device(values: list[int] | list[float], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_row_counts(count: int) -> None:
    logits = randn(count, VOCAB, seed=count, dtype=torch.bfloat16)
    for k in (0, 5):
        got = check(logits, randint(VOCAB, count, seed=1), k)
        assert [tuple(field.shape) for field in got] == [(count,), (count,), (count, k), (count, k), (count,)]
        assert [field.dtype for field in got] == [
            torch.float32,
            torch.int32,
            torch.int32,
            torch.float32,
            torch.bool,
        ]
        assert {field.device.type for field in got} == {DEVICE}


def test_a_token_outside_the_list() -> None:
    logits = randn(4, VOCAB, seed=2)
    places = logits.sort(descending=True, stable=True).indices
    ids = torch.stack([places[0, 4], places[1, 5], places[2, 700], places[3, -1]])
    got = check(logits, ids, 5)
    assert got.rank.tolist() == [5, 6, 701, VOCAB]
    assert got.logprob[0] == got.top_logprobs[0, 4]
    assert (got.top_ids[1:] != ids[1:, None]).all()


@pytest.mark.parametrize("dtype", some([torch.int32], [torch.int64]))
def test_without_an_id_the_best_is_scored(dtype: torch.dtype) -> None:
    logits = randn(5, VOCAB, seed=3, scale=2.0, dtype=torch.bfloat16)
    logits[3, [9, 1400]] = 100.0
    logits[4, 5] = math.nan
    best = logits.float().argmax(-1)
    best[3] = 9
    want = check(logits, best.to(dtype), 5)
    assert want.rank.tolist() == [1, 1, 1, 1, 0]
    assert_same_bits(check(logits, None, 5), want)
    assert_same_bits(check(logits, torch.full_like(best, -1, dtype=dtype), 5), want)
    mixed = on_device([-1, 17, -1, 1400, -1]).to(dtype)
    got = check(logits, mixed, 0)
    assert_same_bits([f[::2] for f in got], [f[::2] for f in check(logits, best, 0)])


def test_an_id_beyond_the_vocabulary_scores_as_a_masked_one() -> None:
    """It lies in the next row, whose logit must not be taken."""
    logits = randn(3, VOCAB, seed=4)
    got = kernels(logits, on_device([VOCAB, 7, VOCAB + 100]), 3)
    assert got.logprob[[0, 2]].tolist() == [-math.inf, -math.inf]
    assert_same_bits([f[1] for f in got], [f[1] for f in check(logits, on_device([1, 7, 2]), 3)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_row_subsets(dtype: torch.dtype) -> None:
    logits = randn(7, VOCAB, seed=5, dtype=torch.float16)
    for rows in ([6], [5, 2, 2, 0, 6, 2], []):
        index = on_device(rows)
        ids = randint(VOCAB, len(rows), seed=len(rows))
        for k in (0, 20):
            got = check(logits, ids, k, rows=index.to(dtype))
            assert_same_bits(got, kernels(logits[index], ids, k))
    wide = torch.full((7, VOCAB + 3), math.nan, dtype=torch.float16, device=DEVICE)[:, 1 : VOCAB + 1]
    wide.copy_(logits)
    index = on_device([5, 2, 2])
    assert_same_bits(check(wide, None, 4, rows=index.to(dtype)), kernels(logits[index], None, 4))


@pytest.mark.slow
def test_list_lengths_by_row() -> None:
    logits = randn(6, VOCAB, seed=6)
    logits[4, 1] = math.nan
    ids = randint(VOCAB, 6, seed=7)
    lengths = on_device([0, 1, 20, 7, 5, 99], torch.int32)
    got = check(logits, ids, 20, row_top_k=lengths)
    assert (got.top_ids >= 0).sum(-1).tolist() == [0, 1, 20, 7, 0, 20]
    whole = kernels(logits, ids, 20)
    assert_same_bits([got.logprob, got.rank, got.valid], [whole.logprob, whole.rank, whole.valid])
    for row, length in enumerate([0, 1, 20, 7]):
        assert torch.equal(got.top_logprobs[row, :length], whole.top_logprobs[row, :length])
    check(logits, ids, 20, row_top_k=torch.zeros_like(lengths))
    best = check(logits, None, 20, row_top_k=lengths)  # a row without a list still scores its best
    assert_same_bits([best.logprob], [whole.top_logprobs[:, 0]])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", some([torch.float32], [torch.bfloat16, torch.float16]))
def test_temperature(dtype: torch.dtype) -> None:
    logits = randn(7, VOCAB, seed=8, dtype=dtype)
    logits[5] = logits[5].round()
    ids = randint(VOCAB, 7, seed=9)
    temperature = on_device([1.0, 0.3, 1.7, 0.0, 9e-6, 0.7, 40.0], torch.float32)
    raw = kernels(logits, ids, 20)
    got = check(logits, ids, 20, temperature=temperature)
    assert torch.equal(got.rank, raw.rank)
    assert torch.equal(got.top_ids, raw.top_ids)
    for greedy in (0, 3, 4):
        assert_same_bits([field[greedy] for field in got], [field[greedy] for field in raw])
    assert (got.logprob[[1, 2, 5, 6]] != raw.logprob[[1, 2, 5, 6]]).all()
    check(logits, None, 5, temperature=temperature)
    check(logits, ids, 0, temperature=torch.full_like(temperature, 1.1e-5))


def test_temperature_of_an_offset_row() -> None:
    """Large values times a factor that is not exact: no bits of the differences may go."""
    base = randn(3, VOCAB, seed=10, scale=1.0)
    base[0] += 1e4
    base[1] -= 1e4
    base[2] += 3e5
    check(base, randint(VOCAB, 3, seed=11), 20, temperature=on_device([0.7, 1.3, 0.9], torch.float32))


def test_arguments_of_any_stride() -> None:
    """A column of a table, and one value for all rows."""
    logits = randn(3, VOCAB, seed=23)
    options = {
        "rows": on_device([[2, 9], [1, 9], [0, 9]], torch.int32)[:, 0],
        "row_top_k": on_device([[5, 0], [4, 0], [3, 0]], torch.int32)[:, 0],
        "temperature": on_device([[1.0, 9.0], [0.5, 9.0], [2.0, 9.0]], torch.float32)[:, 0],
    }
    ids = on_device([[1, 40], [2, 41], [3, 42]])[:, 0]
    want = kernels(logits, ids.contiguous(), 5)
    assert_same_bits(check(logits, ids, 5), want)
    check(logits, ids[1].expand(3), 5)
    for name, value in options.items():
        assert_same_bits(
            check(logits, ids.contiguous(), 5, **{name: value}),
            kernels(logits, ids.contiguous(), 5, **{name: value.contiguous()}),
        )


def garbage(rows: int, vocab: int, top_k: int) -> LogprobBuffers:
    """Buffers whose every word is wrong."""
    out = LogprobBuffers.allocate(rows, vocab, top_k, DEVICE)
    for field in (*out.scores, out.scratch):
        field.fill_(-77 if field.dtype != torch.bool else True)
    return out


@pytest.mark.slow
def test_results_in_buffers() -> None:
    for rows, vocab, columns in ((2, VOCAB, 20), (9, 2 * VOCAB, 33)):
        out = garbage(rows, vocab, columns)
        for seed, k in ((14, 20), (15, 5), (16, 0)):  # the second and later find the earlier ones' words
            ids = randint(VOCAB, 2, seed=seed)
            logits = randn(2, VOCAB, seed=seed)
            logits[seed % 2, 3] = math.nan
            got = check(logits, ids, k, out=out)
            assert_same_bits(got, kernels(logits, ids, k))
            for field, place in zip(got, out.scores, strict=True):
                assert field.data_ptr() == place.data_ptr() or field.numel() == 0
        got = kernels(logits, ids, 20, out=out)
        again = kernels(logits.flip(1), ids, 20, out=out)
        assert_same_bits(got, again)  # both are views of the same places
        assert (out.scores.logprob[2:] == -77).all()
        assert (out.scores.top_ids[:, 20:] == -77).all()
        assert (out.scores.top_ids[2:] == -77).all()
        assert (out.scores.top_logprobs[:, 20:] == -77).all()
        assert out.scores.valid[2:].all()


@pytest.mark.slow
def test_fewer_rows_and_ids_than_the_buffers_hold() -> None:
    out = garbage(8, VOCAB, 20)
    for vocab, count, k in ((VOCAB, 3, 20), (130, 8, 7), (1, 1, 2), (1400, 0, 5), (VOCAB, 1, 1)):
        logits = randn(count, vocab, seed=vocab, dtype=torch.bfloat16)
        got = check(logits, randint(vocab, count, seed=18), k, out=out)
        assert_same_bits(got, kernels(logits, randint(vocab, count, seed=18), k))


def test_buffers_with_every_option() -> None:
    logits = randn(6, VOCAB, seed=19, dtype=torch.bfloat16)
    out = garbage(8, VOCAB, 40)
    got = check(
        logits,
        on_device([5, -1, 7, 8], torch.int32),
        20,
        rows=on_device([4, 1, 1, 0]),
        row_top_k=on_device([20, 3, 0, 11], torch.int32),
        temperature=on_device([0.5, 1.0, 2.0, 0.0], torch.float32),
        allowed=[[], list(range(30, 60)), [], []],
        logprob_token_ids=[[5, 9, 1499], [], [], []],
        out=out,
    )
    assert got.top_ids.shape == (4, 30)
    assert got.top_ids[0, 3:].tolist() == [-1] * 27


@pytest.mark.slow
@pytest.mark.parametrize("vocab", some([1030], [3, 129, 8193, 49152, 50257]))
def test_a_rows_bits_do_not_depend_on_k_count_index_or_company(vocab: int) -> None:
    logits = randn(4, vocab, seed=20)
    ids = randint(vocab, 4, seed=21)
    want = kernels(logits, ids, 20)
    for k in (0, 1, 64):
        for rows in ([0], [3], [3, 2, 1, 0]):
            index = on_device(rows)
            shared = min(k, 20)
            for got in (kernels(logits[index], ids[index], k), kernels(logits, ids[index], k, rows=index)):
                assert_same_bits(first(got, shared), first(TokenLogprobs(*(f[index] for f in want)), shared))


def first(scores: TokenLogprobs, k: int) -> list[Tensor]:
    """The fields, of the lists only the first k places."""
    return [scores.logprob, scores.rank, scores.top_ids[:, :k], scores.top_logprobs[:, :k], scores.valid]


def test_more_rows_than_one_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from neper.ops.logprobs import launch

    logits = randn(5, VOCAB, seed=22)
    ids = on_device([4, -1, 6, 7, 8])
    options = {
        "rows": on_device([3, 3, 1, 0, 4]),
        "row_top_k": on_device([5, 4, 3, 2, 1], torch.int32),
        "temperature": on_device([1.0, 2.0, 0.5, 1.0, 0.7], torch.float32),
        "allowed": [[], [3, 9], [], [], [8, 100, 7]],
        "logprob_token_ids": [[], [], [], [5, 6, 7, 8, 9, 10], []],
    }
    want = check(logits, ids, 5, **options)
    monkeypatch.setattr(launch, "_MAX_ROWS", 2)
    assert_same_bits(kernels(logits, ids, 5, **options), want)
    assert_same_bits(kernels(logits, ids, 5, out=garbage(5, VOCAB, 6), **options), want)


@pytest.mark.parametrize("temperature", [math.inf, math.nan, 1e30])
def test_temperatures_beyond_reason(temperature: float) -> None:
    logits = randn(3, 700, seed=60)
    logits[1, 5] = -math.inf
    values = torch.full((3,), temperature, device=DEVICE)
    for score in (kernels, by_reference):
        scores = score(logits, randint(700, 3, seed=61), 5, temperature=values)
        assert scores.valid.tolist() == [not math.isnan(temperature)] * 3
        assert not scores.top_logprobs.isnan().any()
        assert not scores.logprob.isnan().any()


def test_arguments_of_the_wrong_kind() -> None:
    logits, ids = randn(2, 50, seed=62), randint(50, 2, seed=63)
    longs = torch.tensor([3, 0], device=DEVICE)
    assert_same_bits(kernels(logits, ids, 5, row_top_k=longs), kernels(logits, ids, 5, row_top_k=longs.int()))
    for name, wrong in (
        ("row_top_k", torch.zeros(2, dtype=torch.float32, device=DEVICE)),
        ("temperature", torch.ones(2, dtype=torch.float64, device=DEVICE)),
        ("rows", torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)),
        ("rows", torch.zeros(2, device=DEVICE)),
    ):
        with pytest.raises(InvalidRequestError, match=name):
            kernels(logits, ids, 1, **{name: wrong})
    with pytest.raises(InvalidRequestError, match="token_ids must be int64 or int32, got float32"):
        kernels(logits, ids.float(), 1)
    with pytest.raises(InvalidRequestError, match="is on meta"):
        kernels(logits, ids.to("meta"), 1)
