"""The scorer: windows of rows, and rows that fail among others."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from neper import LLM, score_dataset
from neper.config import ScoreConfig
from neper.score.row import Row
from neper.score.scorer import Scorer

SHORT, MIDDLE, LONG = "a b", "the quick brown fox " * 3, "Hello, world! " * 8


def test_rows_come_out_in_order_with_the_scores_that_they_have_alone(llm: LLM) -> None:
    texts = [LONG, SHORT, "", MIDDLE, SHORT, LONG] * 20
    together = list(score_dataset(({"text": text} for text in texts), llm=llm))
    assert [scored.number for scored in together] == list(range(1, len(texts) + 1))
    alone = {text: next(iter(score_dataset([{"text": text}], llm=llm))).scores for text in set(texts)}
    for text, scored in zip(texts, together, strict=True):
        want = alone[text]
        assert scored.scores == (want and {name: pytest.approx(value, rel=1e-5) for name, value in want.items()})


def test_rows_are_taken_a_window_ahead_and_no_more(llm: LLM) -> None:
    """Of 64 tokens per step and 32 steps, a window is 8,192 characters."""
    taken = 0

    def rows() -> Iterator[dict[str, str]]:
        nonlocal taken
        while True:
            taken += 1
            yield {"text": "x" * 128}

    scored = score_dataset(rows(), llm=llm)
    assert next(scored).number == 1
    assert taken == 2 * 64
    scored.close()
    assert not llm.core.has_work


def test_a_window_depends_on_the_rows_from_its_beginning_on(llm: LLM) -> None:
    texts = [(SHORT, MIDDLE, LONG)[number % 3] * (1 + number % 5) for number in range(900)]
    rows = [Row(number, {"text": text}, error="not computed") for number, text in enumerate(texts, start=1)]
    windows = [[scored.number for scored in window] for window in Scorer(llm, ScoreConfig()).score(rows)]
    assert len(windows) > 10
    rest = Scorer(llm, ScoreConfig()).score(rows[windows[1][0] - 1 :])
    assert [[scored.number for scored in window] for window in rest] == windows[1:]


def test_a_row_whose_logits_are_no_numbers_fails_alone(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][LLM(str(model_dir)).tokenizer.encode("Z")] = math.nan
    save_file(weights, file, metadata={"format": "pt"})
    llm = LLM(str(tmp_path / "model"), device="cpu", dtype="float32", num_threads=1)
    texts = ["the fox", "a Z b", "the dog", "Hello there", "Z Z", "the sun"]
    found = list(score_dataset([{"text": text} for text in texts], llm=llm))
    assert [scored.scores is not None for scored in found] == [True, False, True, True, False, True]
    assert "not numbers" in str(found[1].error)


def test_a_row_that_is_nested_deeply_fails_alone(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": %s}\n{"text": "a b"}\n' % ("[" * 1000 + "]" * 1000))
    deep, other = score_dataset(path, llm=llm)
    assert deep.error == "text is of type list, not a text"
    assert other.error is None


def test_rows_that_are_no_mappings_fail_alone(llm: LLM) -> None:
    rows: list[Any] = [{"text": "the fox"}, 5, {"text": "the dog"}]
    assert [scored.error for scored in score_dataset(rows, llm=llm)] == [
        None,
        "the row is of type int, not a mapping",
        None,
    ]
