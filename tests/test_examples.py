"""The blocks of docs/examples.md, run as they stand: only the server's address is put in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.serving import ServerProcess

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = re.findall(r"^## (.*?)$.*?```python\n(.*?)```", (DOCS / "examples.md").read_text(), re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.model, pytest.mark.slow]


def run(title: str, url: str = "") -> dict[str, Any]:
    """The names that a block leaves."""
    source = dict(BLOCKS)[title].replace("http://127.0.0.1:8000", url or "http://127.0.0.1:8000")
    names: dict[str, Any] = {}
    exec(compile(source, title, "exec"), names)
    return names


def test_classification() -> None:
    names = run("Classify texts without training")
    llm, labels, prior = names["llm"], names["LABELS"], names["prior"]
    text = next(iter(names["REVIEWS"]))
    prompt = f"{text}\nThis product is"
    start = len(llm.tokenizer.encode(prompt)) - 1
    totals = [float(scores[start:].sum()) for scores in llm.score([prompt + label for label in labels])]
    expected = np.exp(totals) / np.exp(totals).sum()
    assert names["before"][text] == pytest.approx(expected.tolist(), abs=1e-4)
    odds = expected / prior
    assert names["after"][text] == pytest.approx((odds / odds.sum()).tolist(), abs=1e-4)
    # What the text under the block says.
    assert prior[0] == pytest.approx(0.71, abs=0.01)
    scores = [names["brier"](names[name]) for name in ("before", "after")]
    assert scores == pytest.approx([0.110, 0.068], abs=0.002)
    right = [
        sum((names[name][text][0] > 0.5) == (label == labels[0]) for text, label in names["REVIEWS"].items())
        for name in ("before", "after")
    ]
    assert right == [6, 8]


def test_extraction() -> None:
    with ServerProcess() as server:
        names = run("Confidence of the fields of an extraction", server.wait_ready().url)
    fields, content = names["fields"], names["reply"].choices[0].logprobs.content
    assert set(fields) == {"", "/product", "/sentiment", "/recommends"}
    for pointer, field in fields.items():
        total = sum(entry.logprob for entry in content[field["start"] : field["end"]])
        assert field["logprob"] == pytest.approx(total), pointer
    assert [choice["value"] for choice in fields["/recommends"]["choices"]] == [True, False]
    assert set(names["unsure"]) <= set(fields)


def test_distillation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run("Distil from a teacher")
    rows = [reply.prompt_logprobs for reply in names["scored"]]
    assert np.array_equal(names["top_ids"], np.concatenate([one.top_ids for one in rows]))
    assert np.array_equal(names["top_logprobs"], np.concatenate([one.top_logprobs for one in rows]))
    own = names["probabilities"] / names["probabilities"].sum(1, keepdims=True)
    assert names["loss"](np.log(own)) <= names["loss"](names["top_logprobs"])
