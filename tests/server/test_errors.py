"""Requests that are refused: the status, the field that is named, the form of the body. Nothing reaches the engine."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from neper.config import ServerConfig
from neper.text.tokenizer import Tokenizer
from tests.server.conftest import CHAT_TEMPLATE, MODEL, VOCAB_SIZE, Client, running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


def check(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in response.text
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return str(error["message"])


def check_failed(response: httpx.Response, code: str, *, stream: bool) -> str:
    """The message of an error that came while the reply was made: of a 500, or of a stream's last event."""
    if not stream:
        return check(response, 500, None, code)
    assert response.status_code == 200, response.text
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    error = json.loads([event for event in data if event != "[DONE]"][-1])["error"]
    assert error["code"] == code
    return str(error["message"])


WRONG_ANYWHERE: list[tuple[str, Any]] = [
    *[(name, value) for name in ("temperature", "top_p", "min_p", "presence_penalty") for value in ("1", True, [], {})],
    *[("temperature", value) for value in (-0.1, 2.1)],
    *[("top_p", value) for value in (0, 1.1, -1)],
    *[("min_p", value) for value in (-0.1, 1.1)],
    *[("top_n_sigma", value) for value in (-0.1, 101, "1")],
    *[("top_k", value) for value in (-2, 1.0, "5", True, 2**64)],
    *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1)],
    *[("repetition_penalty", value) for value in (0, -1, 1e9)],
    *[("n", value) for value in (0, -1, 1.0, "2", True, 17, 10**30)],
    *[("seed", value) for value in (1.0, "5", True, 2**63, -(2**63) - 1)],
    *[("max_tokens", value) for value in (-1, 1.0, "5", True)],
    *[("min_tokens", value) for value in (-1, 1.0, "5", True, 129, 2**64)],
    *[("stop", value) for value in ("", [""], ["a", ""], 5, [5], ["x"] * 17, "x" * 1001)],
    *[("stop_token_ids", value) for value in (5, [-1], [10**30], [VOCAB_SIZE], ["5"], [1.0], [True], [2**40])],
    *[
        ("logit_bias", value)
        for value in ({"x": 1}, {"-1": 1}, {str(VOCAB_SIZE): 1}, {"5": 101}, {"5": -101}, {"5": "1"})
    ],
    *[
        ("logit_bias", value)
        for value in ([], {"5": True}, {"5": "1"}, {"1.0": 1}, {"9" * 30: 1}, {"": 1}, {"²": 1}, {"05": 1})
    ],
    *[(name, 10**30) for name in ("prompt_logprobs", "logprobs", "n", "seed", "temperature", "presence_penalty")],
    *[("stream", value) for value in (1, "true", 0)],
    *[("stream_options", value) for value in ({"include_usage": True}, 5, {"other": 1})],
    *[("prompt_logprobs", value) for value in (-1, 21, True, 1.0, "5")],
    *[("logprobs", value) for value in (-1, 21, 1.0, "5", [])],
    ("logprobs_mode", "other"),
    *[
        (name, value)
        for name in ("allowed_token_ids", "logprob_token_ids")
        for value in ([], 5, "5", [-1], [VOCAB_SIZE], [10**30], ["5"], [1.0], [True], [None], [[5]])
    ],
    *[("bad_words", value) for value in ("x", [""], [5], [["x"]], {})],
    ("return_token_ids", 1),
    ("ignore_eos", "yes"),
    ("metadata", "x"),
    ("user", 5),
    ("response_format", "text"),
    ("response_format", {}),
    ("unheard_of", 1),
    ("temprature", 1),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("param", "value"), WRONG_ANYWHERE, ids=str)
def test_wrong_values_name_their_field(client: Client, path: str, param: str, value: Any) -> None:
    fixed: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hello"}
    check(client.post(path, **fixed, **{param: value}), 400, param)
    assert client.engine.submitted == []


LATER_ANYWHERE: list[tuple[str, Any]] = [
    ("structured_outputs", {"structural_tag": {}}),
    ("store", True),
    ("stream_options", {"include_obfuscation": True}),
]
LATER_IN_CHAT: list[tuple[str, Any]] = [
    ("functions", [{}]),
    ("function_call", "auto"),
    ("modalities", ["text", "audio"]),
    ("audio", {}),
    ("web_search_options", {}),
    ("echo", True),
    ("messages", [{"role": "function", "name": "f", "content": "x"}]),
]


@pytest.mark.parametrize(
    ("path", "param", "value"),
    [
        *[(path, *case) for path in (CHAT, COMPLETIONS) for case in LATER_ANYWHERE],
        *[(CHAT, *case) for case in LATER_IN_CHAT],
        (COMPLETIONS, "suffix", "x"),
        (COMPLETIONS, "best_of", 2),
    ],
    ids=str,
)
def test_what_is_known_but_not_implemented(client: Client, path: str, param: str, value: Any) -> None:
    fixed: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hello"}
    check(client.post(path, **{**fixed, param: value}), 400, param, "unsupported")
    assert client.engine.submitted == []
    if param != "messages":
        assert client.post(path, **{**fixed, param: None}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *[({"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (21, -1, True, 1.0, "5", [1])],
        *[({"top_logprobs": value}, "top_logprobs") for value in (0, 5)],
        ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": 3, "top_logprobs": 5}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "mood": "sad"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "x", "refusal": "no"}]}]},
            "messages",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "Hello"}, "prompt"),
    ],
    ids=str,
)
def test_wrong_chats(client: Client, body: dict[str, Any], param: str) -> None:
    check(client.post(CHAT, **{"messages": MESSAGES, **body}), 400, param)
    assert client.engine.submitted == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *[({"prompt": value}, "prompt") for value in (None, "", [], [[]], [""], ["a", ""], 5, {}, True)],
        *[
            ({"prompt": value}, "prompt")
            for value in ([1, "a"], [[1], 2], [1.0], [True], [[1.0]], [["a"]], [[[1]]], [None])
        ],
        *[({"prompt": value}, "prompt") for value in ([-1], [VOCAB_SIZE], [[5], [VOCAB_SIZE]], [2**63])],
        ({"prompt": ["a"] * 17}, "n"),
        ({"prompt": ["a"] * 3, "n": 6}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"best_of": 0}, "best_of"),
        ({"messages": MESSAGES}, "messages"),
    ],
    ids=str,
)
def test_wrong_completions(client: Client, body: dict[str, Any], param: str) -> None:
    check(client.post(COMPLETIONS, **{"prompt": "Hello", **body}), 400, param)
    assert client.engine.submitted == []


def test_a_cap_names_both_numbers(client: Client) -> None:
    message = check(client.post(COMPLETIONS, prompt="x", logprobs=21), 400, "logprobs")
    assert {"21", "20"} <= set(re.findall(r"\d+", message))


def test_no_room_in_the_context(client: Client) -> None:
    for body in (
        {"prompt": [5] * 128},
        {"prompt": [5] * 129, "max_tokens": 0},
        {"prompt": [5] * 120, "max_tokens": 9},
        {"prompt": "a " * 20_000},
        {"prompt": [[5], [5] * 128]},
        {"prompt": [[5], [5] * 200], "max_tokens": 0, "echo": True},
    ):
        check(client.post(COMPLETIONS, **body), 400, None, "context_length_exceeded")
    for options in ({}, {"max_tokens": 1}):
        long = [{"role": "user", "content": "a " * 200}]
        check(client.post(CHAT, messages=long, **options), 400, None, "context_length_exceeded")
    check(client.post(CHAT, messages=MESSAGES, max_tokens=2**70), 400, None, "context_length_exceeded")
    assert client.engine.submitted == []
    assert client.complete([5] * 127, max_tokens=1)["usage"]["completion_tokens"] == 1


MALFORMED = {
    "nothing": b"",
    "cut": b"{",
    "list": b"[]",
    "string": b'"x"',
    "null": b"null",
    "trailing comma": b'{"model": "x",}',
    "NaN": b'{"model": NaN}',
    "not UTF-8": b'{"model": "\xff"}',
    "lone surrogate": b'{"model": "\\ud800"}',
    "deep": b'{"metadata": {"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}}",
    "form": b"model=x",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bodies(client: Client, name: str) -> None:
    for path in (CHAT, COMPLETIONS):
        response = client.http.post(path, content=MALFORMED[name], headers={"content-type": "application/json"})
        check(response, 400)


def test_bodies_that_are_no_json_or_too_large(client: Client) -> None:
    content = json.dumps({"prompt": "x"})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        check(client.http.post(COMPLETIONS, content=content, headers={"content-type": kind}), 400)
    with_charset = {"content-type": "application/json; charset=utf-8"}
    assert client.http.post(COMPLETIONS, content=content, headers=with_charset).status_code == 200
    check(client.post(COMPLETIONS, prompt="x" * 200_000), 413, None, "request_too_large")

    def parts() -> Any:
        for _ in range(20):
            yield b" " * 10_000

    chunked = client.http.post(COMPLETIONS, content=parts(), headers={"content-type": "application/json"})
    check(chunked, 413, None, "request_too_large")
    client.complete()


def test_routes_methods_and_models(client: Client) -> None:
    check(client.http.get("/v1/nothing"), 404, None, "not_found")
    for path in (f"{COMPLETIONS}/", f"{CHAT}/", "/health/", f"{client.server.url}//health"):
        check(client.http.get(path), 404, None, "not_found")
        check(client.http.post(path, json={"prompt": "x"}), 404, None, "not_found")
    for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "QUERY"):
        refused = client.http.request(method, COMPLETIONS)
        check(refused, 405, None, "method_not_allowed")
        assert refused.headers["allow"] == "POST"
    for path, status in (("/health", 200), ("/v1/models", 200), (COMPLETIONS, 405), ("/nothing", 404)):
        head = client.http.head(path)
        assert (head.status_code, head.content) == (status, b"")
    check(client.http.post("/"), 405, None, "method_not_allowed")
    check(client.http.get(COMPLETIONS), 405, None, "method_not_allowed")
    check(client.http.delete("/v1/models"), 405, None, "method_not_allowed")
    check(client.http.post(COMPLETIONS, json={"model": "gpt-9", "prompt": "x"}), 404, "model", "model_not_found")
    check(client.http.post(CHAT, json={"model": "gpt-9", "messages": MESSAGES}), 404, "model", "model_not_found")
    check(client.http.get("/v1/models/gpt/9"), 404, "model", "model_not_found")
    assert client.http.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert client.http.get(f"/v1/models/{MODEL}").json()["object"] == "model"
    assert [model.id for model in client.sdk.models.list()] == [MODEL]
    assert client.http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200


def test_tokenize_and_detokenize(client: Client) -> None:
    for text in ("Hello 日😀 <|im_end|>", "", "x" * 12_000):
        reply = client.http.post("/tokenize", json={"prompt": text}).json()
        ids = client.tokenizer.encode(text)
        assert reply == {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": client.engine.capabilities.max_model_len,
        }
        assert client.http.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": text}
        reply = client.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert reply["token_strs"] == [client.tokenizer.token_text(token_id) for token_id in ids]
    check(client.http.post("/tokenize", json={}), 400, "prompt")
    check(client.http.post("/tokenize", json={"prompt": 5}), 400, "prompt")
    check(client.http.post("/tokenize", json={"prompt": "x", "messages": MESSAGES}), 400, "prompt")
    both = {"messages": MESSAGES, "add_special_tokens": True}
    check(client.http.post("/tokenize", json=both), 400, "add_special_tokens")
    check(client.http.post("/tokenize", json={"prompt": "a", "chat_template": "x"}), 400, "chat_template")
    check(client.http.post("/tokenize", json={"messages": [{"role": "tool", "content": "x"}]}), 400, "messages")
    check(client.http.post("/detokenize", json={"tokens": [VOCAB_SIZE]}), 400, "tokens")
    check(client.http.post("/detokenize", json={"tokens": [-1]}), 400, "tokens")


def test_request_ids(client: Client) -> None:
    assert client.http.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    own = client.http.get("/health", headers={"x-request-id": "x" * 200}).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", own)


KEY = "sesam öffne dich"


def test_the_api_key(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(api_key=KEY)) as client:
        key = KEY.encode()
        wrong = [b"", b"Bearer", b"Bearer sesam", b"Basic " + key, key, b"Bearer " + key + b"x"]
        wrong += [b"Bearer " + key[:-1], b"Bearer " + b"x" * 50_000, b"Bearer " + key.upper(), b"Bearer \xff\xfe"]
        wrong += [b"Bearer " + KEY.encode("latin-1"), b"Bearer Bearer " + key]
        for value in (None, *wrong):
            headers = {} if value is None else {"authorization": value}
            for path in ("/v1/models", "/tokenizer_info", "/v1/models/", "/nothing"):
                refused = client.http.get(path, headers=headers)
                check(refused, 401, None, "invalid_api_key")
                assert refused.headers["www-authenticate"] == "Bearer"
            for path, fields in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]}), (COMPLETIONS, {})):
                check(client.http.post(path, json=fields, headers=headers), 401, None, "invalid_api_key")
        check(client.http.options(COMPLETIONS), 401, None, "invalid_api_key")
        for value in (b"Bearer " + key, b"bearer  " + key, b"BEARER " + key):
            assert client.http.get("/v1/models", headers={"authorization": value}).status_code == 200
        for path in ("/health", "/ping", "/metrics", "/openapi.json"):
            assert client.http.get(path).status_code == 200
        assert client.engine.submitted == []
    with running(tokenizer, ServerConfig(api_key="sesam")) as client:
        assert client.sdk.completions.create(model=MODEL, prompt="x").choices[0].finish_reason == "stop"
        with pytest.raises(openai.AuthenticationError):
            client.sdk.with_options(api_key="other").models.list()


def test_pages_of_other_origins_are_let_in_only_where_allowed(tokenizer: Tokenizer) -> None:
    ours, others = "https://example.com", "https://example.org"
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with running(tokenizer, ServerConfig()) as client:
        check(client.http.options(COMPLETIONS, headers={"origin": ours, **asks}), 405, None, "method_not_allowed")
        reply = client.http.get("/health", headers={"origin": ours})
        assert not [name for name in reply.headers if name.startswith("access-control")]
    with running(tokenizer, ServerConfig(allowed_origins=(ours,), api_key="sesam")) as client:
        preflight = client.http.options(COMPLETIONS, headers={"origin": ours, **asks})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == ours
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        assert client.http.options(COMPLETIONS, headers={"origin": others, **asks}).status_code == 400
        refused = client.http.post(COMPLETIONS, json={"prompt": "x"}, headers={"origin": ours})
        check(refused, 401, None, "invalid_api_key")
        assert refused.headers["access-control-allow-origin"] == ours  # so that the page may read why
        key = {"authorization": "Bearer sesam"}
        reply = client.http.post(COMPLETIONS, json={"prompt": "x", "stream": True}, headers={"origin": ours, **key})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, ours)
        assert "x-request-id" in reply.headers["access-control-expose-headers"]
        reply = client.http.get("/v1/models", headers={"origin": others, **key})
        assert "access-control-allow-origin" not in reply.headers


def test_tokenizer_info(client: Client) -> None:
    assert client.http.get("/tokenizer_info").json() == {
        "kind": "BPE",
        "vocab_size": 330,
        "logits_size": VOCAB_SIZE,
        "max_model_len": 128,
        "bos_token": None,
        "bos_token_id": None,
        "eos_token": "<|im_end|>",
        "eos_token_id": 2,
        "eos_token_ids": [2],
        "pad_token": None,
        "pad_token_id": None,
        "special_tokens": [
            {"id": 0, "token": "<|endoftext|>"},
            {"id": 1, "token": "<|im_start|>"},
            {"id": 2, "token": "<|im_end|>"},
        ],
        "adds_bos": False,
        "chat_template": CHAT_TEMPLATE,
    }
