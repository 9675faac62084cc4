"""Mode candidates, beside LLM.score_candidates and transformers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from neper import LLM, ScoredRow, score_dataset
from neper.config import EngineConfig, ScoreConfig
from neper.errors import ConfigError
from neper.score.formats import open_reader
from neper.score.run import run
from tests.score.conftest import Oracle

ROWS: list[dict[str, Any]] = [
    {"prompt": "What is the answer? The", "candidates": [" answer", " quick brown fox", " answer is forty-two"]},
    {"prompt": [5, 6, 7, 8], "candidates": [[9], [10, 11, 12]]},
    {"prompt": [{"role": "user", "content": "Hi"}], "candidates": ["Hello there", "the fox"]},
]


def score(llm: LLM, rows: list[dict[str, Any]], **settings: Any) -> list[ScoredRow]:
    return list(score_dataset(rows, "candidates", llm=llm, **settings))


@pytest.mark.parametrize("normalize", ["sum", "mean", "none"])
def test_rows_together_are_those_of_the_library_one_by_one(llm: LLM, normalize: Any) -> None:
    for scored in score(llm, ROWS, normalize=normalize, top=0):
        want = llm.score_candidates(scored.values["prompt"], scored.values["candidates"], normalize=normalize)
        assert scored.scores is not None
        assert scored.scores["logprobs"] == pytest.approx([one.logprob for one in want], abs=1e-4)
        assert scored.scores["probabilities"] == pytest.approx([one.probability for one in want], abs=1e-5)
        assert scored.scores["num_tokens"] == [len(one.token_ids) for one in want]
        assert [ids.tolist() for ids in scored.scores["token_ids"]] == [list(one.token_ids) for one in want]
        assert want[scored.scores["best"]].rank == 1


def test_values_are_those_of_transformers(llm: LLM, oracle: Oracle) -> None:
    prompt, candidates = ROWS[1]["prompt"], ROWS[1]["candidates"]
    [scored] = score(llm, ROWS[1:2], top=0)
    assert scored.scores is not None
    totals = []
    for ids, found in zip(candidates, scored.scores["token_logprobs"], strict=True):
        rows = oracle(prompt + ids)[len(prompt) - 1 : -1]
        want = np.array([row[token_id] for row, token_id in zip(rows, ids, strict=True)])
        assert found == pytest.approx(want, abs=1e-4)
        totals.append(float(want.sum()))
    assert scored.scores["logprobs"] == pytest.approx(totals, abs=1e-4)
    shares = np.exp(totals) / np.exp(totals).sum()
    assert scored.scores["probabilities"] == pytest.approx(shares, abs=1e-4)
    assert scored.scores["best"] == int(np.argmax(totals))
    assert scored.num_tokens == 4


def test_lists_may_be_json(llm: LLM) -> None:
    rows = [row | {"candidates": json.dumps(row["candidates"])} for row in ROWS]
    for found, want in zip(score(llm, rows), score(llm, ROWS), strict=True):
        assert found.scores is not None
        assert want.scores is not None
        assert found.scores["logprobs"] == pytest.approx(want.scores["logprobs"], abs=1e-5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"candidates": ["a"]}, "prompt is missing"),
        ({"prompt": "", "candidates": ["a"]}, "prompt is empty"),
        ({"prompt": 5, "candidates": ["a"]}, "not a text, ids or messages"),
        ({"prompt": "a b"}, "candidates is missing"),
        ({"prompt": "a b", "candidates": []}, "no candidates"),
        ({"prompt": "a b", "candidates": ["a", ""]}, "has no tokens"),
        ({"prompt": "a b", "candidates": ["a", 5]}, "texts or token ids"),
        ({"prompt": "a b", "candidates": "["}, "no JSON"),
        ({"prompt": "a b", "candidates": [[384]]}, "vocabulary"),
        ({"prompt": "a b", "candidates": ["the fox " * 100]}, "context"),
    ],
)
def test_rows_that_cannot_be_scored_say_why(llm: LLM, values: dict[str, Any], words: str) -> None:
    first, scored, last = score(llm, [ROWS[0], values, ROWS[1]])
    assert words in str(scored.error)
    assert first.scores
    assert last.scores


def test_a_row_whose_logits_are_no_numbers_fails_alone(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][20] = math.nan
    save_file(weights, file, metadata={"format": "pt"})
    llm = LLM(str(tmp_path / "model"), device="cpu", dtype="float32", num_threads=1)
    rows = [{"prompt": prompt, "candidates": [[7], [8, 9]]} for prompt in ([5, 6], [5, 20], [5, 7])]
    found = score(llm, rows)
    assert [row.scores is not None for row in found] == [True, False, True]
    assert "not numbers" in str(found[1].error)


def test_alternatives_are_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="top must be 0"):
        score(llm, [], top=2)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_files_hold_a_list_per_candidate(llm: LLM, model_dir: Path, tmp_path: Path, ending: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    out = tmp_path / f"out.{ending}"
    config = ScoreConfig(mode="candidates", top=0)
    assert run(tmp_path / "a.jsonl", out, None, "", config, EngineConfig(model=str(model_dir)), lambda _: llm) == 0
    [row] = open_reader(out).rows()
    [want] = score(llm, ROWS[:1], top=0)
    assert want.scores is not None
    for name in ("logprobs", "num_tokens", "probabilities", "token_ids", "token_logprobs"):
        found = json.loads(row.values[name]) if ending == "csv" else row.values[name]
        assert len(found) == 3
        for one, other in zip(found, want.scores[name], strict=True):
            assert one == pytest.approx(other if np.isscalar(other) else other.tolist(), rel=1e-5)
