"""Packing by kernels: the words of `neper.ops.packing.reference` at ragged places, and the table of last tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from neper.ops.common.order import greedy_tokens
from neper.ops.logprobs.api import TokenLogprobs
from neper.ops.packing.reference import pack_scores, pack_tokens
from tests.kernels.scoring import DEVICE, DTYPES, randn, some

POISON = -123456789
SLOTS = 40


class Places(NamedTuple):
    """Where rows go: `listed` as given, in an order of their own, with words left over between them."""

    offsets: list[int]
    listed: list[int]
    slots: list[int]
    size: int

    @staticmethod
    def of(listed: list[int], padding: int = 0) -> Places:
        offsets, end = [0] * len(listed), 3
        for row in sorted(range(len(listed)), key=lambda row: (row * 7 + 3) % 11):
            offsets[row] = end
            end += (2 if listed[row] < 0 else 3 + 2 * listed[row]) + row % 2
        slots = [(5 + 3 * row) % SLOTS for row in range(len(listed))]
        return Places(offsets + [-1] * padding, listed + [0] * padding, slots + [0] * padding, end + 5)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def poisoned(size: int) -> Tensor:
    return torch.full((size,), POISON, dtype=torch.int32, device=DEVICE)


def expect(places: Places, rows: list[Tensor], words: Tensor, last_tokens: Tensor) -> None:
    """`rows`: the words of each row that is no padding; nothing else is written."""
    want, table = poisoned(places.size), poisoned(SLOTS)
    for offset, slot, row in zip(places.offsets, places.slots, rows, strict=False):
        want[offset : offset + len(row)] = row
        table[slot] = row[0]
    assert torch.equal(words, want)
    assert torch.equal(last_tokens, table)


def best_packed(logits: Tensor, places: Places) -> tuple[Tensor, Tensor]:
    from neper.ops.packing.api import PackRows
    from neper.ops.packing.launch import pack_best
    from neper.ops.sampling.launch import best, scratch_words

    size = scratch_words(*logits.shape)
    scratch = poisoned(size + 64)
    best(logits, scratch)
    assert (scratch[size:] == POISON).all()
    words, last_tokens = poisoned(places.size), poisoned(SLOTS)
    rows = PackRows(ints(places.offsets), ints(places.listed), ints(places.slots))
    pack_best(rows, words, last_tokens, scratch, logits.shape[1])
    return words, last_tokens


@pytest.mark.parametrize("dtype", some(DTYPES[:2], DTYPES[2:]))
@pytest.mark.parametrize(
    "vocab", some([1, 300, 1001, 3000], [50257, *([151936, 2**20 - 3] if DEVICE == "cuda" else [])])
)
def test_the_best_tokens(vocab: int, dtype: torch.dtype) -> None:
    logits = randn(10, vocab, seed=vocab, dtype=dtype)
    logits[1] = logits[1].round()  # ties
    logits[2] = -0.0
    logits[2, vocab // 2 :] = 0.0
    logits[3] = -math.inf
    logits[4, vocab // 3] = math.nan
    logits[5, -1] = math.inf
    logits[6, : vocab - 1] = -math.inf
    logits[7, [0, -1]] = 3e4
    logits[8] = -3e4
    places = Places.of([-1] * 8, padding=2)
    ids, valid = greedy_tokens(logits)
    assert ids[2] == 0
    assert valid.tolist()[:6] == [True, True, True, False, False, False]
    expect(places, list(pack_tokens(ids, valid).view(-1, 2)[:8]), *best_packed(logits, places))


@pytest.mark.parametrize("dtype", some([torch.bfloat16], [torch.float32]))
def test_rows_at_any_distance(dtype: torch.dtype) -> None:
    vocab, places = 2056, Places.of([-1] * 4)
    logits = randn(4, vocab, seed=1, dtype=dtype)
    want = best_packed(logits, places)
    expect(places, list(pack_tokens(*greedy_tokens(logits)).view(-1, 2)), *want)
    for stride, first in ((vocab + 8, 8), (vocab, 1), (vocab + 5, 0)):
        wide = torch.full((4 * stride + first,), math.nan, dtype=dtype, device=DEVICE)
        view = wide[: 4 * stride + first].as_strided((4, vocab), (stride, 1), first)
        view.copy_(logits)
        for got, field in zip(best_packed(view, places), want, strict=True):
            assert torch.equal(got, field)


@pytest.mark.parametrize("count", some([3], [200]))
def test_a_rows_best_is_its_own_affair(count: int) -> None:
    vocab = 151936 if DEVICE == "cuda" else 3000
    logits = randn(count, vocab, seed=2, dtype=torch.bfloat16)
    places = Places.of([-1] * min(count, 12), padding=count - min(count, 12))
    ids, valid = greedy_tokens(logits)
    expect(places, list(pack_tokens(ids, valid).view(-1, 2)[:12]), *best_packed(logits, places))


def scores_of(count: int, width: int, seed: int) -> TokenLogprobs:
    """Any numbers, in fields that are views of wider ones; every third row is not valid."""
    wide = width + 3
    scores = TokenLogprobs(
        logprob=randn(count, seed=seed),
        rank=torch.arange(1, count + 1, dtype=torch.int32, device=DEVICE),
        top_ids=torch.arange(count * wide, dtype=torch.int32, device=DEVICE).view(count, wide)[:, :width],
        top_logprobs=randn(count, wide, seed=seed + 1)[:, :width],
        valid=torch.arange(count, device=DEVICE) % 3 != 2,
    )
    scores.rank[~scores.valid] = 0
    scores.top_ids[~scores.valid] = -1
    scores.logprob[~scores.valid] = -math.inf
    return scores


def chosen_packed(places: Places, ids: Tensor, valid: Tensor, scores: TokenLogprobs | None) -> tuple[Tensor, Tensor]:
    from neper.ops.packing.api import PackRows
    from neper.ops.packing.launch import pack_chosen

    words, last_tokens = poisoned(places.size), poisoned(SLOTS)
    rows = PackRows(ints(places.offsets), ints(places.listed), ints(places.slots))
    pack_chosen(rows, words, last_tokens, ids, valid, scores)
    return words, last_tokens


LISTED = [[-1] * 7, [0, 1, 5, 20, 20, 3, 20], [-1, -1, 0, 20, 64, -1, 5]]


@pytest.mark.parametrize("listed", LISTED)
def test_rows_of_all_widths(listed: list[int]) -> None:
    count = len(listed)
    places = Places.of(listed, padding=2)
    scores = scores_of(count + 2, 64, seed=3)
    ids = ints(list(range(100, 100 + count + 2)))
    valid = torch.arange(count + 2, device=DEVICE) % 4 != 1
    rows = []
    for row, k in enumerate(listed):
        here = slice(row, row + 1)
        good = valid[here] & scores.valid[here] if k >= 0 else valid[here]
        id = ids[here].masked_fill(~good, 0)
        score = scores.take(here)._replace(rank=scores.rank[here].masked_fill(~good, 0))
        rows.append(pack_tokens(id, good) if k < 0 else pack_scores(id, score, k))
    expect(places, rows, *chosen_packed(places, ids, valid, scores))


def test_without_scores() -> None:
    places = Places.of([-1] * 5, padding=1)
    ids = ints([7, 0, 9, 11, 13, 15])
    valid = torch.tensor([True, False, True, True, True, True], device=DEVICE)
    expect(places, list(pack_tokens(ids, valid).view(-1, 2)[:5]), *chosen_packed(places, ids, valid, None))


def test_padding_alone_and_no_rows() -> None:
    for padding in (3, 0):
        places = Places.of([], padding=padding)
        ids, valid = ints([1] * padding), torch.ones(padding, dtype=torch.bool, device=DEVICE)
        expect(places, [], *chosen_packed(places, ids, valid, None))
        expect(places, [], *best_packed(randn(padding, 300, seed=4), places))


@pytest.mark.parametrize("chosen", [True, False])
def test_what_is_kept_for_scores(chosen: bool) -> None:
    from neper.ops.packing.api import PackRows
    from neper.ops.packing.launch import keep
    from neper.ops.sampling.launch import best, scratch_words

    places = Places.of([5, -1, 0], padding=2)
    rows = PackRows(ints(places.offsets), ints(places.listed), ints(places.slots))
    logits = randn(5, 1500, seed=6)
    logits[1, 7] = math.nan
    best_ids, best_valid = greedy_tokens(logits)
    scratch = torch.zeros(scratch_words(5, 1500), dtype=torch.int32, device=DEVICE)
    best(logits, scratch)
    kept, last_tokens = PackRows(poisoned(5), poisoned(5), poisoned(5)), poisoned(SLOTS)
    ids, valid = ints([11, 12, 13, 14, 15]), torch.tensor([True, False, True, True, True], device=DEVICE)
    want_ids, want_valid = (ids.clone(), valid.clone()) if chosen else (best_ids.int(), best_valid)
    keep(rows, kept, last_tokens, ids, valid, scratch, 1500, chosen=chosen)
    assert torch.equal(ids, want_ids)
    assert torch.equal(valid, want_valid)
    for got, field in ((kept.offsets, rows.offsets), (kept.listed, rows.listed), (kept.slots, rows.slots)):
        assert torch.equal(got, field)
    expected = poisoned(SLOTS)
    expected[rows.slots[:3].long()] = want_ids[:3]
    assert torch.equal(last_tokens, expected)


@pytest.mark.skipif(DEVICE != "cuda", reason="of compiled kernels alone; the interpreter shows nothing here")
def test_after_warm_up_nothing_is_compiled() -> None:
    from neper.ops.common.variants import compile_all
    from neper.ops.packing import launch

    def variants() -> int:
        kernels = launch.pack_best_kernel, launch.keep_kernel, launch.pack_chosen_kernel
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    device = torch.device(DEVICE)
    compile_all([launch.variants(vocab, device) for vocab in (1500, 3000)], device)  # of the tests below
    before = variants()
    for listed in LISTED:
        test_rows_of_all_widths(listed)
    for chosen in (True, False):
        test_what_is_kept_for_scores(chosen)
    test_without_scores()
    logits = randn(9, 3000, seed=6)
    best_packed(logits[1:], Places.of([-1] * 8))
    assert variants() == before
