"""A model's own prediction layer: its drafts are those of layers of transformers, and what cannot serve is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from neper import LLM, SamplingParams
from neper.engine.draft.depth import Depth
from neper.engine.draft.mtp import MtpDrafter
from neper.engine.plan.sequence import Sequence
from neper.errors import StartupError
from tests.helpers.prediction_layer import NEXTN, QWEN, PredictionLayer

FIXED: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_model_len": 128}


@pytest.mark.parametrize(
    ("architecture", "names", "tied"), [("qwen3", QWEN, True), ("llama", NEXTN, False), ("qwen2", QWEN, False)]
)
def test_drafts_are_those_of_the_layer_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, names: Mapping[str, str], tied: bool
) -> None:
    reference = PredictionLayer(tmp_path, architecture, names, tied=tied)
    monkeypatch.setattr(Depth, "wanted", 3)
    plain = LLM(str(tmp_path), **FIXED)
    # Prompts in pieces, and fewer places than requests.
    llm = LLM(str(tmp_path), **FIXED, speculative="mtp", draft_tokens=3, max_num_batched_tokens=8, max_num_seqs=3)
    seen: list[tuple[list[int], list[int]]] = []
    propose = MtpDrafter.propose

    def recorded(self: MtpDrafter, wanted: Mapping[Sequence, int]) -> Mapping[Sequence, Any]:
        drafts = propose(self, wanted)
        seen.extend((list(seq.token_ids), list(tokens)) for seq, tokens in drafts.items())
        return drafts

    monkeypatch.setattr(MtpDrafter, "propose", recorded)
    texts = ["the quick brown fox", "Hello", "What is the answer? The answer is", "dog dog dog dog"]
    asked = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    drafting, alone = (each.generate(texts, asked) for each in (llm, plain))
    assert [reply.token_ids for reply in drafting] == [reply.token_ids for reply in alone]
    assert len(seen) > 12
    for token_ids, drafts in seen:
        assert drafts == reference.drafts(token_ids, len(drafts))


def test_a_model_with_a_prediction_layer_serves_without_it(tmp_path: Path) -> None:
    reference = PredictionLayer(tmp_path, "llama", NEXTN)
    [reply] = LLM(str(tmp_path), **FIXED).generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=1))
    with torch.inference_mode():
        assert reply.token_ids == [int(reference.model(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax())]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("mtp.fc.weight"), r"no multi-token-prediction layer .*--speculative ngram"),
        (lambda weights: weights.pop("mtp.norm.weight"), r"missing: mtp\.norm\.weight"),
        (lambda weights: weights.update({"mtp.layers.0.mlp.experts.0.w": torch.ones(1)}), r"unknown: mtp\.layers\.0"),
        (lambda weights: weights.update({"mtp.layers.1.x": torch.ones(1)}), r"several .*mtp\.layers\.1"),
        (lambda weights: weights.update({"mtp.norm.weight": torch.ones(1)}), r"mtp\.norm\.weight is \[1\]"),
        (lambda weights: weights.update({"mtp.norm.weight": torch.ones(64, dtype=torch.int8)}), r"torch\.int8"),
    ],
    ids=["none", "missing", "experts", "several", "shape", "dtype"],
)
def test_a_layer_that_cannot_serve_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    path = PredictionLayer(tmp_path, "llama", QWEN).path
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    with pytest.raises(StartupError, match=message):
        LLM(str(tmp_path), speculative="mtp", **FIXED)
