"""Calls of the reduction that say who computed them, and the machine that the kernels run on here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from neper.ops import backends
from neper.ops.logprobs import reference
from neper.ops.logprobs.api import TokenLogprobs
from neper.ops.logprobs.token_sets import TokenSets
from neper.ops.token_logprobs import token_logprobs
from tests.helpers.oracle import assert_right, expected

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

if find_spec("triton") is None:
    WHY_SKIPPED = "Triton is not installed"
elif not INTERPRETED and DEVICE == "cpu":
    WHY_SKIPPED = "needs a GPU or TRITON_INTERPRET=1 (make test runs both)"
else:
    WHY_SKIPPED = ""


def some(now: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Parameters of a test: `others` are marked full, for the interpreter takes about 0.2 s a row."""
    return [*now, *(pytest.param(*(o if isinstance(o, tuple) else (o,)), marks=pytest.mark.full) for o in others)]


def randn(*shape: int, seed: int, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal logits on the kernels' device, the same on every machine."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype).to(DEVICE)


def randint(high: int, *shape: int, seed: int) -> Tensor:
    """Integers below `high` on the kernels' device, the same on every machine."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def kernels(logits: Tensor, token_ids: Tensor | None, top_k: int = 0, **options: Any) -> TokenLogprobs:
    """token_logprobs, which must have come from the kernels."""
    got, by = _call(logits, token_ids, top_k, options)
    assert by == "triton"
    return got


def fallback(logits: Tensor, token_ids: Tensor | None, top_k: int = 0, **options: Any) -> TokenLogprobs:
    """token_logprobs, which must have come from the reference although kernels are the device's choice."""
    got, by = _call(logits, token_ids, top_k, options)
    assert by == "reference"
    return got


def by_reference(logits: Tensor, token_ids: Tensor | None, top_k: int = 0, **options: Any) -> TokenLogprobs:
    """token_logprobs as the reference computes it on the same device."""
    with mock.patch.object(backends, "scoring", return_value=reference):
        return fallback(logits, token_ids, top_k, **options)


def check(logits: Tensor, token_ids: Tensor | None, top_k: int = 0, **options: Any) -> TokenLogprobs:
    """The kernels' scores, held to float64 and the order written out, and to the reference."""
    got = kernels(logits, token_ids, top_k, **options)
    plain = {name: _plain(value) for name, value in options.items() if name != "out"}
    want = expected(logits, None if token_ids is None else token_ids.tolist(), top_k, **plain)
    assert_right(got, want)
    assert_agree(got, by_reference(logits, token_ids, top_k, **{n: v for n, v in options.items() if n != "out"}))
    return got


def assert_same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    """All fields are equal, bit by bit."""
    for x, y in zip(a, b, strict=True):
        assert torch.equal(_bits(x), _bits(y))


def assert_agree(got: TokenLogprobs, reference_scores: TokenLogprobs) -> None:
    """Flags, ranks and ids are equal, and values to within the two implementations' roundings."""
    for field in ("valid", "rank", "top_ids"):
        assert torch.equal(getattr(got, field), getattr(reference_scores, field)), field
    for field in ("logprob", "top_logprobs"):
        torch.testing.assert_close(getattr(got, field), getattr(reference_scores, field), atol=3e-5, rtol=2.0**-21)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32) if x.dtype == torch.float32 else x


def _plain(value: Any) -> Any:
    if isinstance(value, TokenSets):
        return [value.row(r).tolist() for r in range(len(value.lengths))]
    return value.tolist() if isinstance(value, Tensor) else value


def _call(logits: Tensor, token_ids: Tensor | None, top_k: int, options: dict[str, Any]) -> tuple[TokenLogprobs, str]:
    from neper.ops.logprobs import launch

    with (
        mock.patch.object(launch, "token_logprobs", wraps=launch.token_logprobs) as fast,
        mock.patch.object(reference, "token_logprobs", wraps=reference.token_logprobs) as plain,
    ):
        got = token_logprobs(logits, token_ids, top_k, **options)
    assert fast.call_count + plain.call_count == 1
    return got, "triton" if fast.call_count else "reference"
