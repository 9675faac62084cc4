"""Metrics, and what the log says: counts that agree with what was asked, and lines that name the request."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as families

from neper.config import ServerConfig
from neper.engine.interface import EngineStats
from neper.server.activity import activity_line, log_activity
from neper.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL, Client, running, until
from tests.server.test_errors import CHAT, COMPLETIONS
from tests.server.test_failures import body

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\bneper_\w+")


def samples(client: Client, text: str | None = None) -> dict[tuple[str, ...], float]:
    """Every value, by its name and then its labels' values."""
    text = client.http.get("/metrics").text if text is None else text
    return {
        (sample.name, *[value for name, value in sorted(sample.labels.items()) if name != "model_name"]): sample.value
        for family in families(text)
        for sample in family.samples
    }


def test_the_engine_s_counts(tokenizer: Tokenizer) -> None:
    fields = EngineStats.__struct_fields__
    stats = EngineStats(**{name: 100 + place for place, name in enumerate(fields)})
    with running(tokenizer, ServerConfig()) as client:
        client.engine.stats = lambda: stats  # type: ignore[method-assign]
        reply = client.http.get("/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=")
        found = samples(client, reply.text)
        for name, value in {
            "neper_requests_running": stats.running,
            "neper_requests_waiting": stats.waiting,
            "neper_cache_blocks": stats.total_blocks,
            "neper_cache_blocks_free": stats.free_blocks,
            "neper_prompt_tokens_total": stats.prompt_tokens,
            "neper_generated_tokens_total": stats.generated_tokens,
            "neper_engine_restarts_total": stats.restarts,
            "neper_device_to_host_bytes_total": stats.d2h_bytes,
            "neper_scored_rows_total": stats.scored_rows,
        }.items():
            assert found[(name,)] == value
        values = sorted(found.values())
        assert set(range(100, 100 + len(fields))) <= set(values), "a field of EngineStats has no metric"
        assert found[("neper_engine_up",)] == 1
        client.engine.alive = False
        assert samples(client)[("neper_engine_up",)] == 0
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        newer = client.http.get("/metrics", headers=accept)
        assert newer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert len(list(open_metrics(newer.text))) > len(fields)


def test_requests_are_counted_by_route_and_status(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig()) as client:
        client.say("the quick brown fox")
        client.engine.delay = 0.01
        assert ("neper_time_to_first_token_seconds_count", COMPLETIONS) not in samples(client)
        for stream in (False, True, True):
            assert client.http.post(COMPLETIONS, json=body(COMPLETIONS, stream=stream)).status_code == 200
        client.http.post(COMPLETIONS, json={"prompt": 5})
        client.http.get("/v1/models/a/b")
        for path in ("/a", "/b", "/c"):
            client.http.get(path)
        client.engine.fail_after = 2
        client.http.post(CHAT, json=body(CHAT, stream=True))
        until(lambda: client.server.service.num_requests == 0)
        found = samples(client)
        assert found[("neper_http_requests_total", COMPLETIONS, "200")] == 3
        assert found[("neper_http_requests_total", COMPLETIONS, "400")] == 1
        assert found[("neper_http_requests_total", "/v1/models/{name:path}", "404")] == 1
        assert found[("neper_http_requests_total", "other", "404")] == 3
        assert found[("neper_request_errors_total", "engine_error")] == 1
        assert found[("neper_request_errors_total", "invalid_value")] == 1
        assert found[("neper_http_request_duration_seconds_count", COMPLETIONS)] == 4
        assert found[("neper_time_to_first_token_seconds_count", COMPLETIONS)] == 3
        first = found[("neper_time_to_first_token_seconds_sum", COMPLETIONS)]
        assert 0.03 <= first < found[("neper_http_request_duration_seconds_sum", COMPLETIONS)] - 0.03
        assert found[("neper_http_requests_in_progress",)] == 0


def test_case_109_times_and_lengths_of_choices(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig()) as client:
        ids = client.say("the quick brown fox")
        client.engine.delay = 0.01
        client.engine.queue_seconds = 0.005
        client.http.post(COMPLETIONS, json=body(COMPLETIONS, n=2))
        client.engine.fail_after = 2
        client.http.post(COMPLETIONS, json=body(COMPLETIONS))
        client.engine.fail_after, client.engine.hang_after = None, 0
        with pytest.raises(httpx.ReadTimeout):
            client.http.post(COMPLETIONS, json=body(COMPLETIONS), timeout=0.2)
        until(lambda: client.server.service.num_choices == 0)
        found = samples(client)
        reasons = {key[1]: value for key, value in found.items() if key[0] == "neper_request_success_total"}
        assert reasons == {"stop": 2, "error": 1, "abort": 1}
        steps = len(client.engine.streams[0].request.prompt_token_ids)
        assert found[("neper_request_prompt_tokens_sum",)] == 4 * steps
        assert found[("neper_request_generation_tokens_sum",)] == 2 * (len(ids) + 1) + 2
        tokens = client.engine.streams[0].emitted
        between = ("neper_inter_token_latency_seconds_count",)
        assert found[between] == 2 * (tokens - 1) + 1  # and of the one that failed, after its second
        for name in ("queue", "prefill", "decode"):
            assert found[(f"neper_request_{name}_time_seconds_count",)] == 3
        assert found[("neper_request_queue_time_seconds_sum",)] == pytest.approx(0.015)
        decode = found[("neper_request_decode_time_seconds_sum",)]
        assert decode == pytest.approx(found[("neper_inter_token_latency_seconds_sum",)])
        assert decode >= 0.01 * found[between]
        assert found[("neper_inter_token_latency_seconds_bucket", "+Inf")] == found[between]


def test_case_109_every_metric_names_the_model_and_is_documented(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig()) as client:
        client.say("the quick brown fox")
        client.http.post(COMPLETIONS, json=body(COMPLETIONS))
        client.http.post(COMPLETIONS, json={})
        client.engine.stats = lambda: EngineStats(total_blocks=8, free_blocks=2)  # type: ignore[method-assign]
        found = list(families(client.http.get("/metrics").text))
    assert {sample.labels["model_name"] for family in found for sample in family.samples} == {MODEL}
    names = {sample.name for family in found for sample in family.samples}
    ratio = next(family for family in found if family.name == "neper_kv_cache_usage_ratio")
    assert [sample.value for sample in ratio.samples] == [0.75]
    table = (ROOT / "docs/api.md").read_text()
    told = {family.name.removesuffix("_created") for family in found}
    assert not {name for name in told if f"`{name}`" not in table and f"`{name}_total`" not in table}
    board = json.loads((ROOT / "deploy/grafana.json").read_text())
    asked = {name for panel in board["panels"] for target in panel["targets"] for name in NAME.findall(target["expr"])}
    assert asked
    assert not asked - names


def test_what_is_in_progress(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig()) as client:
        client.say("Hello")
        client.engine.hang_after = 1
        with client.http.stream("POST", CHAT, json=body(CHAT, n=3, stream=True)):
            found = samples(client)
            assert found[("neper_http_requests_in_progress",)] == 1
            assert found[("neper_choices_in_progress",)] == 3
        until(lambda: client.server.service.num_choices == 0)
        until(lambda: ("neper_http_requests_total", CHAT, "200") in samples(client))
        client.engine.hang_after = 0
        with pytest.raises(httpx.ReadTimeout):
            client.http.post(CHAT, json=body(CHAT), timeout=0.2)
        until(lambda: samples(client).get(("neper_http_requests_total", CHAT, "499")) == 1)


def test_a_line_a_request_at_debug(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    with running(tokenizer, ServerConfig()) as client, caplog.at_level(logging.DEBUG, logger="neper"):
        ids = client.say("the quick brown fox")
        for stream in (False, True):
            name = {"x-request-id": f"mine-{stream}"}
            reply = client.http.post(COMPLETIONS, json=body(COMPLETIONS, stream=stream), headers=name)
            assert reply.headers["x-request-id"] == name["x-request-id"]
        prompt = len(client.tokenizer.encode("Hello"))
        for stream in (False, True):
            pattern = (
                rf"request mine-{stream}: POST /v1/completions, status 200, "
                rf"{prompt} prompt and {len(ids) + 1} generated tokens, \d+\.\d+ s"
            )
            # Written when the reply has gone out.
            until(lambda pattern=pattern: any(re.fullmatch(pattern, line) for line in caplog.messages))


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_s_error_is_logged_with_the_request_s_id(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    with running(tokenizer, ServerConfig()) as client, caplog.at_level(logging.INFO, logger="neper"):
        client.say("the quick brown fox")
        client.engine.fail_after = 2
        client.http.post(CHAT, json=body(CHAT, stream=stream), headers={"x-request-id": "mine"})
        client.http.post(CHAT, json={"messages": 5}, headers={"x-request-id": "wrong"})
        until(lambda: caplog.messages)
        assert caplog.messages == ["request mine ended with an error: a row was NaN"]


def test_what_the_engine_did_between_two_moments() -> None:
    before = EngineStats(prompt_tokens=100, generated_tokens=50, total_blocks=200, free_blocks=200)
    after = EngineStats(prompt_tokens=300, generated_tokens=75, total_blocks=200, free_blocks=150, running=3, waiting=1)
    assert activity_line(before, after, 10.0) == (
        "prompts 20.0 tok/s, replies 2.5 tok/s, 3 running, 1 waiting, cache 25 % used"
    )
    assert activity_line(before, before, 10.0) is None
    assert activity_line(after, EngineStats(prompt_tokens=5), 10.0) is None  # started again meanwhile
    waiting = EngineStats(waiting=1)
    assert activity_line(waiting, waiting, 10.0) == "prompts 0.0 tok/s, replies 0.0 tok/s, 0 running, 1 waiting"


def test_the_line_comes_while_there_is_work(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    counts = [EngineStats(generated_tokens=n) for n in (0, 0, 7, 7, 7, 9)]

    def stats() -> EngineStats:
        return counts.pop(0) if len(counts) > 1 else counts[0]

    async def run() -> None:
        task = asyncio.create_task(log_activity(client.engine, 0.001))
        while len(counts) > 1:
            await asyncio.sleep(0.001)
        task.cancel()

    client.engine.stats = stats  # type: ignore[method-assign]
    try:
        with caplog.at_level(logging.INFO, logger="neper"):
            asyncio.run(run())
    finally:
        del client.engine.__dict__["stats"]
    assert len(caplog.messages) in (1, 2)  # the last one may be cut off
    assert all("0 running" in line for line in caplog.messages)
