"""What goes wrong while a request runs: the client leaves, the engine fails, time or room runs out."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from neper.config import ServerConfig
from neper.text.tokenizer import Tokenizer
from neper.types import Fault, PackedRows, Request
from tests.server.conftest import MODEL, Client, running, until
from tests.server.test_errors import CHAT, COMPLETIONS, MESSAGES, check


def body(path: str, **options: Any) -> dict[str, Any]:
    fixed: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hello"}
    return {"model": MODEL, **fixed, **options}


def test_a_client_that_leaves_mid_stream(client: Client) -> None:
    client.say("word " * 30)
    client.engine.delay = 0.01
    for path in (CHAT, COMPLETIONS):
        with client.http.stream("POST", path, json=body(path, stream=True, n=2, max_tokens=90)) as response:
            lines = response.iter_lines()
            while '"logprobs"' not in next(lines):
                pass
        streams = client.engine.streams[-2:]
        emitted = [stream.emitted for stream in streams]
        until(lambda streams=streams: all(stream.closed for stream in streams))
        assert all(stream.emitted <= before + 2 for stream, before in zip(streams, emitted, strict=True))
        until(lambda: client.server.service.num_choices == 0)
    client.engine.delay = None
    assert client.complete("x")["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_the_engine_is_silent(client: Client, stream: bool) -> None:
    client.say("Hello")
    client.engine.hang_after = 0
    with pytest.raises(httpx.ReadTimeout):
        client.http.post(CHAT, json=body(CHAT, stream=stream), timeout=0.2)
    until(lambda: all(stream.closed for stream in client.engine.streams))
    assert len(client.engine.streams) == 1
    until(lambda: client.server.service.num_choices == 0)


def test_a_client_that_does_not_read(client: Client) -> None:
    """The stream waits for it without holding up others, and ends when it leaves."""
    client.engine.reply = lambda request: [300] * 100
    client.engine.delay = 0.0005
    options = body(COMPLETIONS, stream=True, max_tokens=100, logprobs=20, n=16)
    with client.http.stream("POST", COMPLETIONS, json=options):
        assert client.post(CHAT, messages=MESSAGES, max_tokens=2).status_code == 200
    until(lambda: client.server.service.num_choices == 0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("after", [0, 2])
def test_the_engine_fails_a_request(client: Client, path: str, after: int) -> None:
    client.say("the quick brown fox")
    client.engine.fail_after = after
    message = check(client.http.post(path, json=body(path)), 500, None, "engine_error")
    assert "NaN" in message
    response = client.http.post(path, json=body(path, stream=True, logprobs=1))
    assert response.status_code == 200
    *events, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    *chunks, error = [json.loads(event.removeprefix("data: ")) for event in events]
    assert error["error"]["code"] == "engine_error"
    assert error.keys() == {"error"}
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["error"]
    assert len(reasons) > after
    client.engine.fail_after = None
    assert client.http.post(path, json=body(path)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_112_a_request_that_cannot_be_followed_is_a_400(client: Client, path: str) -> None:
    """A grammar that took too much, say. Nobody should send it again, as they do after a 500."""
    client.say("the quick brown fox")
    client.engine.fail_after, client.engine.fault = 1, Fault.REQUEST
    assert "NaN" in check(client.http.post(path, json=body(path)), 400, None, "invalid_value")
    events = client.http.post(path, json=body(path, stream=True)).text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "invalid_value"
    client.engine.fail_after = None
    assert client.http.post(path, json=body(path)).status_code == 200


def test_the_sdk_sees_an_error_in_a_stream(client: Client) -> None:
    client.say("the quick brown fox")
    client.engine.fail_after = 2
    messages: Any = MESSAGES
    with (
        pytest.raises(openai.APIError, match="NaN"),
        client.sdk.chat.completions.create(model=MODEL, messages=messages, stream=True) as stream,
    ):
        list(stream)


@pytest.mark.parametrize("stream", [False, True])
def test_one_failed_choice_fails_the_request_and_closes_the_others(client: Client, stream: bool) -> None:
    client.say("the quick brown fox and then the lazy dog")
    client.engine.delay = 0.005
    client.engine.fail_after = 3
    client.engine.affects = lambda request: request.request_id.endswith("-1")
    response = client.http.post(COMPLETIONS, json=body(COMPLETIONS, n=3, stream=stream))
    if stream:
        chunks = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2]]
        ends = {c["index"]: c["finish_reason"] for chunk in chunks[:-1] for c in chunk["choices"] if c["finish_reason"]}
        assert ends == {0: "error", 1: "error", 2: "error"}
        assert "error" in chunks[-1]
    else:
        check(response, 500, None, "engine_error")
    assert all(stream.closed and stream.emitted <= 5 for stream in client.engine.streams)


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_dies(client: Client, stream: bool) -> None:
    client.say("the quick brown fox")
    client.engine.die_after = 1
    response = client.http.post(COMPLETIONS, json=body(COMPLETIONS, stream=stream))
    if stream:
        assert '"code":"engine_dead"' in response.text
    else:
        check(response, 500, None, "engine_dead")
    check(client.http.get("/health"), 503, None, "overloaded")
    refused = client.http.post(COMPLETIONS, json=body(COMPLETIONS))
    check(refused, 503, None, "overloaded")
    assert int(refused.headers["retry-after"]) > 0
    client.engine.alive, client.engine.die_after = True, None
    assert client.http.get("/health").json() == {"status": "ok"}
    client.complete()


def test_the_engine_s_queue_is_full(client: Client) -> None:
    client.engine.overloaded = True
    for stream in (False, True):
        response = client.http.post(CHAT, json=body(CHAT, n=2, stream=stream))
        check(response, 503, None, "overloaded")
        assert response.headers["retry-after"] == "1"


def test_submit_fails_half_way(client: Client) -> None:
    client.say("Hello")
    engine = client.engine
    submit = type(engine).submit

    def once(request: Request) -> Any:
        if len(engine.submitted) == 2:
            raise openai.OpenAIError("a bug")
        return submit(engine, request)

    engine.submit = once  # type: ignore[method-assign]
    try:
        response = client.http.post(CHAT, json=body(CHAT, n=3))
        check(response, 500, None, None)
        assert "a bug" not in response.text
        assert [stream.closed for stream in engine.streams] == [True, True]
    finally:
        del engine.__dict__["submit"]


def test_a_number_that_is_none(client: Client) -> None:
    """A row the engine should not have passed on: an error, never a number."""
    client.say("Hello there")
    client.engine.garble = lambda packed: PackedRows.pack(packed.token_ids, np.full(len(packed), np.nan))
    for path in (CHAT, COMPLETIONS):
        response = client.http.post(path, json=body(path, logprobs=0))
        check(response, 500, None, None)
        response = client.http.post(path, json=body(path, logprobs=0, stream=True))
        assert "NaN" not in response.text
        assert '"error"' in response.text


def test_scores_that_are_not_what_was_asked_for(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.say("Hello there")
    client.engine.garble = lambda packed: PackedRows.pack(packed.token_ids, np.full(len(packed), -1.0))
    check(client.http.post(CHAT, json=body(CHAT, logprobs=True, top_logprobs=3)), 500, None, "engine_error")
    client.engine.garble = lambda packed: PackedRows.pack(packed.token_ids)
    check(client.http.post(CHAT, json=body(CHAT, logprobs=True)), 500, None, "engine_error")
    chunks = client.engine.chunks
    monkeypatch.setattr(client.engine, "chunks", lambda request: chunks(request)[1:])
    response = client.http.post(COMPLETIONS, json=body(COMPLETIONS, prompt="Hello there", echo=True, logprobs=1))
    check(response, 500, None, "engine_error")


def test_bugs_are_logged_and_not_shown(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Request) -> list[int]:
        raise ZeroDivisionError("secret detail")

    client.engine.reply = broken
    with caplog.at_level(logging.ERROR, logger="neper"):
        response = client.http.post(CHAT, json=body(CHAT))
    check(response, 500, None, None)
    assert "secret" not in response.text
    assert any(record.exc_info for record in caplog.records)


def test_draining(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig()) as client:
        client.say("the quick brown fox")
        client.engine.delay = 0.02
        service = client.server.service
        replies: list[httpx.Response] = []
        running_request = threading.Thread(target=lambda: replies.append(client.http.post(CHAT, json=body(CHAT))))
        running_request.start()
        until(lambda: service.num_choices == 1)
        client.server.call(service.drain)
        response = client.http.post(CHAT, json=body(CHAT))
        check(response, 503, None, "overloaded")
        assert response.headers["retry-after"]
        check(client.http.get("/health"), 503, None, "overloaded")
        until(lambda: service.num_choices == 0)
        running_request.join()
        assert replies[0].status_code == 200


def test_stopping_ends_what_does_not_end(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig()) as client:
        client.say("Hello there")
        client.engine.hang_after = 1
        with client.http.stream("POST", CHAT, json=body(CHAT, stream=True)) as response:
            service = client.server.service
            client.server.call(service.drain)
            assert service.num_choices == 1
            client.server.call(service.close_all)
            response.read()
            assert "the server was stopped" in response.text
        assert client.engine.streams[0].closed


@pytest.mark.parametrize(
    ("path", "method", "body"),
    [
        ("/v1/chat/completions", "apply_chat_template", {"messages": [{"role": "user", "content": "x" * 20_000}]}),
        ("/v1/completions", "encode", {"prompt": "x" * 20_000}),
        ("/tokenize", "encode", {"prompt": "x" * 20_000}),
        ("/detokenize", "decode_bytes", {"tokens": [5] * 20_000}),
    ],
    ids=str,
)
def test_long_work_on_texts_does_not_hold_up_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, method: str, body: dict[str, Any]
) -> None:
    threads = []
    plain = getattr(Tokenizer, method)

    def noted(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        return plain(*args, **kwargs)

    monkeypatch.setattr(Tokenizer, method, noted)
    loop_thread = client.server.call(threading.get_ident)
    client.post(path, **body)
    assert threads
    assert loop_thread not in threads
