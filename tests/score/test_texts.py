"""Mode text, beside transformers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neper import LLM, score_dataset
from neper.errors import ConfigError
from tests.score.conftest import Oracle

TEXTS = ["the quick brown fox", "日本語のテキスト 😀", "Hello, world! Hello there.", "a b"]
LONG = "the quick brown fox jumps over the lazy dog. Hello, world! " * 12
CONTEXT = 128


def scores(llm: LLM, text: str, **settings: Any) -> dict[str, Any]:
    [scored] = score_dataset([{"text": text}], llm=llm, **settings)
    assert scored.error is None
    assert scored.scores is not None
    return scored.scores


def error(llm: LLM, values: dict[str, Any], **settings: Any) -> str:
    [scored] = score_dataset([values], llm=llm, **settings)
    assert scored.scores is None
    assert scored.error is not None
    return scored.error


def logprobs(oracle: Oracle, ids: list[int], start: int = 1) -> np.ndarray:
    """Of the ids from `start` on."""
    rows = oracle(ids)
    return np.array([rows[place - 1, ids[place]] for place in range(start, len(ids))])


def test_values_are_those_of_transformers(llm: LLM, oracle: Oracle) -> None:
    for text, scored in zip(TEXTS, score_dataset(({"text": text} for text in TEXTS), llm=llm), strict=True):
        want = logprobs(oracle, llm.tokenizer.encode(text, add_special_tokens=False))
        assert scored.values == {"text": text}
        assert scored.scores == {
            "logprob": pytest.approx(want.sum(), abs=1e-4),
            "num_tokens": len(want),
            "perplexity": pytest.approx(math.exp(-want.mean()), rel=1e-4),
            "bits_per_byte": pytest.approx(-want.sum() / math.log(2) / len(text.encode()), abs=1e-4),
        }


def test_lists_are_those_of_transformers(llm: LLM, oracle: Oracle) -> None:
    found = scores(llm, TEXTS[0], top=3)
    ids = llm.tokenizer.encode(TEXTS[0], add_special_tokens=False)
    rows = oracle(ids)[:-1]
    best = np.argsort(-rows, axis=1)[:, :3]
    assert found["token_ids"].tolist() == ids[1:]
    assert found["token_logprobs"] == pytest.approx(logprobs(oracle, ids), abs=1e-4)
    assert found["top_ids"].tolist() == best.tolist()
    assert found["top_logprobs"] == pytest.approx(np.take_along_axis(rows, best, axis=1), abs=1e-4)


def test_top_0_lists_the_tokens_alone(llm: LLM) -> None:
    found = scores(llm, TEXTS[0], top=0)
    assert found["token_logprobs"].sum() == pytest.approx(found["logprob"], abs=1e-4)
    assert "top_ids" not in found


@pytest.mark.parametrize(
    ("adds", "bos", "first"), [(False, "auto", []), (True, "auto", [1]), (True, "never", []), (False, "always", [1])]
)
def test_with_bos_the_first_token_is_scored(
    model_dir: Path, tmp_path: Path, oracle: Oracle, adds: bool, bos: str, first: list[int]
) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    file = tmp_path / "model/tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"add_bos_token": adds}))
    llm = LLM(str(tmp_path / "model"), device="cpu", dtype="float32", num_threads=1)
    want = logprobs(oracle, first + llm.tokenizer.encode("Hello there", add_special_tokens=False))
    found = scores(llm, "Hello there", bos=bos, top=0)
    assert found["token_logprobs"] == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("stride", [1, 50, CONTEXT - 1])
def test_long_texts_are_scored_by_windows(llm: LLM, oracle: Oracle, stride: int) -> None:
    ids = llm.tokenizer.encode(LONG, add_special_tokens=False)
    assert len(ids) > 2 * CONTEXT
    # The loop of Hugging Face's guide to perplexity.
    want = np.empty(0)
    before = 1
    for begin in range(0, len(ids), stride):
        end = min(begin + CONTEXT, len(ids))
        want = np.append(want, logprobs(oracle, ids[begin:end], before - begin))
        before = end
        if end == len(ids):
            break
    found = scores(llm, LONG, stride=stride, top=0)
    assert found["token_ids"].tolist() == ids[1:]
    assert found["token_logprobs"] == pytest.approx(want, abs=1e-4)


def test_a_stride_changes_no_short_text(llm: LLM) -> None:
    assert scores(llm, TEXTS[0], stride=5) == scores(llm, TEXTS[0])


def test_rows_that_cannot_be_scored_say_why(llm: LLM) -> None:
    assert "tokens or more, the context 128; a stride" in error(llm, {"text": LONG})
    assert error(llm, {"text": ""}) == "text is empty"
    assert error(llm, {"other": "a"}) == "text is missing, not a text"
    assert error(llm, {"text": None}) == "text is missing, not a text"
    assert error(llm, {"text": ["a"]}) == "text is of type list, not a text"
    assert "lone surrogate" in error(llm, {"text": "a b \ud800"})
    assert "single token" in error(llm, {"text": "a"})
    assert "logprob" in scores(llm, "a", bos="always")


def test_settings_that_cannot_be_are_errors_before_anything_is_computed(llm: LLM) -> None:
    for settings, words in (
        ({"stride": CONTEXT}, "stride must be below the context of 128"),
        ({"top": 21}, "lists up to 20"),
        ({"top": "5"}, "top"),
        ({"bos": "yes"}, "bos must be one of"),
        ({"mode": "reply", "stride": 5}, "stride belongs to mode text"),
        ({"mode": "replies"}, "mode must be one of"),
        ({"dtype": "float32"}, "dtype: with an `llm`"),
    ):
        with pytest.raises(ConfigError, match=words):
            score_dataset([], llm=llm, **settings)
    with pytest.raises(ConfigError, match="no_such"):
        score_dataset([], no_such=1)
