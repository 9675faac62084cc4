"""Mode reply, beside transformers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from neper import LLM, ScoredRow, score_dataset
from tests.score.conftest import Oracle

MESSAGES = [{"role": "user", "content": "What is the answer?"}]


def score(llm: LLM, values: dict[str, Any], **settings: Any) -> ScoredRow:
    [scored] = score_dataset([values], "reply", llm=llm, **settings)
    return scored


@pytest.mark.parametrize("end", [False, True])
def test_values_are_those_of_transformers_after_the_prompt(llm: LLM, oracle: Oracle, end: bool) -> None:
    prompt = llm.tokenizer.encode("<|im_start|>user\nWhat is the answer?<|im_end|>\n<|im_start|>assistant\n")
    reply = llm.tokenizer.encode("The answer is forty-two.") + ([2] if end else [])
    rows = oracle(prompt + reply)[len(prompt) - 1 : -1]
    want = np.array([row[token_id] for row, token_id in zip(rows, reply, strict=True)])
    values = {"messages": MESSAGES, "reply": "The answer is forty-two."}
    found = score(llm, values, score_end=end, top=2).scores
    assert found is not None
    assert found["token_ids"].tolist() == reply
    assert found["token_logprobs"] == pytest.approx(want, abs=1e-4)
    assert found["logprob"] == pytest.approx(want.sum(), abs=1e-4)
    assert found["num_tokens"] == len(reply)
    assert found["top_ids"].tolist() == np.argsort(-rows, axis=1)[:, :2].tolist()


def test_replies_of_ids_and_messages_of_json_are_the_same(llm: LLM) -> None:
    want = score(llm, {"messages": MESSAGES, "reply": "The answer"}).scores
    ids = llm.tokenizer.encode("The answer")
    found = score(llm, {"messages": json.dumps([{**MESSAGES[0], "name": None}]), "reply": ids}).scores
    assert want is not None
    assert found is not None
    assert found["token_ids"].tolist() == ids
    assert found["logprob"] == pytest.approx(want["logprob"], abs=1e-5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"messages": MESSAGES}, "reply is missing"),
        ({"messages": MESSAGES, "reply": ""}, "reply is empty"),
        ({"messages": MESSAGES, "reply": [True]}, "list of token ids"),
        ({"messages": MESSAGES, "reply": [1, 384]}, "outside the vocabulary"),
        ({"messages": MESSAGES, "reply": [-1]}, "outside the vocabulary"),
        ({"messages": MESSAGES, "reply": "word " * 200}, "the model's context 128"),
        ({"messages": [], "reply": "a"}, "not a list of messages"),
        ({"messages": "[", "reply": "a"}, "no JSON"),
        ({"messages": "[" * 5000, "reply": "a"}, "no JSON"),
        ({"messages": [{"content": "x"}], "reply": "a"}, "role"),
        ({"messages": [{"role": "user", "content": 5}], "reply": "a"}, "content must be"),
        ({"reply": "a"}, "messages is missing"),
    ],
)
def test_rows_that_cannot_be_scored_say_why(llm: LLM, values: dict[str, Any], words: str) -> None:
    scored = score(llm, values)
    assert scored.scores is None
    assert words in str(scored.error)
