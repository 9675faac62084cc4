"""TRL's client of a vLLM server: what a trainer generates from, with ids and logprobs, by completions and by chat.

Weights cannot be sent to this server (`init_communicator` and what follows it): it has none of the routes for that.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from trl.generation import vllm_client

from tests.clients.conftest import TINY
from tests.clients.reference import TOLERANCE, Reference

CONTENT = "the quick brown fox"
PROMPTS = [CONTENT, "Hello, world! Hello"]


@pytest.fixture
def trl(tiny_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)  # the package, of which HTTP needs nothing
    client = vllm_client.VLLMClient(tiny_url)
    assert client.model == TINY
    yield client
    client.session.close()


def check(reference: Reference, output: dict[str, Any], n: int, top: int, *, hidden: tuple[int, ...] = ()) -> None:
    """The ids of each completion, with the model's values of them and of `top` others; `hidden` ids have none."""
    columns = (output[name] for name in ("completion_ids", "logprobs", "logprob_token_ids"))
    for place, (ids, values, listed) in enumerate(zip(*columns, strict=True)):
        prompt = output["prompt_ids"][place // n]
        rows = reference.logprobs(prompt + ids)[len(prompt) - 1 : -1]
        shown = [(token_id, row) for token_id, row in zip(ids, rows, strict=True) if token_id not in hidden]
        for (token_id, row), position, others in zip(shown, values, listed, strict=True):
            assert token_id in others
            assert max(1, top) <= len(others) == len(set(others)) == len(position) <= top + 1
            assert set(row.topk(top).indices.tolist()) <= set(others)
            for other, value in zip(others, position, strict=True):
                assert abs(value - row[other].item()) < TOLERANCE


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("as_ids", [False, True])
def test_generate(trl: Any, reference: Reference, as_ids: bool, top: int) -> None:
    prompts: Any = [reference.ids(text) for text in PROMPTS] if as_ids else PROMPTS
    output = trl.generate(prompts, n=4, max_tokens=8, logprobs=top)
    assert output["prompt_ids"] == [reference.ids(text) for text in PROMPTS]
    assert len(output["completion_ids"]) == 8
    check(reference, output, 4, top)


def test_generate_without_logprobs_and_by_a_form(trl: Any, reference: Reference) -> None:
    output = trl.generate(PROMPTS, logprobs=None, structured_outputs_regex="[0-9]{4}", generation_kwargs={"seed": 5})
    assert (output["logprobs"], output["logprob_token_ids"]) == (None, None)
    for ids in output["completion_ids"]:
        assert re.fullmatch("[0-9]{4}", reference.tokenizer.decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize("top", [0, 3])
def test_chat(trl: Any, reference: Reference, top: int) -> None:
    """Chat's entries spell the content, so control tokens, the end's among them, have an id and no entry."""
    contents = [f"{CONTENT} {i}" for i in range(8)]
    output = trl.chat([[{"role": "user", "content": content}] for content in contents], n=2, max_tokens=8, logprobs=top)
    assert output["prompt_ids"] == [reference.chat_ids(content) for content in contents]
    assert len(output["completion_ids"]) == 16
    check(reference, output, 2, top, hidden=tuple(reference.tokenizer.all_special_ids))


def test_chat_with_a_python_function(trl: Any, reference: Reference) -> None:
    """Described by transformers, with its `return`. The client says `tool_choice` none: calls are content."""

    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: The city.
        """
        return city

    output = trl.chat([[{"role": "user", "content": CONTENT}]], tools=[get_weather])
    check(reference, output, 1, 0, hidden=tuple(reference.tokenizer.all_special_ids))


@pytest.mark.parametrize("chunk_size", [0, 1])
def test_scores_of_sequences(trl: Any, reference: Reference, chunk_size: int) -> None:
    """A teacher's. The client's own 100 alternatives need `--max-logprobs 100`, as with vLLM."""
    sequences, lengths = [reference.ids(text) for text in PROMPTS], [3, 2]
    output = trl.get_sequence_logprobs(sequences, lengths, top_logprobs=20, chunk_size=chunk_size)
    for ids, length, actual, listed in zip(
        sequences, lengths, output["actual_logprobs"], output["logprob_token_ids"], strict=True
    ):
        rows = reference.logprobs(ids)[length - 1 : -1]
        assert len(actual) == len(listed) == len(ids) - length
        for token_id, [value], others, row in zip(ids[length:], actual, listed, rows, strict=True):
            assert others == row.topk(20).indices.tolist()
            assert math.isfinite(value)
            assert abs(value - row[token_id].item()) < TOLERANCE
