"""The three views in one call each, against the pieces they are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neper.errors import InvalidRequestError
from neper.ops import Bias, DrawInputs, noise_keys, sample
from neper.ops.sampling.reference import edit_logits, processed_logits
from neper.ops.token_logprobs import token_logprobs
from neper.ops.views import view_logprobs


def test_the_views() -> None:
    vocab = 60
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0)) * 2
    draws = DrawInputs(
        rows=torch.tensor([0, 2]),
        temperature=torch.tensor([0.7, 1.5]),
        top_k=torch.tensor([4, vocab]),
        top_p=torch.tensor([1.0, 0.5]),
        min_p=torch.zeros(2),
        top_n_sigma=torch.zeros(2),
        keys=torch.tensor([noise_keys(seed, 0) for seed in (1, 2)]),
        filtered=True,
    )
    bias = Bias(torch.tensor([1]), torch.tensor([7]), torch.tensor([9.0]))
    temperature = torch.tensor([0.7, 0.0, 1.5])
    ids, _ = sample(logits, edited=edit_logits(logits, bias=bias), draws=draws)
    given: dict[str, Any] = {"bias": bias, "draws": draws, "temperature": temperature}
    raw = view_logprobs("raw_logprobs", logits, ids, 5, **given)
    tempered = view_logprobs("tempered_logprobs", logits, ids, 5, **given)
    processed = view_logprobs("processed_logprobs", logits, ids, 5, **given)
    edited = processed_logits(logits, bias=bias, draws=draws)
    for got, want in (
        (raw, token_logprobs(logits, ids, 5)),
        (tempered, token_logprobs(logits, ids, 5, temperature=temperature)),
        (processed, token_logprobs(edited, ids, 5, temperature=temperature)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(raw.rank, tempered.rank)
    assert (processed.top_ids[0] >= 0).tolist() == [True] * 4 + [False]
    assert (processed.logprob > -torch.inf).all()
    assert processed.rank[1] == 1  # greedy, where the bias made it best
    assert raw.rank[1] > 1
    index = torch.tensor([2, 0])
    some = view_logprobs(
        "processed_logprobs", logits, ids[index], 5, bias=bias, draws=draws, temperature=temperature[index], rows=index
    )
    assert torch.equal(some.top_logprobs, processed.top_logprobs[index])


def test_an_unknown_view_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="got 'raw'"):
        view_logprobs("raw", torch.zeros(1, 3), None, 1)  # type: ignore[arg-type]
