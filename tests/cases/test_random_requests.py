"""Requests made up at random over a real engine: every reply keeps the API's rules, and a stream is the same reply."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neper.types import LOGPROBS_MODES
from tests.cases.conftest import CHAT, COMPLETIONS, RealServer
from tests.helpers.invariants import Json, check_reply
from tests.helpers.tiny import VOCAB_SIZE

TEXTS = [
    "Hello there, what is the answer?",
    "日本語のテキスト、中文文本、한국어",
    "😀🚀👩‍👩‍👧 naïve café Ünïcödé",
    "tab\tnew\nline \u0007 \u200b end",
    "x",
]
STOPS = ["e", " the", "over", "\n", "\ufffd", "qz", "h", "n t", "本"]
ID = st.integers(0, VOCAB_SIZE - 1)

SAMPLING = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**40),
        "max_tokens": st.integers(1, 14),
        "temperature": st.sampled_from([0, 0.7, 1.0, 1.6]),
    },
    optional={
        "top_p": st.floats(0.1, 1.0),
        "top_k": st.integers(-1, 50),
        "min_p": st.floats(0.0, 0.3),
        "n": st.integers(1, 3),
        "stop": st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
        "presence_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 2.0),
        "logit_bias": st.dictionaries(ID.map(str), st.floats(-50, 50), max_size=3),
        "logprobs_mode": st.sampled_from(LOGPROBS_MODES),
        "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
    },
)
SETS = st.one_of(
    st.just({}),
    st.just({}),
    st.fixed_dictionaries({"allowed_token_ids": st.lists(ID, min_size=1, max_size=40)}),
    st.fixed_dictionaries({"logprob_token_ids": st.lists(ID, min_size=1, max_size=40)}),
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Json]:
    body: Json = draw(SAMPLING) | draw(SETS)
    text = draw(st.sampled_from(TEXTS))
    if draw(st.booleans()):
        body["messages"] = [{"role": "user", "content": text}]
        if draw(st.booleans()) or "logprob_token_ids" in body:
            body |= {"logprobs": True, "top_logprobs": draw(st.integers(0, 20))}
        return CHAT, body
    body["prompt"] = text if draw(st.booleans()) else draw(st.lists(ID, min_size=1, max_size=12))
    if draw(st.booleans()) or "logprob_token_ids" in body:
        body["logprobs"] = draw(st.integers(0, 20))
    body["echo"] = draw(st.booleans())
    return COMPLETIONS, body


def numbers_aside(value: Any) -> Any:
    """Everything but logprobs, which may differ in a bit where the prefix cache was warmer, and what names a reply."""
    if isinstance(value, dict):
        named = ("id", "created", "usage", "logprobs", "token_logprobs")
        return {name: numbers_aside(item) for name, item in value.items() if name not in named and item is not None}
    return [numbers_aside(item) for item in value] if isinstance(value, list) else value


def keeps_the_rules(server: RealServer, asked: tuple[str, Json]) -> None:
    path, body = asked
    kind: Any = "chat" if path == CHAT else "completions"
    full = server.full(path, **body)
    check_reply(kind, body, full)
    streamed = server.full(path, **body, stream=True, stream_options={"include_usage": True})
    check_reply(kind, body, streamed)
    a, b = numbers_aside(full["choices"]), numbers_aside(streamed["choices"])
    for choice in (*a, *b):
        choice.setdefault("message", {}).pop("reasoning_content", None)
    assert a == b
    for name in ("prompt_tokens", "completion_tokens"):
        assert full["usage"][name] == streamed["usage"][name]


QUIET = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=200, **QUIET)
@given(asked=requests())
def test_random_requests(tiny: RealServer, asked: tuple[str, Json]) -> None:
    keeps_the_rules(tiny, asked)
