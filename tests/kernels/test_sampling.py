"""Choosing tokens by kernels: as `ops.sampling.reference` does, but for decisions that float32 cannot tell apart."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from neper.ops import DrawInputs, noise_keys, sample
from tests.helpers.filters import kept
from tests.helpers.noise import bits_of, gumbel_of, hashed, seeds_for
from tests.kernels.scoring import DEVICE, DTYPES, randn, some

VOCAB = 151936
compiled = pytest.mark.skipif(DEVICE != "cuda", reason="of compiled kernels alone; the interpreter shows nothing here")


@dataclass(frozen=True)
class Row:
    """How one token is drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    position: int = 2
    top_n_sigma: float = 0.0

    @property
    def keys(self) -> tuple[int, int]:
        return noise_keys(self.seed, self.position)


def floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def ints(values: list[int] | list[tuple[int, int]]) -> Tensor:
    """int32 of the low 32 bits."""
    return torch.from_numpy(np.array(values, dtype=np.int64).astype(np.uint32).view(np.int32)).to(DEVICE)


def chosen(logits: Tensor, rows: list[Row]) -> tuple[list[int], list[bool]]:
    """What the kernels choose, in poisoned memory of which they keep to their part."""
    from neper.ops.sampling.api import DrawRows
    from neper.ops.sampling.launch import choose, scratch_words

    words = scratch_words(*logits.shape)
    scratch = torch.full((words + 64,), -123456789, dtype=torch.int32, device=DEVICE)
    ids = torch.full((len(rows) + 3,), -77, dtype=torch.int32, device=DEVICE)
    valid = torch.ones(len(rows), dtype=torch.bool, device=DEVICE)
    draws = DrawRows(
        temperature=floats([r.temperature for r in rows]),
        top_p=floats([r.top_p for r in rows]),
        min_p=floats([r.min_p for r in rows]),
        top_n_sigma=floats([r.top_n_sigma for r in rows]),
        top_k=ints([r.top_k for r in rows]),
        keys=ints([r.keys for r in rows]),
    )
    choose(logits, draws, scratch, ids[: len(rows)], valid)
    assert (scratch[words:] == -123456789).all()
    assert ids[len(rows) :].tolist() == [-77] * 3
    return ids[: len(rows)].tolist(), valid.tolist()


def defined(logits: Tensor, rows: list[Row]) -> tuple[list[int], list[bool]]:
    """What `sample` says."""
    vocab = logits.shape[1]
    drawn = [i for i, row in enumerate(rows) if row.temperature >= 1e-5]
    inputs = None
    if drawn:
        inputs = DrawInputs(
            rows=torch.tensor(drawn, device=DEVICE),
            temperature=floats([rows[i].temperature for i in drawn]),
            top_k=torch.tensor([k if 0 < (k := rows[i].top_k) < vocab else vocab for i in drawn], device=DEVICE),
            top_p=floats([rows[i].top_p for i in drawn]),
            min_p=floats([rows[i].min_p for i in drawn]),
            top_n_sigma=floats([rows[i].top_n_sigma for i in drawn]),
            keys=torch.tensor([rows[i].keys for i in drawn], device=DEVICE),
            filtered=True,
        )
    ids, valid = sample(logits, draws=inputs)
    return ids.tolist(), valid.tolist()


def noise(row: Row, vocab: int) -> npt.NDArray[np.float64]:
    """The Gumbel noise of every id."""
    return gumbel_of(bits_of(*hashed(np.array([row.keys]), np.arange(vocab)))[0])


def candidates(logits: Tensor, row: Row) -> set[int]:
    """The ids that a draw may give, in float64: one, but where the decision is closer than float32 can tell."""
    x = logits.double().cpu().numpy()
    vocab = len(x)
    order = np.lexsort((np.arange(vocab), -x))
    if row.top_n_sigma > 0:
        finite = x[x > -np.inf]
        floor = finite.max() - float(np.float32(row.top_n_sigma)) * finite.std()
        assert abs(finite - floor).min() > 2e-6 * (finite.max() - floor), "float32 may not tell what is left"
        order = order[x[order] >= floor]
    with np.errstate(under="ignore"):
        tempered = (x[order] - x[order[0]]) / float(np.float32(row.temperature))
        probability = np.exp(tempered)
    if 0 < row.top_k < vocab:
        order, tempered, probability = (values[: row.top_k] for values in (order, tempered, probability))
    total = probability.sum()
    before = probability.cumsum() - probability
    noisy = tempered + noise(row, vocab)[order]
    found = set()
    for slack in (-3e-6, 0.0, 3e-6):  # the edges of the filters a little lower or higher
        top_p, min_p = float(np.float32(row.top_p)), float(np.float32(row.min_p))
        kept = (probability >= min_p * (1 - slack)) | (tempered == 0)  # the best's equals are exactly as probable
        if top_p < 1.0:
            kept &= before < (top_p + slack) * total
        kept[0] = True
        best = noisy[kept].max()
        found |= set(order[kept & (noisy >= best - 1e-5 * max(1.0, abs(best)))].tolist())
    return found


def check(logits: Tensor, rows: list[Row]) -> int:
    """Hold the kernels to `sample` and to float64; returns how many draws float32 could not decide."""
    ids, valid = chosen(logits, rows)
    want, want_valid = defined(logits, rows)
    assert valid == want_valid
    undecided = 0
    for i, row in enumerate(rows):
        if not valid[i]:
            assert ids[i] == want[i] == 0
        elif row.temperature < 1e-5:
            assert ids[i] == want[i] == logits[i].double().cpu().numpy().argmax()
        else:
            possible = candidates(logits[i], row)
            undecided += len(possible) > 1
            assert ids[i] in possible, (i, row, ids[i], want[i])
            assert len(possible) > 1 or ids[i] == want[i]
    return undecided


def some_rows(count: int, vocab: int, seed: int) -> list[Row]:
    """Parameters of all kinds."""
    pick = random.Random(seed)
    ks = [0, 0, 0, -1, 1, 2, 5, 50, vocab // 2, vocab - 1, vocab, vocab + 5]
    return [
        Row(
            temperature=pick.choice([0.0, 9e-6, 1e-4, 0.3, 0.8, 0.8, 1.0, 1.0, 2.0, 100.0]),
            # No multiple of 1/2, 1/5 or 1/50: of equal ids such a share ends between two, where rounding decides.
            top_p=pick.choice([1.0, 1.0, 0.999, 0.953, 0.953, 0.513, 0.103, 1e-6]),
            min_p=pick.choice([0.0, 0.0, 0.0, 0.02, 0.3, 1.0]),
            top_k=pick.choice(ks),
            seed=pick.getrandbits(64),
            position=pick.randrange(1000),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", some([1000], [3001] if DEVICE == "cpu" else [3001, VOCAB]))
def test_top_n_sigma(vocab: int, dtype: torch.dtype) -> None:
    """Before all other filters, in lists, searches and weighings; beside rows without it; over masked ids."""
    filters = [(1.0, 0.0, 0), (0.953, 0.0, 0), (1.0, 0.02, 0), (1.0, 0.0, 1), (0.513, 0.0, 5), (0.953, 0.0, vocab // 2)]
    rows = [
        Row(temperature, top_p, min_p, top_k, seed=100 * place + 7, top_n_sigma=sigma)
        for place, (top_p, min_p, top_k) in enumerate(filters)
        for temperature, sigma in ((1.0, 0.7), (3.0, 1.9), (3.0, 0.0), (0.0, 1.0))
    ]
    logits = randn(len(rows), vocab, dtype=dtype, seed=vocab) * 4
    check(logits, rows)
    logits[:, ::3] = -math.inf
    check(logits, rows)


def test_top_n_sigma_where_float32_ends_and_at_its_edge() -> None:
    """Two ids at the lowest float leave the others as they are, and of two ids alone n = 2 keeps both."""
    low = torch.randn(2, 3000, generator=torch.Generator().manual_seed(5)) * 3
    low[0, [10, 2900]] = torch.finfo(torch.float32).min
    low[1, 1000:1010] = -1e38
    two = torch.full((64, 1100), -torch.inf)
    two[:, 5], two[:, 9] = 11.27, 1.873
    for logits, rows in (
        (low, [Row(seed=seed, top_n_sigma=3.0) for seed in (1, 2)]),
        (two, [Row(seed=seed, top_n_sigma=2.0, temperature=50.0) for seed in range(64)]),
    ):
        logits = logits.to(DEVICE)
        assert chosen(logits, rows) == defined(logits, rows)
    assert {*defined(two.to(DEVICE), rows)[0]} == {5, 9}


def masked(x: Tensor) -> Tensor:
    """Few ids above -inf, a row with one."""
    x = x.clone()
    x[:, ::3] = -math.inf
    x[1, 1:] = -math.inf
    x[2, : x.shape[1] - 2] = -math.inf
    x[1, 0] = x[2, -1] = -5.0
    return x


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x * 3,
    "flat": lambda x: x * 0.02,
    "peaked": lambda x: x * 12,
    "tied": lambda x: x.round(),
    "equal": lambda x: x * 0 - 7.5,
    "masked": masked,
    "far": lambda x: x * 3e4,
    "shifted": lambda x: x + 90,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_definition(kind: str, dtype: torch.dtype) -> None:
    place = list(KINDS).index(kind) * 3 + DTYPES.index(dtype)
    count, vocab = (400, VOCAB) if DEVICE == "cuda" else (4, (50, 1001, 2304, 3000)[place % 4])
    logits = KINDS[kind](randn(count, vocab, seed=place, scale=1.0)).to(dtype)
    undecided = check(logits, some_rows(count, vocab, seed=place))
    assert undecided <= max(1, count // 100)


@pytest.mark.parametrize("vocab", some([50], [1, 2, 127, 1024, 1025, 4096, 20000]))
def test_vocabularies(vocab: int) -> None:
    count = 50 if DEVICE == "cuda" else 8
    check(randn(count, vocab, seed=vocab, scale=2.0, dtype=torch.bfloat16), some_rows(count, vocab, seed=vocab))


def test_each_way_to_a_token() -> None:
    """Lists, lists that overflow, top-k by search, sums of two candidates, and further ones with tiles read again."""
    vocab = 10240  # two groups of tiles
    logits = randn(9, vocab, seed=1, scale=1.0, dtype=torch.bfloat16)
    logits[1] = 1.0  # each tile's best is the best: all are listed
    logits[2, :5000] = logits[2, :5000].round()
    rows = [
        Row(0.8, 0.9, 0.0, 8, 1),
        Row(0.8, 0.5, 0.0, 3, 2),
        Row(1.0, 0.7, 0.0, 2000, 3),
        Row(0.8, 0.95, 0.0, 0, 4),
        Row(1.0, 0.3, 0.0, 0, 5),
        Row(1.0, 0.002, 0.0, 0, 6),
        Row(1.5, 1.0, 0.2, 0, 7),
        Row(1.0, 1.0, 0.0, 9, 8),
        Row(1.0, 1.0, 0.0, 0, 9),
    ]
    assert check(logits, rows) == 0


@pytest.mark.slow
def test_candidates_that_are_rejected() -> None:
    """Flat rows of few tiles: the noisiest id is often cut off, and the next often stands in the same tile."""
    count, vocab = (400, VOCAB) if DEVICE == "cuda" else (24, 3000)
    logits = randn(count, vocab, seed=30, scale=1.0, dtype=torch.bfloat16)
    assert check(logits, [Row(1.0, (0.2, 0.5, 0.7)[seed % 3], 0.0, 0, seed) for seed in range(count)]) <= count // 100


@pytest.mark.slow
def test_lists_of_the_best() -> None:
    """Hot rows, whose k best are all likely; what top-p and min-p leave of them."""
    count, vocab = (400, VOCAB) if DEVICE == "cuda" else (20, 7200)
    logits = randn(count, vocab, seed=31, scale=1.0, dtype=torch.bfloat16)
    top_p, min_p = (1.0, 0.5, 0.8, 0.0), (0.0, 0.0, 0.99, 0.0, 0.99)
    rows = [Row(20.0, top_p[seed % 4], min_p[seed % 5], (7, 3, 1)[seed % 7 // 3], seed + 1) for seed in range(count)]
    assert check(logits, rows) <= count // 100


@pytest.mark.full
@pytest.mark.parametrize("top_p", [0.95, 0.5, 0.05])
@pytest.mark.parametrize("top_k", [0, 16, 300])
def test_many_seeds(top_p: float, top_k: int) -> None:
    """Candidates are rejected in all ways in the course of many draws."""
    count, vocab = (2000, VOCAB) if DEVICE == "cuda" else (25, 20480)
    logits = randn(1, vocab, seed=2, scale=1.0, dtype=torch.bfloat16).expand(count, -1).contiguous()
    assert check(logits, [Row(0.9, top_p, 0.0, top_k, seed) for seed in range(count)]) <= count // 100


@pytest.mark.parametrize("value", some([math.nan, math.inf], [-math.nan]))
@pytest.mark.parametrize("dtype", some([torch.bfloat16], [torch.float32, torch.float16]))
def test_invalid_rows_harm_nobody(value: float, dtype: torch.dtype) -> None:
    vocab = 2100
    logits = randn(6, vocab, seed=3, dtype=dtype)
    rows = [Row(0.8, 0.9, 0.0, 0, seed) for seed in range(6)]
    rows[3] = Row(0.0)
    rows[4] = Row(1.0, top_k=2)
    want, _ = chosen(logits, rows)
    logits[1, 2050] = value
    logits[3, 0] = value
    logits[4, 1023] = value
    logits[5] = -math.inf
    ids, valid = chosen(logits, rows)
    assert valid == [True, False, True, False, False, False]
    assert ids == [want[0], 0, want[2], 0, 0, 0]


def test_a_negative_nan_is_one_too() -> None:
    logits = randn(2, 300, seed=4)
    logits.view(torch.int32)[1, 7] = -1
    assert chosen(logits, [Row(), Row()])[1] == [True, False]


@pytest.mark.parametrize("top_k", [0, 2])
def test_a_rows_token_is_its_own_affair(top_k: int) -> None:
    vocab = VOCAB if DEVICE == "cuda" else 2304
    row = randn(1, vocab, seed=5, dtype=torch.bfloat16)
    mine = Row(0.9, 0.6, 0.0, top_k, 1234)
    want, _ = chosen(row, [mine])
    for count in (3,) if DEVICE == "cpu" else (2, 9, 12, 33, 300):
        for place in (0, count - 1):
            logits = randn(count, vocab, seed=count, dtype=torch.bfloat16)
            logits[place] = row
            rows = some_rows(count, vocab, seed=count)
            rows[place] = mine
            assert chosen(logits, rows)[0][place] == want[0]


@pytest.mark.parametrize("dtype", some([torch.bfloat16], [torch.float32]))
def test_rows_at_any_distance(dtype: torch.dtype) -> None:
    vocab = 2304
    logits = randn(3, vocab, seed=6, dtype=dtype)
    rows = [Row(0.9, 0.6, 0.0, 0, 1), Row(0.7, 1.0, 0.0, 2, 2), Row(0.0)]
    want = chosen(logits, rows)
    for stride, first in ((vocab + 8, 8), (vocab + 1, 3)):
        wide = torch.full((3, stride + first), math.nan, dtype=dtype, device=DEVICE)
        view = wide.view(-1)[: 3 * stride + first].as_strided((3, vocab), (stride, 1), first)
        view.copy_(logits)
        assert chosen(view, rows) == want


def test_case_71_what_top_p_leaves_of_what_top_k_left() -> None:
    """Noise that no other id can have is given to the last id that is kept, and to the first that is not."""
    vocab, count = (5000, 60) if DEVICE == "cuda" else (2304, 4)
    pick = random.Random(71)
    sizes = [k for k in (1023, 1024, 1025, 2000, 4000, vocab - 1, 5, 0) if k < vocab]
    logits = randn(1, vocab, seed=71, scale=1.0)
    logits = (logits * 64).round() / 64
    rows, wanted = [], []
    for place in range(count):
        row = Row(pick.choice([0.8, 1.4]), pick.choice([0.8, 0.7, 0.99]), 0.0, sizes[place % len(sizes)], 0)
        edge = kept(
            logits[0].double().cpu().numpy(),
            temperature=row.temperature,
            top_k=row.top_k,
            top_p=row.top_p,
            min_p=0.0,
        )
        assert edge.fewest == edge.most
        for inside in (True, False):
            token = int(edge.order[edge.most - inside])
            seed = seeds_for(np.array([place]), token, 3)[0]
            rows.append(Row(row.temperature, row.top_p, 0.0, row.top_k, seed, position=3))
            wanted.append((token, inside))
    ids, valid = chosen(logits.expand(len(rows), -1).contiguous(), rows)
    assert all(valid)
    for row, token, (id, inside) in zip(rows, ids, wanted, strict=True):
        assert (token == id) == inside, row


@pytest.mark.full
@pytest.mark.parametrize(
    "row", [Row(), Row(0.7, 0.9), Row(1.3, 1.0, 0.1), Row(1.0, 0.8, 0.0, 20), Row(1.0, 1.0, 0.0, 7)]
)
def test_frequencies(row: Row) -> None:
    count, vocab = (20_000 if DEVICE == "cuda" else 600), 50
    logits = randn(1, vocab, seed=7, scale=1.5)
    x = logits[0].double().cpu()
    order = x.argsort(descending=True, stable=True)
    p = torch.softmax(x[order] / row.temperature, -1)
    kept = torch.arange(vocab) < (row.top_k or vocab)
    p = p * kept / (p * kept).sum()
    kept &= (p.cumsum(0) - p < row.top_p) & (p >= row.min_p * p[0])
    p = p * kept / (p * kept).sum()
    ids, valid = chosen(
        logits.expand(count, -1).contiguous(), [replace(row, seed=seed * 2654435761) for seed in range(count)]
    )
    assert all(valid)
    frequency = torch.bincount(torch.tensor(ids), minlength=vocab)[order] / count
    assert (frequency[~kept] == 0).all()
    assert ((frequency - p).abs() <= 4 * (p * (1 - p) / count).sqrt() + 1e-12).all()


def test_no_rows() -> None:
    assert chosen(torch.empty(0, 300, device=DEVICE), []) == ([], [])


@compiled
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_captured_replayed_and_without_allocations() -> None:
    from neper.ops.sampling.api import DrawRows
    from neper.ops.sampling.launch import choose, scratch_words

    count = 24
    rows = some_rows(count, VOCAB, seed=8)
    logits = randn(count, VOCAB, seed=8, dtype=torch.bfloat16)
    scratch = torch.empty(scratch_words(count, VOCAB), dtype=torch.int32, device=DEVICE)
    ids = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    valid = torch.zeros(count, dtype=torch.bool, device=DEVICE)
    draws = DrawRows(
        temperature=floats([r.temperature for r in rows]),
        top_p=floats([r.top_p for r in rows]),
        min_p=floats([r.min_p for r in rows]),
        top_n_sigma=floats([r.top_n_sigma for r in rows]),
        top_k=ints([r.top_k for r in rows]),
        keys=ints([r.keys for r in rows]),
    )
    choose(logits, draws, scratch, ids, valid)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        choose(logits, draws, scratch, ids, valid)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose(logits, draws, scratch, ids, valid)
    for seed in range(4):
        logits.copy_(randn(count, VOCAB, seed=9 + seed, dtype=torch.bfloat16))
        logits[seed, seed] = math.nan
        draws.keys.add_(seed)
        for _ in range(20):  # back to back: a launch that begins early must not read what the one before still writes
            graph.replay()
        got = ids.tolist(), valid.tolist()
        choose(logits, draws, scratch, ids, valid)
        assert got == (ids.tolist(), valid.tolist())
        assert valid.tolist().count(False) == 1


@compiled
@pytest.mark.parametrize("vocab", [151936, 50257])
def test_after_warm_up_nothing_is_compiled(vocab: int) -> None:
    from neper.ops.common.variants import compile_all
    from neper.ops.sampling import kernels as sampling_kernels
    from neper.ops.sampling.launch import variants

    def count() -> int:
        kernels = (
            sampling_kernels.best_kernel,
            sampling_kernels.draw_kernel,
            sampling_kernels.weigh_kernel,
            sampling_kernels.finish_kernel,
        )
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    logits = randn(40, vocab, seed=10, dtype=torch.bfloat16)
    compile_all([variants(vocab, torch.bfloat16, torch.device(DEVICE))], torch.device(DEVICE))
    before = count()
    for first in (0, 1, 8, 39):
        chosen(logits[first:], some_rows(40 - first, vocab, seed=first))
        chosen(logits[first:].float(), some_rows(40 - first, vocab, seed=first))
    assert count() == before
