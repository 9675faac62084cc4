"""A tiny model, and transformers as the oracle of its scores."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from neper import LLM

Oracle = Callable[[list[int]], npt.NDArray[np.float64]]


@pytest.fixture(scope="package")
def model_dir(tiny_dir: Callable[..., Path]) -> Path:
    return tiny_dir("llama", max_position_embeddings=128)


@pytest.fixture(scope="package")
def llm(model_dir: Path) -> LLM:
    return LLM(str(model_dir), device="cpu", dtype="float32", num_threads=1, max_num_batched_tokens=64)


@pytest.fixture(scope="package")
def oracle(model_dir: Path) -> Oracle:
    """[n, vocabulary] logprobs of the next token after each of n ids, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    @functools.cache
    def logprobs(ids: tuple[int, ...]) -> npt.NDArray[np.float64]:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        found: npt.NDArray[np.float64] = torch.log_softmax(logits.double(), -1).numpy()
        return found

    return lambda ids: logprobs(tuple(ids))
