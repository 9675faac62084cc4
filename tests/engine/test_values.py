"""The embedded model through the whole engine, teacher-forced against transformers on the same weights."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from neper import LLM
from neper.models.source import ModelSource

pytestmark = pytest.mark.model

TEXT = (
    "The history of measurement is the history of agreement. A unit is a promise that two people who have never met "
    "will cut a plank to the same length. For most of history such promises were local: the foot of one town was not "
    "the foot of the next, and a merchant carried tables of conversion as a sailor carries charts. The metre was an "
    "attempt to end this. Its first definition, one ten-millionth of the distance from the pole to the equator, was as "
    "much a political act as a scientific one, since the Earth belonged to nobody. 測定の歴史は合意の歴史である。 "
    "L'histoire de la mesure est celle d'un accord; 1/10,000,000 of a quadrant = 1 m. def measure(x): return x * 2 "
    "Today the metre follows from the speed of light, and nobody needs to visit Paris to check a ruler."
)


@cache
def exact(path: str, tokens: tuple[int, ...]) -> np.ndarray:
    """[n - 1] float64: log p(token | before) by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    return logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("chunk", [pytest.param(512, marks=pytest.mark.slow), 50])
def test_float32(smollm2: ModelSource, chunk: int) -> None:
    # The directory: by name, float32 has the values of the .gguf file, which the directory's were rounded from.
    llm = LLM(str(smollm2.path), device="cpu", dtype="float32", max_model_len=1024, max_num_batched_tokens=chunk)
    tokens = llm.tokenizer.encode(TEXT)
    assert len(tokens) > 200
    [got] = llm.score(TEXT)
    assert np.abs(got - exact(str(smollm2.path), tuple(tokens))).max() <= 1e-3


@pytest.mark.slow
def test_bfloat16(smollm2: ModelSource) -> None:
    llm = LLM("smollm2-135m", device="cpu", dtype="bfloat16", max_model_len=1024)
    tokens = llm.tokenizer.encode(TEXT)
    [got] = llm.score(TEXT)
    delta = np.abs(got - exact(str(smollm2.path), tuple(tokens)))
    assert delta.mean() <= 0.06
    assert np.quantile(delta, 0.99) <= 0.20
