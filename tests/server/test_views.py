"""The three views: which one a request gets, and that every number of a reply is of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from neper.types import LOGPROBS_MODES, LogprobsMode, SamplingParams
from tests.helpers.scripted_engine import scores, top
from tests.helpers.scripted_engine import view as scripted_view
from tests.server.conftest import VOCAB_SIZE, Client
from tests.server.test_errors import CHAT, COMPLETIONS, check
from tests.server.test_named_ids import FIXED, reply_to, set_capabilities

RAW, TEMPERED, PROCESSED = LOGPROBS_MODES


def defined(mode: str, row: np.ndarray, temperature: float, bias: dict[int, float], top_k: int) -> np.ndarray:
    """[V] log-probabilities in a view, by its definition."""
    wide = row.astype(np.float64)
    if mode == PROCESSED:
        for token_id, value in bias.items():
            wide[token_id] += value
    if mode != RAW and temperature:
        wide = wide / temperature
        if mode == PROCESSED and top_k:
            left = top(wide, top_k)
            wide[np.setdiff1d(np.arange(len(wide)), left)] = -np.inf
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 0},
    {"temperature": 2.0, "logit_bias": {"40": 12.0}},
    {"temperature": 0.5, "top_k": 4},
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_every_number_is_of_the_view(client: Client, path: str, mode: LogprobsMode, sampling: dict[str, Any]) -> None:
    set_capabilities(client, logprobs_modes=LOGPROBS_MODES)
    ids = client.say([70, 71, 72])
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 5} if path == CHAT else {"logprobs": 5}
    options: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True, "max_tokens": 3}
    choice = reply_to(client, path, **wanted, **options, **sampling, logprobs_mode=mode)
    request = client.engine.submitted[-1]
    assert request.logprobs.mode == mode
    bias = {int(key): value for key, value in sampling.get("logit_bias", {}).items()}
    for place, token_id in enumerate(ids):
        row = scores(len(request.prompt_token_ids) + place, token_id, VOCAB_SIZE)
        expected = defined(mode, row, sampling["temperature"], bias, sampling.get("top_k", 0))
        own = pytest.approx(max(expected[token_id], -9999.0), abs=2e-5)
        assert choice["token_logprobs"][place] == own
        tops = {f"token_id:{i}": pytest.approx(expected[i], abs=2e-5) for i in top(expected, 5)}
        if path == CHAT:
            entry = choice["logprobs"]["content"][place]
            assert entry["logprob"] == own
            assert {e["token"]: e["logprob"] for e in entry["top_logprobs"]} == tops
        else:
            assert choice["logprobs"]["token_logprobs"][place] == own
            assert choice["logprobs"]["top_logprobs"][place] == tops | {f"token_id:{token_id}": own}


@pytest.mark.parametrize("mode", [TEMPERED, PROCESSED])
@pytest.mark.parametrize(
    ("path", "wanted", "param"),
    [
        (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 0, "logprobs": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 1, "max_tokens": 0}, "prompt_logprobs"),
        (COMPLETIONS, {"echo": True, "logprobs": 1, "stream": True}, "echo"),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, "echo"),
    ],
)
def test_case_107_a_view_of_a_prompt_is_refused_by_name(
    client: Client, path: str, wanted: dict[str, Any], param: str, mode: str
) -> None:
    """Scores of a prompt are raw: a request that names another view is not answered with those."""
    set_capabilities(client, logprobs_modes=LOGPROBS_MODES)
    response = client.post(path, **FIXED[path], **wanted, logprobs_mode=mode)
    check(response, 400, "logprobs_mode", "unsupported")
    assert param in response.json()["error"]["message"]
    assert client.engine.submitted == []
    # Neither is one refused that names the view which they are of, nor one whose prompt is not scored.
    assert client.post(path, **FIXED[path], **wanted, logprobs_mode=RAW).status_code == 200
    unscored = wanted | {"echo": False, "prompt_logprobs": None}
    assert client.post(path, **FIXED[path] | unscored, logprobs_mode=mode).status_code == 200


def test_case_107_a_servers_own_view_is_of_generated_tokens(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    set_capabilities(client, logprobs_modes=LOGPROBS_MODES)
    client.say([70])
    service = client.server.service
    body: dict[str, Any] = {
        "prompt": "correct horse battery staple",
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "top_k": 1,
        "temperature": 0.3,
        "logit_bias": {"40": 50},
        "max_tokens": 1,
    }
    choices = []
    for mode in LOGPROBS_MODES:
        monkeypatch.setattr(service, "config", replace(service.config, logprobs_mode=mode))
        choices.append(client.complete(**body)["choices"][0])
    plain, *others = choices
    count = len(client.tokenizer.encode(body["prompt"]))
    for other in others:
        assert other["prompt_logprobs"] == plain["prompt_logprobs"]
        for name in ("token_logprobs", "top_logprobs"):
            assert other["logprobs"][name][:count] == plain["logprobs"][name][:count]
        assert other["logprobs"]["token_logprobs"][count] != plain["logprobs"]["token_logprobs"][count]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_modes_that_cannot_be(client: Client, path: str) -> None:
    for value in ("other", "", "processed_logits", 5, True, [RAW]):
        for logprobs in (None, 1):
            check(client.post(path, **FIXED[path], logprobs=logprobs, logprobs_mode=value), 400, "logprobs_mode")
    # The scripted engine gives the raw view alone, unless told otherwise.
    for logprobs in (None, 1):
        response = client.post(path, **FIXED[path], logprobs=logprobs, logprobs_mode=PROCESSED)
        check(response, 400, "logprobs_mode", "unsupported")
    assert client.engine.submitted == []
    assert reply_to(client, path, logprobs_mode=RAW)["logprobs"] is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_server_has_a_view_of_its_own(client: Client, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_capabilities(client, logprobs_modes=LOGPROBS_MODES)
    service = client.server.service
    monkeypatch.setattr(service, "config", replace(service.config, logprobs_mode=PROCESSED))
    for given, expected in (({}, PROCESSED), ({"logprobs_mode": None}, PROCESSED), ({"logprobs_mode": RAW}, RAW)):
        reply_to(client, path, logprobs=1, **given)
        assert client.engine.submitted[-1].logprobs.mode == expected


def test_views_of_an_allowed_set(client: Client) -> None:
    """A set renormalises every view, and temperature counts within it."""
    set_capabilities(client, logprobs_modes=LOGPROBS_MODES)
    client.engine.reply = lambda request: [70]
    allowed = [70, 71, 300]
    sampling = SamplingParams(temperature=0.5, allowed_token_ids=tuple(allowed))
    for mode in LOGPROBS_MODES:
        choice = reply_to(
            client,
            COMPLETIONS,
            logprobs=0,
            max_tokens=1,
            temperature=0.5,
            allowed_token_ids=allowed,
            logprobs_mode=mode,
            return_tokens_as_token_ids=True,
        )
        row = scores(1, 70, VOCAB_SIZE)[allowed].astype(np.float64)
        row = row if mode == RAW else row / 0.5
        expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
        found = choice["logprobs"]["top_logprobs"][0]
        assert [found[f"token_id:{i}"] for i in allowed] == pytest.approx(expected, abs=2e-5)
        assert scripted_view(mode, scores(1, 70, VOCAB_SIZE), sampling)[allowed] == pytest.approx(expected, abs=2e-5)
