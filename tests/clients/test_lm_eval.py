"""lm-evaluation-harness: its local-completions model against ours, held to its own hf model on the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from tests.clients.conftest import TINY
from tests.clients.reference import Reference

TOLERANCE = 1e-3
CONTEXTS = [
    "the quick brown", "Hello, world!", "What is the answer?", "naïve café", "日本語の", "😀🚀", "and then the dog",
    "The answer is", "jumps over", "sleeps in the sun", "Hello there.", "forty-two.", "lazy dog and", "the lazy",
    "brown fox", "quick", "中文文本、", "한국어", "Ünïcödé", "over the lazy dog", "in the", "fox jumps", "What", "is",
]  # fmt: skip
WINDOW = 40  # tokens; the longer of the texts below take several


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, reference: Reference) -> list[dict[str, Any]]:
    """A multiple choice whose first choice is the model's own next token wherever that survives tokenisation, a
    perplexity over texts of one and of several windows, and a generation."""
    directory = tmp_path_factory.mktemp("tasks")
    choices = []
    for i, context in enumerate(CONTEXTS):
        ids = reference.ids(context)
        own = reference.tokenizer.decode([int(reference.logprobs(ids)[-1].argmax())])
        first = own if len(reference.ids(context + own)) == len(ids) + 1 else " fox"
        choices.append({"context": context, "choices": [first, " the dog", ", and then", "日本"], "label": i % 4})
    texts = [{"text": " ".join(CONTEXTS[:count])} for count in (1, 3, 9, 24)]
    common = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0}
    return [
        common
        | {
            "task": "choice",
            "output_type": "multiple_choice",
            "dataset_kwargs": {"data_files": {"test": written(directory / "choice.json", choices)}},
            "doc_to_text": "{{context}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "label",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        },
        common
        | {
            "task": "perplexity",
            "output_type": "loglikelihood_rolling",
            "dataset_kwargs": {"data_files": {"test": written(directory / "texts.json", texts)}},
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
        },
        common
        | {
            "task": "generation",
            "output_type": "generate_until",
            "dataset_kwargs": {"data_files": {"test": written(directory / "contexts.json", choices[:8])}},
            "doc_to_text": "{{context}}",
            "doc_to_target": "",
            "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 12, "do_sample": False, "temperature": 0},
            "metric_list": [{"metric": "exact_match"}],
        },
    ]


def written(path: Path, documents: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return str(path)


def evaluated(model: str, arguments: dict[str, Any], tasks: list[dict[str, Any]], batch_size: int) -> dict[str, Any]:
    results: Any = simple_evaluate(
        model,
        model_args=arguments,
        tasks=json.loads(json.dumps(tasks)),  # it changes what it is given
        task_manager=TaskManager(include_defaults=False),
        batch_size=batch_size,
        device="cpu",
        bootstrap_iters=0,
    )
    return dict(results)


@pytest.fixture(scope="module")
def expected(tasks: list[dict[str, Any]], tiny_dir: Path) -> dict[str, Any]:
    arguments = {"pretrained": str(tiny_dir), "dtype": "float32", "max_length": WINDOW}
    return evaluated("hf", arguments, tasks, 1)


def responses(results: dict[str, Any], task: str) -> list[Any]:
    """What the model said of each request, in the documents' order."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [response for sample in samples for [response] in sample["resps"]]


@pytest.mark.parametrize(
    ("batch_size", "others"),
    [
        (1, {"num_concurrent": 1}),
        (4, {"num_concurrent": 1}),
        (1, {"num_concurrent": 8}),
        (1, {"num_concurrent": 1, "tokenizer_backend": "remote"}),
    ],
    ids=["one", "batch", "concurrent", "remote-tokenizer"],
)
def test_scores_are_those_of_the_hf_model(
    tiny_url: str,
    tiny_dir: Path,
    tasks: list[dict[str, Any]],
    expected: dict[str, Any],
    batch_size: int,
    others: dict[str, Any],
) -> None:
    arguments = {
        "model": TINY,
        "base_url": tiny_url + "/v1/completions",
        "max_length": WINDOW + 2,  # it takes two off: one for the token that it must ask for, one for the context
        "max_retries": 1,
        **others,
    }
    if "tokenizer_backend" not in others:
        arguments |= {"tokenizer": str(tiny_dir), "tokenizer_backend": "huggingface"}
    got = evaluated("local-completions", arguments, tasks, batch_size)

    wanted, scored = responses(expected, "choice"), responses(got, "choice")
    assert len(wanted) == 4 * len(CONTEXTS)
    assert [is_greedy for _, is_greedy in scored] == [is_greedy for _, is_greedy in wanted]
    assert sum(is_greedy for _, is_greedy in wanted) >= 4
    for (value, _), (want, _) in zip(scored, wanted, strict=True):
        assert abs(value - want) < TOLERANCE
    for value, want in zip(responses(got, "perplexity"), responses(expected, "perplexity"), strict=True):
        assert abs(value - want) < TOLERANCE * max(1, abs(want) / 100)
    assert responses(got, "generation") == responses(expected, "generation")
    assert got["results"]["choice"]["acc,none"] == expected["results"]["choice"]["acc,none"]
    for metric in ("word_perplexity,none", "byte_perplexity,none"):
        want = expected["results"]["perplexity"][metric]
        assert got["results"]["perplexity"][metric] == pytest.approx(want, rel=1e-4)


class CandidatesModel(LM):
    """Multiple choice over `/v1/candidates`: the choices of a document are one request.

    Attributes:
        boundaries: kinds of the cuts between documents and choices, in their order.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self.boundaries: list[str] = []
        self._http = httpx.Client(base_url=url, timeout=120)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        return list(self._scores(requests))

    def _scores(self, requests: list[Any]) -> Iterator[tuple[float, bool]]:
        for context, group in groupby((request.args for request in requests), key=lambda pair: pair[0]):
            choices = [choice for _, choice in group]
            body = {"model": TINY, "prompt": context, "candidates": choices}
            reply = self._http.post("/v1/candidates", json=body).raise_for_status().json()
            self.boundaries.append(reply["boundary"]["kind"])
            yield from ((candidate["logprob"], False) for candidate in reply["candidates"])

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Any]) -> list[str]:
        raise NotImplementedError


def test_candidates_choose_as_the_hf_model(
    tiny_url: str, tasks: list[dict[str, Any]], expected: dict[str, Any]
) -> None:
    model = CandidatesModel(tiny_url)
    results: Any = simple_evaluate(
        model,
        tasks=json.loads(json.dumps(tasks[:1])),
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    wanted, scored = responses(expected, "choice"), responses(dict(results), "choice")
    assert len(model.boundaries) == len(CONTEXTS)
    assert model.boundaries.count("clean") >= len(CONTEXTS) - 4
    for place, ((value, _), (want, _)) in enumerate(zip(scored, wanted, strict=True)):
        if model.boundaries[place // 4] == "clean":  # else its totals include the end of the context
            assert abs(value - want) < TOLERANCE
    assert results["results"]["choice"]["acc,none"] == expected["results"]["choice"]["acc,none"]
