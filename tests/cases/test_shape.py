"""Cases 17 to 23: the shape of logprobs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases.conftest import CHAT, COMPLETIONS, RealServer
from tests.helpers.chat_replies import joined
from tests.helpers.invariants import Json, check_reply
from tests.server.conftest import Client
from tests.server.test_errors import check
from tests.server.test_responses import INCLUDE, events, respond
from tests.server.test_responses import fold as fold_response

ENTRY = {"token", "logprob", "bytes", "top_logprobs"}
ITEM = {"token", "logprob", "bytes"}


@pytest.mark.parametrize("stream", [False, True])
def test_case_17_and_101_zero_is_the_sampled_token_alone(tiny: RealServer, stream: bool) -> None:
    for echo in (False, True):
        for n in (1, 3):
            body: Json = {"logprobs": 0, "echo": echo, "n": n, "max_tokens": 5, "seed": 1, "stream": stream}
            for choice in tiny.full(COMPLETIONS, **body, return_token_ids=True)["choices"]:
                arrays = choice["logprobs"]
                pairs = zip(arrays["tokens"], arrays["token_logprobs"], strict=True)
                alone = [{token: value} for token, value in pairs]
                assert arrays["top_logprobs"] == ([None, *alone[1:]] if echo else alone)
                ids = [*(choice["prompt_token_ids"] if echo else ()), *choice["token_ids"]]
                assert len(arrays["tokens"]) == len(arrays["token_logprobs"]) == len(arrays["text_offset"]) == len(ids)
                assert all(value < 0 for value in arrays["token_logprobs"][int(echo) :])
    off = tiny.full(COMPLETIONS, max_tokens=2, stream=stream)
    assert off["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", [{}, {"top_logprobs": None}, {"top_logprobs": 0}], ids=str)
def test_case_18_logprobs_without_alternatives(tiny: RealServer, given: Json, stream: bool) -> None:
    body: Json = {"logprobs": True, **given, "max_tokens": 6, "seed": 3, "stream": stream}
    tiny.full(CHAT, **body)  # equal bits are of equally warm caches
    reply = tiny.full(CHAT, **body)
    check_reply("chat", body, reply)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert entries
    assert [entry["top_logprobs"] for entry in entries] == [[]] * len(entries)
    integer = tiny.full(CHAT, **{**body, "logprobs": 0})
    assert integer["choices"][0]["logprobs"]["content"] == entries


@pytest.mark.parametrize("stream", [False, True])
def test_case_19_the_true_top_k(tiny: RealServer, stream: bool) -> None:
    """Against transformers: whether the sampled token is among them or not."""
    outside = 0
    for k in (1, 5, 20):
        for seed in range(4):
            fixed: Json = {"max_tokens": 6, "seed": seed, "temperature": 1.5, "stream": stream, "ignore_eos": True}
            body: Json = {**fixed, "return_token_ids": True, "return_tokens_as_token_ids": True}
            prompt = tiny.ids("the answer is")
            legacy = tiny.choice(COMPLETIONS, **body, prompt=prompt, logprobs=k)
            rows = tiny.logprobs([*prompt, *legacy["token_ids"]])[len(prompt) - 1 :]
            for place, best in enumerate(legacy["logprobs"]["top_logprobs"]):
                own = legacy["token_ids"][place]
                check_top(rows[place], {int(key.removeprefix("token_id:")): v for key, v in best.items()}, k, own)
            chat = tiny.full(CHAT, **body, skip_special_tokens=False, logprobs=True, top_logprobs=k)
            check_reply("chat", {**body, "logprobs": True, "top_logprobs": k}, chat)
            [choice] = chat["choices"]
            ids = choice["token_ids"]
            prompt = chat["prompt_token_ids"]
            rows = tiny.logprobs([*prompt, *ids])[len(prompt) - 1 :]
            for place, entry in enumerate(choice["logprobs"]["content"]):
                found = {int(i["token"].removeprefix("token_id:")): i["logprob"] for i in entry["top_logprobs"]}
                assert len(found) == k
                check_top(rows[place], found, k, None)
                outside += ids[place] not in found
    assert outside > 5


def check_top(row: torch.Tensor, found: dict[int, float], k: int, besides: int | None) -> None:
    expected = {int(i): float(row[i]) for i in row.topk(k).indices}
    if besides is not None:
        expected[besides] = float(row[besides])
    assert found == pytest.approx(expected, abs=1e-4)


WRONG: list[tuple[Json, str]] = [
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": None, "top_logprobs": 0}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    *[({"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in ("5", 21, -1, True, 1.0, [], {})],
    *[({"logprobs": value}, "logprobs") for value in ("5", 21, -1, 1.0, [], "true")],
    ({"logprobs": 3, "top_logprobs": 4}, "top_logprobs"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param"), WRONG, ids=str)
def test_case_21_what_is_no_number_of_alternatives(tiny: RealServer, body: Json, param: str, stream: bool) -> None:
    assert param in check(tiny.post(CHAT, **body, stream=stream), 400, param)


@pytest.mark.parametrize("value", ["5", 21, -1, True, 1.0, []])
def test_case_21_in_completions(tiny: RealServer, value: Any) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        message = check(tiny.post(COMPLETIONS, **{name: value}), 400, name)
        assert "20" in message or value not in (21, -1)
    check(tiny.post(COMPLETIONS, logprobs=1, top_logprobs=1), 400, "top_logprobs")


def test_case_22_the_keys_that_the_schema_requires(tiny: RealServer) -> None:
    """Against the SDK's types: test_schemas."""
    # A stream that says nothing has no chunk of logprobs, and its finish chunk carries none.
    asked: Json = {"logprobs": True, "top_logprobs": 2, "min_tokens": 1, "max_tokens": 5}
    for stream in (False, True):
        for n in (1, 2):
            for choice in tiny.full(CHAT, **asked, n=n, stream=stream)["choices"]:
                assert choice["logprobs"].keys() >= {"content", "refusal"}
                assert not choice["logprobs"].keys() & {"tokens", "token_logprobs", "text_offset"}
                for entry in choice["logprobs"]["content"]:
                    assert entry.keys() == ENTRY
                    assert isinstance(entry["bytes"], list)
                    assert [item.keys() for item in entry["top_logprobs"]] == [ITEM, ITEM]
    # Also where nothing was said.
    silent = tiny.choice(CHAT, logprobs=True, allowed_token_ids=[2])
    assert silent["logprobs"]["content"] == []
    assert silent["logprobs"]["refusal"] is None
    assert silent["message"] == {"role": "assistant", "content": "", "refusal": None, "reasoning_content": None}


def test_case_23_responses_have_the_entries_on_part_delta_and_done(scripted: Client) -> None:
    text = "the answer is 日本語 😀"
    scripted.say(text)
    chat = scripted.chat(logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    [item] = respond(scripted, **INCLUDE)["output"]
    [part] = item["content"]
    assert part["text"] == text
    assert part["logprobs"] == chat
    streamed = events(scripted, **INCLUDE)
    assert fold_response(streamed)["output"][0]["content"] == [part]
    deltas = [event for event in streamed if event["type"] == "response.output_text.delta"]
    for event in deltas:
        assert joined(event["logprobs"])[0] == event["delta"]
        assert all(entry["top_logprobs"] for entry in event["logprobs"])
    # Done events may leave bytes out, by the API's types.
    [done] = [event for event in streamed if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == [entry for event in deltas for entry in event["logprobs"]]
    # Not asked for: none.
    [plain] = respond(scripted)["output"]
    assert plain["content"][0]["logprobs"] == []
