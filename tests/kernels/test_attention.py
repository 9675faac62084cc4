"""The attention kernels against norm, rotation and softmax in float64, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from neper.ops.attention.api import AttentionScratch
from tests.helpers.attention import Case, Step, attention_inputs
from tests.kernels.scoring import DEVICE, DTYPES, INTERPRETED, some

BOUNDS = {torch.float32: 5e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.5e-2}
MIXED = Case((1, 1, 1, 12, 7, 2, 17), (70, 1, 3, 12, 25, 70, 40))


@pytest.fixture(autouse=True, scope="module")
def _dot_of_bfloat16() -> Iterator[None]:
    """Triton's interpreter multiplies the bits of bfloat16 as integers: have it multiply their values."""
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot = InterpreterBuilder.create_dot

    def widened(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return create_dot(builder, a, b, *rest)

    with mock.patch.object(InterpreterBuilder, "create_dot", widened):
        yield


def scratch(case: Case) -> AttentionScratch:
    from neper.ops.attention import launch

    return launch.allocate_scratch(len(case.query_lens), case.heads, case.kv_heads, case.dim, torch.device(DEVICE))


def step_of(case: Case) -> Step:
    from neper.ops.attention import launch

    return Step(case, DEVICE, scratch(case), launch)


def check(case: Case) -> None:
    step = step_of(case)
    step.check(atol=BOUNDS[case.dtype])
    assert step.inputs.scratch is not None
    assert not step.inputs.scratch.tickets.any()


@pytest.mark.parametrize("window", some([None, 5], [1, 16, 66]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_batch(dtype: torch.dtype, window: int | None) -> None:
    check(replace(MIXED, dtype=dtype, window=window))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    some(
        [(9, 3, 64), (3, 1, 20), (2, 2, 8), (8, 1, 80)],
        [(4, 4, 96), (14, 2, 64), (32, 8, 128), (16, 1, 128), (20, 1, 16), (4, 2, 256), (4, 1, 2)],
    ),
)
@pytest.mark.parametrize("dtype", some([torch.float32], [torch.bfloat16, torch.float16]))
def test_shapes(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    check(replace(MIXED, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype))


@pytest.mark.parametrize("block_size", some([1, 16], [3, 64]))
def test_block_sizes(block_size: int) -> None:
    check(replace(MIXED, block_size=block_size, query_lens=(1, 12, 18), context_lens=(30, 25, 18)))


def test_without_norms() -> None:
    check(replace(MIXED, normed=False, query_lens=(1, 9, 17), context_lens=(30, 20, 21)))


@pytest.mark.parametrize(
    ("context", "window"),
    some([(600, None), (600, 200)], [(1, None), (64, None), (65, None), (66, 65), (3000, None), (3000, 2049)]),
)
def test_parts_of_a_context(context: int, window: int | None) -> None:
    check(Case((1,), (context,), kv_heads=1, block_size=16, window=window))


@pytest.mark.parametrize("dtype", some([], DTYPES))
@pytest.mark.parametrize("window", some([], [None, 100, 1000]))
def test_many_parts_of_many_contexts(dtype: torch.dtype, window: int | None) -> None:
    contexts = (5000, 1, 130, 0, 2222, 64, 65, 3333)
    check(Case((1,) * 8, contexts, heads=8, kv_heads=2, dim=128, block_size=16, window=window, dtype=dtype))


@pytest.mark.parametrize(
    ("length", "context", "window"),
    some(
        [(129, 140, None), (100, 300, 70)],
        [(length, length + old, w) for length in (17, 127, 128, 300) for old in (0, 64, 500) for w in (None, 65)],
    ),
)
def test_long_chunks(length: int, context: int, window: int | None) -> None:
    check(Case((length,), (context,), heads=2, block_size=16, window=window))


@pytest.mark.parametrize("dim", some([], [64, 80, 128, 256]))
@pytest.mark.parametrize("dtype", some([], DTYPES))
@pytest.mark.parametrize("window", some([], [None, 200]))
def test_long_chunks_at_full_size(dtype: torch.dtype, dim: int, window: int | None) -> None:
    case = Case((1, 1, 257, 100), (90, 700, 257, 1100), heads=8, kv_heads=2, dim=dim, block_size=16)
    check(replace(case, dtype=dtype, window=window))


def test_padding_rows_give_zero_and_write_nothing() -> None:
    step = step_of(Case((1, 1, 1), (9, 0, 0)))
    step.qkv[1:] = math.nan
    assert (step.inputs.slot_mapping[1:] == -1).all()
    got = step.run()
    assert got[0].isfinite().all()
    assert not got[1:].any()
    slot = int(step.inputs.slot_mapping[0])
    now, then = step.cache.clone(), step.before.clone()
    now[:, slot] = then[:, slot] = 0
    assert torch.equal(now.nan_to_num(-7), then.nan_to_num(-7))


def test_rows_may_be_apart() -> None:
    step = step_of(replace(MIXED, query_lens=(1, 9, 17), context_lens=(30, 20, 21)))
    width = step.qkv.shape[1]
    wide = torch.full((len(step.qkv), width + 5), math.nan, device=DEVICE)
    wide[:, :width] = step.qkv
    assert torch.equal(step.run(wide[:, :width]), step.run())


@pytest.mark.parametrize("row", [0, 5])
def test_invalid_sequence_leaves_the_others_alone(row: int) -> None:
    step = step_of(replace(MIXED, context_lens=(200, 1, 3, 12, 25, 70, 40)))
    want = step.run()
    assert torch.equal(step.run(), want)
    ill = step.qkv.clone()
    ill[row] = math.nan
    got = step.run(ill)
    assert got[row].isnan().all()
    theirs = [r for r in range(len(ill)) if r != row and not (row == 5 and 3 <= r < 15)]
    assert torch.equal(got[theirs], want[theirs])


def test_tables_of_another_width_at_the_same_address() -> None:
    case = Case((1, 1, 19), (30, 5, 25))
    step = step_of(case)
    want = step.run()
    wide = attention_inputs(step.tables, case.query_lens, case.context_lens, block_size=4, device=DEVICE, width=11)
    storage = torch.full((100,), 10**6, dtype=torch.int32, device=DEVICE)
    step.inputs = replace(step.inputs, block_tables=storage[:24].view(3, 8))
    storage[:24] = wide.block_tables[:, :8].flatten()
    step.inputs.table_stride.fill_(8)
    assert torch.equal(step.run(), want)
    storage[:33] = wide.block_tables.flatten()
    step.inputs.table_stride.fill_(11)
    assert torch.equal(step.run(), want)


@pytest.mark.parametrize(
    ("queries", "context", "window"),
    some(
        [(1, 600, None), (3, 600, None), (16, 500, 450)],
        [(n, context, w) for n in (1, 2, 5, 8, 16) for context in (n, 100, 700, 9000) for w in (None, 5, 600)],
    ),
)
@pytest.mark.parametrize("dtype", some([torch.float32], [torch.bfloat16]))
def test_bits_follow_from_the_sequence_alone(
    dtype: torch.dtype, queries: int, context: int, window: int | None
) -> None:
    """Alone its context is cut; beside others, and without scratch, one program has all of it."""
    dim, block = (16, 16) if INTERPRETED else (128, 16)
    case = Case((queries,), (context,), heads=8, kv_heads=2, dim=dim, block_size=block, window=window, dtype=dtype)
    alone = step_of(case)
    want = alone.run()
    assert want.isfinite().all()
    assert (alone.inputs.num_items.item() > 1) == (context > 200)
    whole = attention_inputs(alone.tables, (queries,), (context,), block_size=block, device=DEVICE)
    assert whole.num_items is not None
    assert whole.num_items.item() == 1
    alone.inputs = whole
    assert torch.equal(alone.run(), want)
    others = (1, 16) if INTERPRETED else (1, 16, 9, 2, 1, 4, 16, 1, 1, 1, 3, 16, 1)
    lens, contexts = (*others, queries), (*(200 + 9 * i for i in range(len(others))), context)
    beside = step_of(replace(case, query_lens=lens, context_lens=contexts, seed=1))
    theirs = attention_inputs(
        beside.tables, lens, contexts, block_size=block, device=DEVICE, scratch=scratch(beside.case)
    )
    beside.inputs = theirs
    beside.qkv[-queries:] = alone.qkv
    beside.q_norm, beside.k_norm, beside.rotary = alone.q_norm, alone.k_norm, beside.rotary
    own, other = beside.slots(beside.tables[-1])[:context], alone.slots(alone.tables[0])[:context]
    beside.before[:, own] = alone.before[:, other]
    assert torch.equal(beside.run()[-queries:], want)


def test_longer_chunks_need_tiles() -> None:
    step = step_of(Case((1, 17), (9, 19)))
    step.inputs = replace(step.inputs, tiles=None)
    with pytest.raises(ValueError, match="tiles"):
        step.run()


def test_variants_launch_each_kernel() -> None:
    from neper.ops.attention import launch
    from neper.ops.common.variants import compile_all

    device = torch.device(DEVICE)
    names = ("decode_kernel", "write_kernel", "prefill_kernel")
    kernels = {name: getattr(launch, name) for name in names}
    spies = {name: mock.MagicMock() for name in names}
    for name, spy in spies.items():
        spy.__getitem__.side_effect = kernels[name].__getitem__
    found = launch.variants(8, 2, 16, 4, torch.float32, device, normed=False)
    assert found.kernels == tuple(kernels.values())
    with mock.patch.multiple(launch, **spies):
        compile_all([found], device)
    assert [spy.__getitem__.call_count for spy in spies.values()] == [1, 1, 1]


def test_refuses_caches_that_are_not_contiguous() -> None:
    step = step_of(Case((1,), (9,)))
    step.before = step.before.transpose(1, 2).contiguous().transpose(1, 2)
    with (
        pytest.raises(ValueError, match="contiguous"),
        mock.patch.object(torch.Tensor, "clone", lambda self: self),
    ):
        step.run()


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are a GPU's")
def test_captured_graph_is_valid_for_other_contexts() -> None:
    case = Case((1,) * 4, (90, 0, 700, 33), heads=32, kv_heads=8, dim=128, block_size=16, dtype=torch.bfloat16)
    step = step_of(replace(case, context_lens=(1000, 64, 1000, 1000)))
    step.run()
    graph = torch.cuda.CUDAGraph()
    cache = step.before.clone()
    with torch.cuda.graph(graph), mock.patch.object(torch.Tensor, "clone", return_value=cache):
        out = step.run()
    other = step_of(case)
    for name in ("slot_mapping", "items", "num_items", "table_stride"):
        getattr(step.inputs, name).copy_(getattr(other.inputs, name))
    step.inputs.block_tables.view(-1)[: other.inputs.block_tables.numel()] = other.inputs.block_tables.view(-1)
    step.qkv.copy_(other.qkv)
    step.rotary[: len(other.rotary)] = other.rotary
    if step.q_norm is not None and step.k_norm is not None:
        step.q_norm.copy_(other.q_norm)
        step.k_norm.copy_(other.k_norm)
    cache[:, : other.before.shape[1]] = other.before
    graph.replay()
    assert torch.equal(out, other.run())


@pytest.mark.skipif(DEVICE != "cuda", reason="only compiled kernels have variants")
def test_serving_compiles_nothing_after_warm_up() -> None:
    from neper.ops.attention.kernels import decode_kernel, prefill_kernel, write_kernel
    from neper.ops.attention.launch import variants
    from neper.ops.common.variants import compile_all

    kernels = (decode_kernel, write_kernel, prefill_kernel)

    def counts() -> list[int]:
        return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]

    device = torch.device("cuda", torch.cuda.current_device())
    compile_all([variants(8, 2, 64, 16, torch.bfloat16, device, normed=True)], device)
    before = counts()
    case = Case((1,), (1,), heads=8, kv_heads=2, dim=64, block_size=16, dtype=torch.bfloat16)
    for queries, contexts in [
        ((1,), (1,)),
        ((1,) * 7, (17, 99, 1, 1, 5, 300, 16)),
        ((1, 1, 2, 300), (5, 5, 2, 333)),
        ((5, 9), (9, 9)),
    ]:
        for window in (None, 16, 77):
            step_of(replace(case, query_lens=queries, context_lens=contexts, window=window)).run()
    assert counts() == before
