"""What only compiled kernels can show: many rows of a real vocabulary, graphs, allocations, and launch shapes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from neper.ops.buffers import LogprobBuffers
from neper.ops.linear_logprobs import linear_logprobs
from neper.ops.logprobs.api import TokenLogprobs
from neper.ops.logprobs.token_sets import TokenSets
from neper.ops.token_logprobs import warm_up
from tests.helpers.oracle import assert_values_right
from tests.kernels.scoring import DEVICE, DTYPES, assert_agree, assert_same_bits, by_reference, check, kernels, randint

pytestmark = pytest.mark.skipif(
    DEVICE != "cuda", reason="of compiled kernels alone; the interpreter shows nothing here"
)

VOCAB = 151936


def randn(rows: int, seed: int, dtype: torch.dtype = torch.bfloat16, vocab: int = VOCAB, scale: float = 3.0) -> Tensor:
    """Normal logits, made on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator, device=DEVICE) * scale).to(dtype)


@pytest.mark.parametrize("k", [5, 20, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_rows(dtype: torch.dtype, k: int) -> None:
    for seed in range(8):
        logits = randn(125, seed, dtype, scale=0.5 + seed)
        ids = randint(VOCAB, 125, seed=seed)
        x = logits.double()
        best = x.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        ids[::2] = best[::2, seed % k]
        got = kernels(logits, ids, k)
        assert got.valid.all()
        assert torch.equal(got.top_ids.long(), best)
        assert torch.equal(got.rank, 1 + (x > x.gather(1, ids[:, None])).sum(-1, dtype=torch.int32))
        exact, naive = torch.log_softmax(x, -1), torch.log_softmax(logits.float(), -1).double()
        listed = torch.cat([ids[:, None], best], 1)
        values = torch.cat([got.logprob[:, None], got.top_logprobs], 1).double()
        assert_values_right(
            *(t.flatten().cpu().numpy() for t in (values, exact.gather(1, listed), naive.gather(1, listed)))
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 32, 600])
def test_the_reference_on_the_device_agrees(dtype: torch.dtype, count: int) -> None:
    logits = randn(count, 100 + count, dtype)
    logits[0] = logits[0].round()
    logits[-1, 5:] = -math.inf
    ids = randint(VOCAB, count, seed=count)
    for k in (0, 20, 64):
        assert_agree(kernels(logits, ids, k), by_reference(logits, ids, k))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1000, 32000, 151936, 151937, 248320])
def test_a_rows_bits_do_not_depend_on_the_row_count(vocab: int, dtype: torch.dtype) -> None:
    """1 to 1,024 rows pass every size at which a program takes more tiles of a row."""
    row = randn(1, 1, dtype, vocab)
    token = randint(vocab, 1, seed=2)
    want = kernels(row, token, 20)
    assert want.valid.all()
    for count in (1, 8, 32, 512, 1024):
        logits = randn(count, count, dtype, vocab)
        ids = randint(vocab, count, seed=3)
        for place in sorted({0, count // 2, count - 1}):
            logits[place], ids[place] = row[0], token[0]
            for k in (20, 64, 0):
                got = kernels(logits, ids, k)
                shared = min(k, 20)
                assert_same_bits(
                    [
                        got.logprob[place],
                        got.rank[place],
                        got.top_ids[place, :shared],
                        got.top_logprobs[place, :shared],
                    ],
                    [want.logprob[0], want.rank[0], want.top_ids[0, :shared], want.top_logprobs[0, :shared]],
                )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1000, 4096, 50257, 151936])
@pytest.mark.parametrize("count", [1, 3, 200])
def test_misaligned_copies_have_the_same_bits(count: int, vocab: int, dtype: torch.dtype) -> None:
    aligned = torch.full((count, -(-vocab // 16) * 16), math.nan, dtype=dtype, device=DEVICE)[:, :vocab]
    aligned.copy_(randn(count, 4, dtype, vocab))
    ids = randint(vocab, count, seed=5)
    want = kernels(aligned, ids, 20)
    assert want.valid.all()
    for stride, first in (
        (vocab + 1, 0),
        (vocab + 1, 1),
        (vocab + 2, 2),
        (-(-vocab // 16) * 16 + 16, 1),
        (2 * vocab + 5, 3),
    ):
        copy = torch.full((count, stride), math.nan, dtype=dtype, device=DEVICE)[:, first : first + vocab]
        copy.copy_(aligned)
        assert_same_bits(kernels(copy, ids, 20), want)


def test_rows_beyond_2_to_the_31_elements() -> None:
    count = 2**31 // VOCAB + 10
    if torch.cuda.mem_get_info()[0] < 3 * count * VOCAB:
        pytest.skip("needs 6 GB of free device memory")
    logits = torch.zeros(count, VOCAB, dtype=torch.bfloat16, device=DEVICE)
    last = randn(2, 6)
    logits[-2:] = last
    ids = randint(VOCAB, 2, seed=7)
    want = check(last, ids, 20)
    assert_same_bits(kernels(logits, ids, 20, rows=torch.tensor([count - 2, count - 1], device=DEVICE)), want)
    got = kernels(logits, ids[-1:].repeat(count), 20)
    assert_same_bits([field[-1] for field in got], [field[-1] for field in want])


def test_more_rows_than_one_launch_takes() -> None:
    logits = randn(9000, 8, vocab=300)
    ids = randint(300, 9000, seed=9)
    sets = [[r % 300, 5] if r % 7 == 0 else [] for r in range(9000)]
    got = kernels(logits, ids, 20)
    assert_agree(got, by_reference(logits, ids, 20))
    assert_same_bits(kernels(logits, ids, 20, out=LogprobBuffers.allocate(9000, 300, 20, DEVICE)), got)
    assert_agree(
        kernels(logits, None, 5, logprob_token_ids=sets), by_reference(logits, None, 5, logprob_token_ids=sets)
    )


@pytest.mark.parametrize("kind", ["allowed", "logprob_token_ids"])
def test_sets_of_20000(kind: str) -> None:
    logits = randn(32, 10)
    sets = [torch.randperm(VOCAB, generator=torch.Generator().manual_seed(r))[:20_000].tolist() for r in range(32)]
    ids = torch.tensor([ids[r] for r, ids in enumerate(sets)], device=DEVICE)
    got = check(logits, ids, 20, **{kind: sets})
    assert got.top_ids.shape[1] == (20 if kind == "allowed" else 20_000)
    check(logits, None, 64, **{kind: sets})


class Case:
    """Static inputs of a call in buffers, and new contents for them."""

    def __init__(self, count: int, k: int, dtype: torch.dtype, kind: str) -> None:
        self.logits = randn(count, 11, dtype)
        self.ids: Tensor | None = randint(VOCAB, count, seed=12)
        self.k = k
        self.options: dict[str, Any] = {}
        if kind == "best":
            self.ids = None
        if kind == "every option":
            self.options["rows"] = torch.arange(count, device=DEVICE).flip(0)
            self.options["row_top_k"] = torch.arange(count, dtype=torch.int32, device=DEVICE) % (k + 1)
            self.options["temperature"] = torch.linspace(0, 2, count, device=DEVICE)
            allowed = [list(range(r, 3500 * (r % 2 + 1), 7)) if r % 3 == 0 else [] for r in range(count)]
            named = [list(range(r, 900, 5)) if r % 3 == 1 else [] for r in range(count)]
            self.options["allowed"] = TokenSets.of(allowed, DEVICE)
            self.options["logprob_token_ids"] = TokenSets.of(named, DEVICE)
        width = max([k, *(sets.longest_listed for sets in self.options.values() if isinstance(sets, TokenSets))])
        self.out = LogprobBuffers.allocate(count, VOCAB, width, DEVICE)

    def renew(self, seed: int) -> None:
        """Other logits and ids, in the same memory."""
        self.logits.copy_(randn(len(self.logits), seed, self.logits.dtype))
        self.logits[seed % len(self.logits), 7] = math.nan
        if self.ids is not None:
            self.ids.copy_(randint(VOCAB, len(self.ids), seed=seed))
        if "row_top_k" in self.options:
            self.options["row_top_k"].copy_(self.options["row_top_k"].roll(1))
            self.options["temperature"].copy_(self.options["temperature"].roll(1))

    def run(self) -> TokenLogprobs:
        """Into the buffers."""
        return kernels(self.logits, self.ids, self.k, out=self.out, **self.options)

    def run_anew(self) -> TokenLogprobs:
        """Into new memory."""
        return kernels(self.logits, self.ids, self.k, **self.options)


CASES: dict[str, Callable[[], Case]] = {
    "one row": lambda: Case(1, 20, torch.bfloat16, "ids"),
    "a batch": lambda: Case(48, 20, torch.bfloat16, "ids"),
    "float32": lambda: Case(16, 5, torch.float32, "ids"),
    "no list": lambda: Case(64, 0, torch.float16, "ids"),
    "the best": lambda: Case(32, 20, torch.bfloat16, "best"),
    "many rows": lambda: Case(512, 64, torch.bfloat16, "ids"),
    "every option": lambda: Case(24, 20, torch.bfloat16, "every option"),
}


@pytest.mark.parametrize("name", CASES)
def test_captured_and_replayed(name: str) -> None:
    case = CASES[name]()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        case.run()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.run()
    for seed in range(20, 25):
        case.renew(seed)
        for field in captured:
            field.fill_(True if field.dtype == torch.bool else 77)
        graph.replay()
        want = case.run_anew()
        assert not want.valid.all()
        assert_same_bits(captured, want)
    for _ in range(50):  # back to back: a launch that begins early must not read what the one before still writes
        graph.replay()
    assert_same_bits(captured, want)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode does not notice everything
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def allocations() -> int:
    """How many times the allocator was asked for device memory."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@pytest.mark.parametrize("name", CASES)
def test_into_buffers_nothing_is_allocated_or_waited_for(name: str) -> None:
    case = CASES[name]()
    want = [field.clone() for field in case.run()]
    torch.cuda.synchronize()
    before = allocations()
    with no_waiting():
        got = case.run()
    assert allocations() == before
    assert_same_bits(got, want)


def test_allocations_and_waits_would_be_noticed() -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]  # before it the allocator has no figures
    before = allocations()
    value = torch.ones(3, device=DEVICE)
    assert allocations() > before
    with no_waiting(), pytest.raises(RuntimeError):
        value.sum().item()
    before = allocations()
    case = CASES["one row"]()
    case.run_anew()
    assert allocations() > before


def test_new_logits_are_seen_at_once() -> None:
    """Logits written by the kernel just before, and scores read by the one just after, many times over."""
    logits = randn(64, 30)
    ids = randint(VOCAB, 64, seed=31)
    sources = [randn(64, 40 + i) for i in range(4)]
    wants = [kernels(source, ids, 20) for source in sources]
    out = LogprobBuffers.allocate(64, VOCAB, 20, DEVICE)
    results = []
    for i in range(40):
        logits.copy_(sources[i % 4])
        results.append([field.clone() for field in kernels(logits, ids, 20, out=out)])
    for i, got in enumerate(results):
        assert_same_bits(got, wants[i % 4])


def test_the_error_is_that_of_float32_over_a_wide_vocabulary() -> None:
    """Flat rows are where a sum of many equal terms goes wrong."""
    vocab = 2**20
    flat = torch.zeros(1, vocab, device=DEVICE)
    slope = torch.linspace(0, 1e-3, vocab, device=DEVICE)[None]
    got = kernels(torch.cat([flat, slope]), torch.tensor([vocab - 1, 0], device=DEVICE), 3)
    exact = torch.log_softmax(slope.double(), -1)[0, 0].item()
    assert got.logprob.tolist() == pytest.approx([-math.log(vocab), exact], abs=2e-6)
    assert got.top_ids.tolist() == [[0, 1, 2], np.argsort(-slope[0].cpu().numpy(), kind="stable")[:3].tolist()]


@pytest.mark.parametrize("vocab", [151936, 50257])
def test_after_warm_up_serving_compiles_nothing(vocab: int) -> None:
    warm_up(vocab_size=vocab, dtype=torch.bfloat16, max_top_k=20, device=DEVICE)
    before = variants()
    logits = randn(33, seed=72, vocab=vocab)
    ids = randint(vocab, 33, seed=73).int()
    sets = [[1, 2, 3]] + [[]] * 32
    for first in (0, 1, 8, 32):  # rows without scores come first in a step
        for k in (0, 1, 5, 8, 20):
            kernels(logits[first:], ids[first:], k)
    kernels(logits, ids, 20, allowed=sets)
    kernels(logits, ids, 20, logprob_token_ids=sets)
    linear_logprobs(logits[:, :64].contiguous(), randn(vocab, seed=74, vocab=64), ids, 5)
    assert variants() == before


def variants() -> list[int]:
    """How often each kernel has been compiled in this process."""
    from neper.ops.logprobs import kernels as logprobs_kernels
    from neper.ops.logprobs import set_kernels

    all_kernels = (
        logprobs_kernels.read_kernel,
        logprobs_kernels.select_kernel,
        set_kernels.restrict_kernel,
        set_kernels.list_kernel,
    )
    return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in all_kernels]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_logits_on_another_device_than_the_current_one() -> None:
    logits, ids = randn(5, seed=70, vocab=3000), randint(3000, 5, seed=71)
    sets = [subset_of(3000, 50), [], subset_of(3000, 2000), [], [7]]
    assert torch.cuda.current_device() == 0
    for options in ({}, {"allowed": sets}):
        want = kernels(logits, ids, 20, **options)
        got = kernels(logits.to("cuda:1"), ids.to("cuda:1"), 20, **options)
        assert got.rank.device == torch.device("cuda:1")
        assert_same_bits([field.cpu() for field in got], [field.cpu() for field in want])
    warm_up(vocab_size=3000, dtype=torch.bfloat16, max_top_k=20, device="cuda:1")
    assert torch.cuda.current_device() == 0


def subset_of(vocab: int, size: int) -> list[int]:
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(size))[:size].tolist()
