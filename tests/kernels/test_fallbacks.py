"""Each reason to take the reference where kernels serve the device, forced once."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from neper.ops import backends
from neper.ops.buffers import LogprobBuffers
from neper.ops.logprobs import reference
from neper.ops.logprobs.api import TokenLogprobs
from tests.helpers.oracle import assert_right, expected
from tests.kernels.scoring import (
    DEVICE,
    assert_agree,
    assert_same_bits,
    by_reference,
    check,
    fallback,
    kernels,
    randint,
    randn,
    some,
)

real_scoring = backends.scoring  # before the fixture puts another in its place


def held_to_float64(logits: Tensor, ids: Tensor, k: int, **options: Any) -> TokenLogprobs:
    got = fallback(logits, ids, k, **options)
    assert_right(got, expected(logits, ids.tolist(), k))
    assert_same_bits(got, by_reference(logits, ids, k))
    return got


@pytest.mark.slow
@pytest.mark.parametrize("vocab", some([127, 128, 129, 4097, 8193], [49152, 151936, 248320]))
def test_lists_above_64(vocab: int) -> None:
    logits = randn(2, vocab, seed=1, dtype=torch.bfloat16)
    ids = randint(vocab, 2, seed=2)
    logits[1, 5:70] = 20.0  # a tie across the 64th place
    warm = torch.tensor([0.7, 1.0], device=DEVICE)
    for temperature in (None, warm) if vocab < 10_000 else (None,):
        short = kernels(logits, ids, 64, temperature=temperature)
        for k in (65, vocab):
            with mock.patch.object(reference, "list_top_k", wraps=reference.list_top_k) as lists:
                got = kernels(logits, ids, k, temperature=temperature)
            assert lists.call_count == 1
            per_row = temperature.tolist() if temperature is not None else None
            assert_right(got, expected(logits, ids.tolist(), k, temperature=per_row))
            # A row's bits are the same for every k, also where another implementation lists it.
            assert_same_bits((got.logprob, got.rank, got.valid), (short.logprob, short.rank, short.valid))
            assert_same_bits((got.top_ids[:, :64], got.top_logprobs[:, :64]), (short.top_ids, short.top_logprobs))
        assert_same_bits(kernels(logits, ids, -1, temperature=temperature), got)


def test_long_lists_of_some_rows() -> None:
    logits, ids = randn(4, 700, seed=16), randint(700, 4, seed=17)
    logits[2, 3] = torch.nan
    row_top_k = torch.tensor([100, 3, 100, 0], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([3, 2, 1, 0], device=DEVICE)
    check(logits, ids, 100, row_top_k=row_top_k, rows=rows)
    check(logits, ids, 100, allowed=[[], [4, 5], [], list(range(200))])


def test_a_short_list_of_a_small_vocabulary_is_the_kernels() -> None:
    logits = randn(2, 50, seed=3)
    for k in (50, 64):
        check(logits, randint(50, 2, seed=4), k)
    assert_same_bits(kernels(logits, None, -1), kernels(logits, None, 50))


def test_a_vocabulary_beyond_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.MAX_KERNEL_VOCAB == 2**20
    monkeypatch.setattr(backends, "MAX_KERNEL_VOCAB", 1000)
    check(randn(2, 1000, seed=5), randint(1000, 2, seed=6), 5)
    held_to_float64(randn(2, 1001, seed=5), randint(1001, 2, seed=6), 5)


def test_columns_that_are_not_contiguous() -> None:
    ids = randint(700, 3, seed=7)
    for view in (randn(3, 1400, seed=8)[:, ::2], randn(700, 3, seed=9).T):
        got = held_to_float64(view, ids, 5)
        assert_agree(check(view.contiguous(), ids, 5), got)


def test_fallbacks_write_to_buffers() -> None:
    logits, ids = randn(3, 700, seed=12), randint(700, 3, seed=13)
    out = LogprobBuffers.allocate(5, 700, 100, DEVICE)
    for k in (100, 65, 20):
        got = kernels(logits, ids, k, out=out)
        assert_right(got, expected(logits, ids.tolist(), k))
        for field, place in zip(got, out.scores, strict=True):
            assert field.data_ptr() == place.data_ptr()


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without Triton: it is not found, and an import of the kernels fails."""
    import_before: Callable[..., Any] = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "triton" or "launch" in ((args[2] or ()) if len(args) > 2 else ()):
            raise ImportError(name)
        return import_before(name, *args, **kwargs)

    real_scoring.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(backends, "find_spec", lambda name: None)
        patch.setattr(backends, "scoring", lambda device: real_scoring("cuda"))
        patch.setattr(builtins, "__import__", refuse)
        yield
    real_scoring.cache_clear()


def test_without_triton(without_triton: None) -> None:
    from neper.ops.token_logprobs import token_logprobs

    assert backends.scoring("cuda") is reference
    for chosen in backends.chosen("cuda").values():
        assert chosen.name == "reference"
        assert "Triton is not installed" in chosen.why
    with pytest.raises(ImportError):
        from neper.ops.logprobs import launch  # noqa: F401  # else the test could not fail
    logits, ids = randn(3, 700, seed=14), randint(700, 3, seed=15)
    out = LogprobBuffers.allocate(3, 700, 5, DEVICE)
    assert out.scratch.numel() == 0
    for got in (token_logprobs(logits, ids, 5), token_logprobs(logits, ids, 5, out=out)):
        assert_right(got, expected(logits, ids.tolist(), 5))


def test_the_choice_by_device() -> None:
    from neper.ops.logprobs import launch

    real_scoring.cache_clear()
    kinds = ("cpu", "cuda", "xpu", "mps")
    assert [real_scoring(kind) for kind in kinds] == [reference, launch, launch, reference]
    names = [backends.chosen(kind)["scoring"].name for kind in kinds]
    assert names == ["reference", "triton", "triton", "reference"]
