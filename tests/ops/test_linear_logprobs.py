"""linear_logprobs against float64 on the very logits it made, and how much memory these take."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neper.errors import InvalidRequestError
from neper.ops.buffers import LogprobBuffers
from neper.ops.linear_logprobs import linear_logprobs
from neper.ops.logprobs import reference
from neper.ops.logprobs.token_sets import TokenSets
from neper.ops.token_logprobs import token_logprobs
from neper.types import LISTED_WHOLE
from tests.helpers.live_memory import LiveMemory
from tests.helpers.oracle import assert_right, expected

T, D, V = 37, 16, 1500


def make(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [T, D], head [V, D], bias [V], token_ids [T]."""
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(T, D, generator=generator).to(dtype),
        torch.randn(V, D, generator=generator).to(dtype),
        torch.randn(V, generator=generator).to(dtype),
        torch.randint(-1, V, (T,), generator=generator),
    )


class Recorded:
    """F.linear, which keeps what it returned: the model's own logits, before anybody writes to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Tensor] = []
        self.linear = F.linear
        monkeypatch.setattr(F, "linear", self)

    def __call__(self, *args: Any) -> Tensor:
        product = self.linear(*args)
        self.calls.append(product.clone())
        return product

    def take(self) -> Tensor:
        logits = torch.cat(self.calls)
        self.calls = []
        return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_logits_bytes", [1, 7 * V * 4, 2**28])
def test_scores_are_exact_for_the_logits_that_were_made(
    dtype: torch.dtype, max_logits_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, head, bias, ids = make(dtype)
    recorded = Recorded(monkeypatch)
    for given in (None, bias):
        got = linear_logprobs(hidden, head, ids, 5, bias=given, max_logits_bytes=max_logits_bytes)
        logits = recorded.take()
        assert logits.dtype == dtype
        assert torch.allclose(logits.double(), recorded.linear(hidden, head, given).double(), rtol=2e-2, atol=1e-2)
        assert_right(got, expected(logits, ids.tolist(), 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("logit_scale", "soft_cap"), [(0.25, None), (1.0, 5.0), (0.5, 30.0), (3.0, 1.0)])
def test_scale_and_soft_cap(
    dtype: torch.dtype, logit_scale: float, soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, head, bias, ids = make(dtype)
    recorded = Recorded(monkeypatch)
    options: dict[str, Any] = {"logit_scale": logit_scale, "soft_cap": soft_cap, "bias": bias}
    got = linear_logprobs(hidden, head, ids, 5, max_logits_bytes=V * 6 * 5, **options)
    logits = recorded.take()
    exact = logits.double() * logit_scale
    if soft_cap is not None:
        exact = soft_cap * torch.tanh(exact / soft_cap)
    want = exact.log_softmax(-1)
    chosen = torch.where(ids < 0, logits.float().argmax(-1), ids)
    # Here the float32 of scale and cap are in the bound: some ulps of the logits.
    bound = 3e-5 + 2.0**-21 * float(exact.abs().max())
    assert (got.logprob.double() - want.gather(1, chosen[:, None])[:, 0]).abs().max() <= bound
    assert (got.top_logprobs.double() - want.gather(1, got.top_ids.long())).abs().max() <= bound
    # And for the float32 logits that result, scores are exact.
    x = logits.float()
    if logit_scale != 1.0:
        x = x * logit_scale
    if soft_cap is not None:
        x = torch.tanh(x / soft_cap) * soft_cap
    assert_right(got, expected(x, ids.tolist(), 5))


def test_tiles_change_no_bit_of_the_same_logits() -> None:
    """With a product that is exact in float32, logits do not depend on tiles: nor may anything else."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randint(-2, 3, (T, D), generator=generator).float()
    head = torch.randint(-2, 3, (V, D), generator=generator).float()
    ids = torch.randint(-1, V, (T,), generator=generator)
    options: dict[str, Any] = {
        "temperature": torch.linspace(0, 2, T),
        "row_top_k": torch.arange(T, dtype=torch.int32) % 7,
        "allowed": [list(range(r, LISTED_WHOLE + r - 5 * (r % 3))) if r in (3, 20) else [] for r in range(T)],
        "logprob_token_ids": [[r, 5, V - 1] if r % 9 == 0 else [] for r in range(T)],
    }
    for scale in ({}, {"logit_scale": 0.3, "soft_cap": 4.0}):
        x = hidden @ head.T
        if scale:
            x = torch.tanh((x * 0.3) / 4.0) * 4.0
        want = token_logprobs(x, ids, 5, **options)
        sets = {name: TokenSets.of(options[name]) for name in ("allowed", "logprob_token_ids")}
        for max_logits_bytes in (1, 5 * V * 4, 2**28):
            for given in (options, options | sets):
                got = linear_logprobs(hidden, head, ids, 5, max_logits_bytes=max_logits_bytes, **given, **scale)
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            buffers = LogprobBuffers.allocate(T + 1, V, LISTED_WHOLE + 5, "cpu")
            buffers.scores.top_ids.fill_(7)
            got = linear_logprobs(
                hidden, head, ids, 5, max_logits_bytes=max_logits_bytes, out=buffers, **options, **scale
            )
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            assert got.top_ids.data_ptr() == buffers.scores.top_ids.data_ptr()
    best = linear_logprobs(hidden, head, None, 3, max_logits_bytes=V * 40)
    assert all(torch.equal(a, b) for a, b in zip(best, token_logprobs(hidden @ head.T, None, 3), strict=True))
    whole = linear_logprobs(hidden[:3], head, None, -1, max_logits_bytes=V * 4)
    assert all(torch.equal(a, b) for a, b in zip(whole, token_logprobs(hidden[:3] @ head.T, None, -1), strict=True))


def test_a_function_as_head_whose_result_is_not_written_to() -> None:
    hidden, head, _, ids = make()
    returned: list[tuple[Tensor, Tensor]] = []

    def packed(rows: Tensor) -> Tensor:
        logits = rows @ head.T
        returned.append((logits, logits.clone()))
        return logits

    got = linear_logprobs(hidden, packed, ids, 5, logit_scale=0.5, soft_cap=9.0, max_logits_bytes=8 * V * 10)
    assert all(torch.equal(logits, kept) for logits, kept in returned)
    assert [len(logits) for logits, _ in returned] == [1, 10, 10, 10, 7]
    x = torch.tanh(torch.cat([logits for logits, _ in returned[1:]]) * 0.5 / 9.0) * 9.0
    assert_right(got, expected(x, ids.tolist(), 5))
    layer = torch.nn.Linear(D, V)
    got = linear_logprobs(hidden, layer, ids, 5)
    want = linear_logprobs(hidden, layer.weight, ids, 5, bias=layer.bias)  # parameters: no gradients are recorded
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not got.logprob.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_memory_of_logits_is_bounded(
    dtype: torch.dtype, soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5,000 positions of 4,096 ids would be 82 MB of float32 logits."""
    count, vocab, limit, reduction = 5000, 4096, 16 * 2**20, 4 * 2**20
    monkeypatch.setattr(reference, "_TILE_BYTES", reduction)  # what the reduction needs is its own, and small here
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(count, 8, generator=generator).to(dtype)
    head = torch.randn(vocab, 8, generator=generator).to(dtype)
    ids = torch.randint(vocab, (count,), generator=generator)
    with LiveMemory(columns=vocab) as logits:
        linear_logprobs(hidden, head, ids, 5, soft_cap=soft_cap, max_logits_bytes=limit)
    assert limit // 2 < logits.peak <= limit + reduction


def test_no_positions() -> None:
    hidden, head, _, _ = make()
    for given in (head, lambda rows: rows @ head.T):
        got = linear_logprobs(hidden[:0], given, torch.empty(0, dtype=torch.long), 3)
        assert [tuple(field.shape) for field in got] == [(0,), (0,), (0, 3), (0, 3), (0,)]


def test_an_invalid_position_is_flagged() -> None:
    hidden, head, _, ids = make()
    hidden[5, 0] = math.nan
    got = linear_logprobs(hidden, head, ids, 3, soft_cap=5.0, max_logits_bytes=V * 4)
    assert got.valid.tolist() == [r != 5 for r in range(T)]


def test_elsewhere_than_on_a_cpu_nothing_depends_on_values() -> None:
    """Meta tensors have no values: an op that looks at one fails."""
    hidden, head, bias, ids = (tensor.to("meta") for tensor in make())
    got = linear_logprobs(hidden, head, ids, 3, bias=bias, soft_cap=5.0, max_logits_bytes=V * 40)
    assert got.top_ids.shape == (T, 3)


def test_what_does_not_fit_is_an_error() -> None:
    hidden, head, bias, ids = make()
    wrong: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("hidden must be", (hidden[0], head, ids), {}),
        ("hidden must be", (hidden.long(), head, ids), {}),
        (r"head must be \[vocabulary, 16\]", (hidden, head[:, :15], ids), {}),
        (r"head must be \[vocabulary, 16\]", (hidden, head[0], ids), {}),
        ("hidden is torch.float32 but head is torch.bfloat16", (hidden, head.bfloat16(), ids), {}),
        ("bias must be", (hidden, head, ids), {"bias": bias[1:]}),
        ("bias must be", (hidden, head, ids), {"bias": bias.bfloat16()}),
        ("bias is for", (hidden, lambda rows: rows @ head.T, ids), {"bias": bias}),
        ("head must return", (hidden, lambda rows: rows[0], ids), {}),
        ("head must return", (hidden, lambda rows: (rows @ head.T).long(), ids), {}),
        ("token_ids must hold one id", (hidden, head, ids[1:]), {}),
        ("row_top_k must hold", (hidden, head, ids, 2), {"row_top_k": torch.ones(T - 1)}),
        ("temperature must hold", (hidden, head, ids), {"temperature": torch.ones(T + 1)}),
        ("allowed must hold", (hidden, head, ids), {"allowed": [[1]]}),
        ("allowed holds id 1500", (hidden, head, ids), {"allowed": [[1500]] * T}),
        ("top_k must be at least 1", (hidden, head, None), {}),
        ("top_k must be at least 0", (hidden, head, ids, -2), {}),
        ("token id 1500", (hidden, head, ids.clamp(min=1500)), {}),
        ("out holds 5 rows", (hidden, head, ids), {"out": LogprobBuffers.allocate(5, V, 0, "cpu")}),
        *[("soft_cap", (hidden, head, ids), {"soft_cap": cap}) for cap in (0.0, -1.0, math.nan, math.inf)],
        *[("logit_scale", (hidden, head, ids), {"logit_scale": scale}) for scale in (0.0, -1.0, math.nan, math.inf)],
        ("max_logits_bytes", (hidden, head, ids), {"max_logits_bytes": 0}),
    ]
    for message, args, options in wrong:
        with pytest.raises(InvalidRequestError, match=message):
            linear_logprobs(*args, **options)
    with pytest.raises(InvalidRequestError, match="top_k must be at least 1"):
        linear_logprobs(hidden[:0], head, None)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_tanh_has_the_same_bits_in_any_company(threads: int) -> None:
    """The soft cap is part of a row's logits: torch's kernel must treat the ends of its shares like the rest."""
    x = torch.randn(200_003, generator=torch.Generator().manual_seed(3)) * 2
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole = x.clone().tanh_()
        for begin, end in ((0, 5), (1, 30), (7, 40_000), (100_000, 200_003), (200_002, 200_003)):
            assert torch.equal(x[begin:end].clone().tanh_(), whole[begin:end])
    finally:
        torch.set_num_threads(before)
