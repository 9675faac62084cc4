"""A draft model from its files: what is accepted, and what is told of one that cannot serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from neper import LLM, LogprobParams, SamplingParams
from neper.errors import ConfigError, StartupError
from tests.helpers.engine import assert_same_scores


def test_a_draft_model_changes_no_token(tiny_dir: Callable[..., Path]) -> None:
    target, draft = tiny_dir("llama"), tiny_dir("qwen3")
    fixed = {"dtype": "float32", "num_threads": 1, "max_model_len": 128}
    plain, drafting = LLM(str(target), **fixed), LLM(str(target), speculative=f"draft:{draft}", **fixed)
    asked = [SamplingParams(temperature=t, seed=3, max_tokens=30, presence_penalty=p) for t in (0, 1) for p in (0, 0.5)]
    scores = [LogprobParams(top_k=5)] * 4
    for got, want in zip(*(llm.generate(["the fox"] * 4, asked, scores) for llm in (drafting, plain)), strict=True):
        assert got.logprobs is not None
        assert want.logprobs is not None
        assert_same_scores(got.logprobs, want.logprobs, tolerance=1e-4)
    assert drafting.core.stats().draft_tokens > 20


def test_a_draft_model_with_other_tokens_is_refused(tiny_dir: Callable[..., Path], tmp_path: Path) -> None:
    target = tiny_dir("llama")
    other = tmp_path / "other"
    other.mkdir()
    for file in target.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["A"], ids["B"] = ids["B"], ids["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(StartupError, match=f"other tokens than the model: {ids['B']} is 'B' there and 'A' here"):
        LLM(str(target), speculative=f"draft:{other}", dtype="float32", num_threads=1)


def test_a_draft_model_that_is_not_there_is_named(tiny_dir: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"the draft model: .*nowhere"):
        LLM(str(tiny_dir("llama")), speculative=f"draft:{tmp_path / 'nowhere'}", dtype="float32", num_threads=1)


@pytest.mark.parametrize("given", ["", "draft", "draft:", "ngrams", "mtp:x", "ngram:x"])
def test_what_drafts_must_be_known(given: str) -> None:
    with pytest.raises(ConfigError, match="speculative must be ngram, mtp or draft:MODEL"):
        LLM(speculative=given)


@pytest.mark.parametrize("given", [0, 17, -1])
def test_the_number_of_drafts_is_bounded(given: int) -> None:
    with pytest.raises(ConfigError, match="draft_tokens must be 1 to 16"):
        LLM(speculative="ngram", draft_tokens=given)
