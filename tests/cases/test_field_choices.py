"""Choices of fields from a real engine, whose numbers transformers computes anew."""

from __future__ import annotations

import json
import math

import pytest

from tests.cases.conftest import CHAT, RealServer
from tests.helpers.invariants import Json

SCHEMA: Json = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "mood": {"enum": ["glad", "", "é"]}},
    "required": ["sure", "mood"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_choices_are_what_the_model_thinks_of_each(tiny: RealServer, seed: int) -> None:
    choice = tiny.choice(
        CHAT,
        messages=[{"role": "user", "content": "Hello"}],
        chat_template_kwargs={"enable_thinking": False},
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        logprobs=True,
        field_logprobs=True,
        return_token_ids=True,
        seed=seed,
        max_tokens=400,
    )
    prompt = tiny.full(CHAT, messages=[{"role": "user", "content": "Hello"}], max_tokens=1, return_token_ids=True,
                       chat_template_kwargs={"enable_thinking": False})["prompt_token_ids"]  # fmt: skip
    content, entries = choice["message"]["content"], choice["logprobs"]["content"]
    ends = [sum(len(entry["bytes"]) for entry in entries[: place + 1]) for place in range(len(entries))]
    value = json.loads(content)
    for name, choices in (("sure", [True, False]), ("mood", ["glad", "", "é"])):
        field = choice["logprobs"]["fields"][f"/{name}"]
        own = json.dumps(value[name], ensure_ascii=False)
        start = content.index(own, content.index(f'"{name}"') + len(name) + 2)
        begin = ends[field["start"] - 1]
        before = content.encode()[begin : len(content[:start].encode())].decode()
        after = content.encode()[len(content[: start + len(own)].encode()) : ends[field["end"] - 1]].decode()
        totals = []
        for one in choices:
            ids = tiny.ids(before + json.dumps(one, ensure_ascii=False) + after)
            context = [*prompt, *choice["token_ids"][: field["start"]]]
            logprobs = tiny.logprobs([*context, *ids])
            totals.append(sum(float(logprobs[len(context) - 1 + place, i]) for place, i in enumerate(ids)))
        assert [one["value"] for one in field["choices"]] == choices
        assert [one["logprob"] for one in field["choices"]] == pytest.approx(totals, abs=1e-3)
        shares = [math.exp(total - max(totals)) for total in totals]
        assert [one["probability"] for one in field["choices"]] == pytest.approx(
            [share / sum(shares) for share in shares], abs=1e-3
        )
