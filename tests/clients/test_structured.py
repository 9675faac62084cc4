"""Structured output as each client asks for it: JSON of the schema, spelled by its own tokens."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from guidance import assistant, user
from guidance import json as json_gen
from guidance.models import OpenAI
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

from tests.clients.conftest import SMOLLM2
from tests.clients.contract import check_spelling, plain

QUESTION = "Is the sky blue? Answer with a verdict and a number of stars."


class Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid")

    verdict: Literal["yes", "no", "maybe"]
    stars: Literal[1, 2, 3, 4, 5]


@pytest.mark.parametrize("stream", [False, True])
def test_openai_parse(smollm2_url: str, stream: bool) -> None:
    body: Any = {
        "model": SMOLLM2,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 64,
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": Verdict,
    }
    with openai.OpenAI(base_url=smollm2_url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        if stream:
            with client.chat.completions.stream(**body) as events:
                [choice] = events.get_final_completion().choices
        else:
            [choice] = client.chat.completions.parse(**body).choices
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    check_verdict(choice.message.content, choice.message.parsed, plain(choice.logprobs.content))


def test_langchain_with_structured_output(smollm2_url: str) -> None:
    model = ChatOpenAI(
        model=SMOLLM2,
        base_url=smollm2_url + "/v1",
        api_key="none",
        temperature=0,
        max_tokens=64,
        logprobs=True,
        top_logprobs=2,
        max_retries=0,
    )
    reply: Any = model.with_structured_output(Verdict, method="json_schema", include_raw=True).invoke(QUESTION)
    assert reply["parsing_error"] is None
    entries = plain(reply["raw"].response_metadata["logprobs"]["content"])
    check_verdict(reply["raw"].content, reply["parsed"], entries)


def check_verdict(content: str | None, parsed: Any, entries: list[dict[str, Any]]) -> None:
    assert content is not None
    assert Verdict.model_validate_json(content) == parsed
    check_spelling(content, entries, 2)


def test_guidance_json(smollm2_url: str) -> None:
    model: Any = OpenAI(SMOLLM2, api_key="none", base_url=smollm2_url + "/v1", echo=False)
    with user():
        model += QUESTION
    with assistant():
        model += json_gen("verdict", schema=Verdict, max_tokens=64)
    Verdict.model_validate_json(model["verdict"])
