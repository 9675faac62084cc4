"""Candidates over HTTP: what is asked of the engine, what is told, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from neper.config import ServerConfig
from neper.errors import ConfigError
from neper.text.tokenizer import Tokenizer
from neper.types import MAX_CANDIDATES, Fault
from tests.helpers.scripted_engine import candidate_logprobs
from tests.server.conftest import END, MODEL, VOCAB_SIZE, Client, running, until

PATH = "/v1/candidates"
PROMPT = "the quick brown"


def score(client: Client, candidates: list[Any], **body: Any) -> dict[str, Any]:
    if "messages" not in body:
        body.setdefault("prompt", PROMPT)
    response = client.post(PATH, candidates=candidates, **body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def refused(client: Client, param: str | None, code: str = "invalid_value", **body: Any) -> str:
    body = {"prompt": PROMPT, "candidates": ["a"], **body}
    response = client.post(PATH, **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error
    return str(error["message"])


def test_a_reply(client: Client) -> None:
    client.engine.num_cached_tokens = 2
    given = [" fox", " dog sleeps", [70, 71, 72], " fox"]
    reply = score(client, given, return_tokens=True, stream=False, user="someone")
    ids = client.tokenizer.encode(PROMPT)
    [request] = client.engine.submitted
    assert request.prompt_token_ids == ids
    wholes = [client.tokenizer.encode(PROMPT + text) for text in given if isinstance(text, str)]
    assert [[*ids, *candidate] for candidate in request.candidates] == [*wholes[:2], [*ids, 70, 71, 72], wholes[2]]
    assert reply["boundary"] == {"kind": "clean", "position": len(ids), "text": ""}
    assert reply["normalized_over"] == "vocabulary"
    assert (reply["object"], reply["model"], reply["prompt_tokens"]) == ("candidates", MODEL, len(ids))
    total = len(ids) + sum(map(len, request.candidates))
    assert reply["usage"] == {
        "prompt_tokens": total,
        "completion_tokens": 0,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert [shown["text"] for shown in reply["candidates"]] == [
        " fox",
        " dog sleeps",
        client.tokenizer.spelled(given[2]),
        " fox",
    ]
    sums = []
    for shown, token_ids in zip(reply["candidates"], request.candidates, strict=True):
        values = candidate_logprobs(len(ids), token_ids, VOCAB_SIZE).astype(float)
        sums.append(float(values.sum()))
        assert shown["token_ids"] == list(token_ids)
        assert shown["logprob"] == pytest.approx(sums[-1])
        assert shown["mean_logprob"] == pytest.approx(sums[-1] / len(values))
        assert "".join(entry["token"] for entry in shown["logprobs"]) == shown["text"]
        assert [entry["logprob"] for entry in shown["logprobs"]] == pytest.approx(values.tolist())
        assert [entry["bytes"] for entry in shown["logprobs"]] == [
            list(client.tokenizer.token_bytes(token_id)) for token_id in token_ids
        ]
        assert all(entry["top_logprobs"] == [] for entry in shown["logprobs"])
    whole = math.fsum(map(math.exp, sums))
    assert [shown["probability"] for shown in reply["candidates"]] == pytest.approx([math.exp(s) / whole for s in sums])
    assert [shown["rank"] for shown in reply["candidates"]] == [1 + sum(other > s for other in sums) for s in sums]


def test_normalize(client: Client) -> None:
    given = [" fox", " dog sleeps in", "s"]
    plain = score(client, given)
    assert all("logprobs" not in shown for shown in plain["candidates"])
    assert score(client, given, normalize="sum")["candidates"] == plain["candidates"]
    by_mean = score(client, given, normalize="mean")["candidates"]
    means = [shown["mean_logprob"] for shown in by_mean]
    shares = np.exp(means) / np.exp(means).sum()
    assert [shown["probability"] for shown in by_mean] == pytest.approx(shares.tolist())
    assert [shown["rank"] for shown in by_mean] == [1 + sum(other > mean for other in means) for mean in means]
    own = score(client, given, normalize="none")["candidates"]
    assert [shown["probability"] for shown in own] == pytest.approx([math.exp(shown["logprob"]) for shown in own])
    assert "Invalid enum value" in refused(client, "normalize", normalize="max")


def test_a_merge_at_the_boundary_is_told(client: Client) -> None:
    prompt = "the quick bro"
    ids = client.tokenizer.encode(prompt)
    reply = score(client, ["wn", " dog"], prompt=prompt, return_tokens=True)
    boundary = reply["boundary"]
    assert boundary["kind"] == "merged"
    assert prompt.endswith(boundary["text"])
    assert boundary["position"] < len(ids) == reply["prompt_tokens"]
    assert client.engine.submitted[0].prompt_token_ids == ids[: boundary["position"]]
    for shown in reply["candidates"]:
        assert ids[: boundary["position"]] + shown["token_ids"] == client.tokenizer.encode(prompt + shown["text"])
        assert "".join(entry["token"] for entry in shown["logprobs"]) == boundary["text"] + shown["text"]


def test_messages(client: Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    start = client.tokenizer.apply_chat_template(messages)
    reply = score(client, ["Hello", "<|im_end|>", [END]], messages=messages)
    [request] = client.engine.submitted
    assert request.prompt_token_ids == start
    assert client.tokenizer.spelled(request.candidates[1]) == "<|im_end|>"
    assert END not in request.candidates[1]
    assert request.candidates[2] == (END,)
    assert reply["prompt_tokens"] == len(start)
    open_messages = [*messages, {"role": "assistant", "content": "So"}]
    score(client, [" it"], messages=open_messages, continue_final_message=True)
    assert client.tokenizer.spelled(client.engine.submitted[-1].prompt_token_ids).endswith("assistant\nSo")
    # In a prompt a control token is one.
    score(client, ["<|im_end|>"])
    assert client.engine.submitted[-1].candidates == ((END,),)


def test_minus_inf_counts_as_its_number(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([-1.0, -math.inf], np.float32)
    monkeypatch.setattr("tests.helpers.scripted_engine.candidate_logprobs", lambda *_: values)
    [shown] = score(client, [[5, 6]], return_tokens=True)["candidates"]
    assert (shown["logprob"], shown["mean_logprob"]) == (-10000.0, -5000.0)
    assert [entry["logprob"] for entry in shown["logprobs"]] == [-1.0, -9999.0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"candidates": []}, "candidates"),
        ({"candidates": ["a", ""]}, "candidates"),
        ({"candidates": ["a", []]}, "candidates"),
        ({"candidates": ["a", [VOCAB_SIZE]]}, "candidates"),
        ({"candidates": ["a", [-1]]}, "candidates"),
        ({"candidates": ["a", [True]]}, "candidates"),
        ({"candidates": ["a", 5]}, "candidates"),
        ({"candidates": ["a"] * 1001}, "candidates"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "t", "candidates": ["he"]}, "candidates"),
        ({"temperature": 0.5}, "temperature"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "x"}, "chat_template"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
    ],
    ids=str,
)
def test_what_is_refused(client: Client, body: dict[str, Any], param: str) -> None:
    refused(client, param, **body)
    assert client.engine.submitted == []


def test_views_other_than_the_raw_one(client: Client) -> None:
    score(client, ["a"], logprobs_mode="raw_logprobs")
    refused(client, "logprobs_mode", "unsupported", logprobs_mode="tempered_logprobs")


def test_a_candidate_beyond_the_context_is_named(client: Client) -> None:
    ids = list(range(10, 110))
    message = refused(client, "candidates", "context_length_exceeded", prompt=ids, candidates=[[5] * 28, [5] * 29, [5]])
    assert "candidates[1] has 29 tokens" in message
    assert "129" in message
    assert len(score(client, [[5] * 28, [5]], prompt=ids)["candidates"]) == 2


def test_bounds_of_the_configuration(tokenizer: Tokenizer) -> None:
    assert ServerConfig().max_candidates == MAX_CANDIDATES
    with pytest.raises(ConfigError, match="max_candidates"):
        ServerConfig(max_candidates=MAX_CANDIDATES + 1)
    with running(tokenizer, ServerConfig(max_candidates=3, max_listed=10)) as client:
        assert "--max-candidates" in refused(client, "candidates", candidates=["a"] * 4)
        assert "--max-listed" in refused(client, "candidates", candidates=[[5] * 5, [5] * 6])
        assert (
            len(
                score(
                    client,
                    [
                        [5] * 5,
                        [5] * 5,
                    ],
                )["candidates"]
            )
            == 2
        )


def test_a_thousand_candidates(client: Client) -> None:
    given = [[5, 6 + number % 300] for number in range(1000)]
    client.engine.candidates_per_chunk = 64
    reply = score(client, given, return_tokens=True)
    assert [shown["token_ids"] for shown in reply["candidates"]] == given
    assert sum(shown["probability"] for shown in reply["candidates"]) == pytest.approx(1.0)


@pytest.mark.parametrize(("fault", "status"), [(Fault.ENGINE, 500), (Fault.LOGITS, 500), (Fault.REQUEST, 400)])
def test_failures_of_the_engine(client: Client, fault: Fault, status: int) -> None:
    client.engine.fail_after, client.engine.fault = 1, fault
    response = client.post(PATH, prompt=PROMPT, candidates=[[n] for n in range(5, 15)])
    assert response.status_code == status
    client.engine.fail_after = None
    score(client, ["a"])


def test_a_client_that_leaves_ends_the_work(client: Client) -> None:
    client.engine.hang_after = 1
    with httpx.Client(base_url=client.server.url, timeout=0.5) as impatient, pytest.raises(httpx.ReadTimeout):
        impatient.post(PATH, json={"prompt": PROMPT, "candidates": [[n] for n in range(5, 15)]})
    until(lambda: client.engine.streams[0].closed)
    until(lambda: client.server.service.num_choices == 0)


def test_metrics(client: Client) -> None:
    score(client, [" fox", [5, 6]])
    text = client.http.get("/metrics").text
    assert 'endpoint="/v1/candidates"' in text


def over_lines(client: Client, **changes: Any) -> None:
    client.engine.capabilities = msgspec.structs.replace(client.engine.capabilities, candidates=False, **changes)


def test_an_engine_behind_lines_scores_single_tokens_among_each_other(client: Client) -> None:
    over_lines(client)
    client.engine.reply = lambda request: [min(request.sampling.allowed_token_ids)]
    reply = score(client, [[70], [71], [70], [90]])
    [request] = client.engine.submitted
    assert request.candidates == ()
    assert (request.sampling.allowed_token_ids, request.sampling.max_tokens) == ((70, 71, 90), 1)
    assert reply["normalized_over"] == "candidates"
    values = [shown["logprob"] for shown in reply["candidates"]]
    assert values[0] == values[2]
    assert sum(map(math.exp, [values[0], values[1], values[3]])) == pytest.approx(1.0, rel=1e-5)
    assert reply["usage"]["completion_tokens"] == 0
    message = refused(client, "candidates", "unsupported", candidates=[[70], [71, 72]])
    assert "candidates[1] has 2 tokens" in message
    over_lines(client, logprobs=False)
    refused(client, "candidates", "unsupported", candidates=[[70]])


def test_an_engine_that_turns_out_to_send_no_scores(client: Client) -> None:
    over_lines(client, logprobs=None)
    client.engine.reply = lambda request: [70]
    client.engine.garble = lambda rows: type(rows).pack(rows.token_ids)
    refused(client, "candidates", "unsupported", candidates=[[70]])


def test_the_openapi_document_has_it(client: Client) -> None:
    document = client.http.get("/openapi.json").json()
    assert "post" in document["paths"][PATH]
