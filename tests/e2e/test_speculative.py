"""`neper serve --speculative ngram` against a server without: the openai client gets the same replies from both."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from neper.models.source import ModelSource
from tests.cli.serving import ServerProcess

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = "smollm2-135m"
LIST = "1. red apple\n2. green pear\n3. blue plum\n4. red cherry\n5. green lime\n"
CODE = "def area(width, height):\n    return width * height\n\nprint(area(3, 4))\n"
# What a reply says twice, what it copies, and what it draws.
REQUESTS: list[dict[str, Any]] = [
    {"prompt": f"{LIST}\n{LIST}\n1. red", "temperature": 0},
    {"prompt": f"{LIST}\n{LIST}\n1. red", "temperature": 0, "stop": ["lime", "cherry"]},
    {"prompt": f"{LIST}\n1. red", "temperature": 0.7, "seed": 5, "n": 2, "frequency_penalty": 0.5},
    {"prompt": f"{CODE}\n{CODE}\ndef", "temperature": 1.0, "seed": 7, "top_p": 0.9},
    {"prompt": "Repeat: [1, 2, 1, 2, 1, 2]\n", "structured_outputs": {"regex": "\\[(1, 2, )+3\\]"}, "temperature": 0},
    {"prompt": f"{LIST}\n{LIST}", "echo": True, "temperature": 0, "min_tokens": 4, "logit_bias": {"28": -2}},
]


@pytest.fixture(scope="module")
def clients(smollm2: ModelSource) -> Iterator[list[openai.OpenAI]]:
    """Of a server without drafts, and of one with them."""
    fixed = (MODEL, "--dtype", "float32", "--max-model-len", "1024")
    with ServerProcess(*fixed) as plain, ServerProcess(*fixed, "--speculative", "ngram") as drafting:
        urls = [server.wait_ready().url for server in (plain, drafting)]
        made = [openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300) for url in urls]
        yield made
        for client in made:
            client.close()


def complete(client: openai.OpenAI, fields: dict[str, Any], *, stream: bool) -> tuple[list[dict[str, Any]], Any]:
    """The choices, a stream's folded, and the usage."""
    own = {"extra_body": {name: fields[name] for name in ("structured_outputs", "min_tokens") if name in fields}}
    asked = {"model": MODEL, "max_tokens": 40, "logprobs": 3} | {
        k: v for k, v in fields.items() if k not in own["extra_body"]
    }
    if not stream:
        reply = client.completions.create(**asked, **own)
        return [choice.model_dump() for choice in reply.choices], reply.usage
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in client.completions.create(**asked, **own, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in (choice.model_dump() for choice in chunk.choices):
            whole = choices.setdefault(choice["index"], {"text": "", "logprobs": {}})
            whole["text"] += choice["text"]
            whole["finish_reason"] = choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"].setdefault(name, []).extend(values)
    return [choices[index] for index in sorted(choices)], usage


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert (got["text"], got["finish_reason"]) == (want["text"], want["finish_reason"])
    for name in ("tokens", "text_offset"):
        assert got["logprobs"][name] == want["logprobs"][name]
    assert got["logprobs"]["token_logprobs"] == pytest.approx(want["logprobs"]["token_logprobs"], abs=1e-4)
    for mine, other in zip(got["logprobs"]["top_logprobs"], want["logprobs"]["top_logprobs"], strict=True):
        assert mine == (None if other is None else pytest.approx(other, abs=1e-4))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_once", [1, 8])
def test_case_50_replies_are_those_without_drafts(clients: list[openai.OpenAI], stream: bool, at_once: int) -> None:
    plain, drafting = clients
    asked = (REQUESTS * 2)[:8] if at_once > 1 else REQUESTS
    with ThreadPoolExecutor(at_once) as pool:
        got = list(pool.map(lambda fields: complete(drafting, fields, stream=stream), asked))
    accepted = 0
    for fields, (choices, usage) in zip(asked, got, strict=True):
        wanted, want_usage = complete(plain, fields, stream=False)
        for mine, other in zip(choices, wanted, strict=True):
            same(mine, other)
        assert usage.completion_tokens == want_usage.completion_tokens
        assert want_usage.completion_tokens_details is None
        accepted += usage.completion_tokens_details.accepted_prediction_tokens
        assert 0 <= usage.completion_tokens_details.accepted_prediction_tokens < usage.completion_tokens
    assert accepted > 20


def test_a_prediction_comes_at_once(clients: list[openai.OpenAI]) -> None:
    plain, drafting = clients
    fixed: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Name three colours."}]}
    fixed |= {"temperature": 0, "max_tokens": 30}
    text = plain.chat.completions.create(**fixed).choices[0].message.content
    prediction: Any = {"type": "content", "content": text}
    with pytest.raises(openai.BadRequestError, match="--speculative"):
        plain.chat.completions.create(**fixed, prediction=prediction)
    reply = drafting.chat.completions.create(**fixed, prediction=prediction)
    assert reply.choices[0].message.content == text
    assert reply.usage is not None
    details = reply.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.accepted_prediction_tokens > 0.6 * reply.usage.completion_tokens
    response = drafting.responses.create(model=MODEL, input="Name three colours.", temperature=0, max_output_tokens=30)
    assert response.usage is not None
    assert response.usage.output_tokens_details.to_dict().keys() == {
        "reasoning_tokens",
        "accepted_prediction_tokens",
        "rejected_prediction_tokens",
    }
    wrong = drafting.chat.completions.create(**fixed, prediction={"type": "content", "content": "Nothing of it."})
    assert wrong.choices[0].message.content == text
