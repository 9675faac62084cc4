"""LLM.score_candidates against transformers, which computes each whole text alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from neper import LLM, SamplingParams, ScoredCandidate
from neper.errors import InvalidRequestError

PROMPT = "Hello, world! What is the answer? The quick brown"
CANDIDATES = [" fox", " fox jumps over the lazy dog", "!", " 日本語", " fox", " dog and then the dog sleeps in the sun"]


class Oracle:
    """transformers' model and tokenizer of a directory."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def logprobs(self, ids: list[int], start: int) -> np.ndarray:
        """Of the tokens from position `start` on."""
        with torch.no_grad():
            rows = self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return rows[:-1].gather(1, torch.tensor(ids)[1:, None])[start - 1 :, 0].numpy()


@pytest.fixture(scope="module")
def directory(tiny_dir: Callable[..., Path]) -> Path:
    return tiny_dir("llama")


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Oracle:
    return Oracle(directory)


@pytest.fixture(scope="module", params=[{}, {"prefix_caching": False}, {"speculative": "ngram"}], ids=str)
def llm(request: pytest.FixtureRequest, directory: Path) -> LLM:
    config: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_num_seqs": 4}
    return LLM(str(directory), **config, **request.param)


def check(found: list[ScoredCandidate], wholes: list[list[int]], oracle: Oracle) -> None:
    for scored, whole in zip(found, wholes, strict=True):
        position = scored.boundary.position
        assert list(scored.token_ids) == whole[position:]
        want = oracle.logprobs(whole, position)
        assert np.abs(scored.logprobs - want).max() < 1e-4
        assert abs(scored.logprob - want.sum()) < 1e-4
        assert abs(scored.mean_logprob - want.mean()) < 1e-4


def test_texts(llm: LLM, oracle: Oracle) -> None:
    wholes = [oracle.tokenizer(PROMPT + text)["input_ids"] for text in CANDIDATES]
    for _ in range(2):  # the second time with what the first one left in the cache
        found = llm.score_candidates(PROMPT, CANDIDATES)
        assert [scored.text for scored in found] == CANDIDATES
        assert found[0].boundary.kind == "clean"
        check(found, wholes, oracle)
    assert sum(scored.probability for scored in found) == pytest.approx(1.0)
    assert found[0].rank == found[4].rank


def test_a_merge_at_the_boundary(llm: LLM, oracle: Oracle) -> None:
    prompt, given = PROMPT.removesuffix("wn"), ["wn", "x", " dog", "wn fox"]
    found = llm.score_candidates(prompt, given)
    assert found[0].boundary.kind == "merged"
    check(found, [oracle.tokenizer(prompt + text)["input_ids"] for text in given], oracle)


def test_ids(llm: LLM, oracle: Oracle) -> None:
    ids = oracle.tokenizer(PROMPT)["input_ids"]
    given = [[5], [5, 6, 7], [2], list(range(10, 50))]
    check(llm.score_candidates(ids, given), [[*ids, *candidate] for candidate in given], oracle)
    check(llm.score_candidates(np.array(ids), np.array(given[1:2])), [[*ids, *given[1]]], oracle)


def test_messages(llm: LLM, oracle: Oracle) -> None:
    messages = [{"role": "user", "content": "What is the answer?"}]
    text = oracle.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    wholes = [oracle.tokenizer(text + answer)["input_ids"] for answer in CANDIDATES]
    check(llm.score_candidates(messages, CANDIDATES), wholes, oracle)


def test_wrong_arguments(llm: LLM) -> None:
    wrong: list[tuple[Any, Any, str]] = [
        (PROMPT, [], "no candidates"),
        (PROMPT, "yes", "texts or token ids"),
        (PROMPT, [5], "texts or token ids"),
        (PROMPT, ["a", ""], "has no tokens"),
        (PROMPT, [[999]], "outside the vocabulary"),
        (PROMPT, [[5] * 600], "candidate 0 have"),
        (PROMPT, ["a"] * 1001, "1001 candidates"),
        ("", ["a"], "prompt is empty"),
        ([PROMPT, PROMPT], ["a"], "one prompt"),
    ]
    for prompt, given, message in wrong:
        with pytest.raises(InvalidRequestError, match=message):
            llm.score_candidates(prompt, given)
    with pytest.raises(InvalidRequestError, match="normalize"):
        llm.score_candidates(PROMPT, ["a"], normalize="max")  # type: ignore[arg-type]
    stream = llm.stream_chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=3))
    next(stream)
    with pytest.raises(InvalidRequestError, match="still open"):
        llm.score_candidates(PROMPT, ["a"])
    stream.close()
    assert not llm.core.has_work
