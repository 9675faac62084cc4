"""Random requests of every kind to a real engine whose text is noise: the rules hold, and bit by bit where promised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neper.models.source import ModelSource
from neper.types import LOGPROBS_MODES
from tests.cases.conftest import CHAT, COMPLETIONS, RealServer, serving
from tests.helpers.invariants import Json, check_reply, close
from tests.helpers.tiny import VOCAB_SIZE
from tests.server.conftest import TAGS

TEXTS = [
    "Hello there, what is the answer?",
    "日本語のテキスト、中文文本、한국어 텍스트",
    "😀🚀👩‍👩‍👧 naïve café Ünïcödé",
    "tab\tnew\nline \x07 \x00 \u200b \u2028 end",
    "<think> is no tag <|im_start|> here </think>",
    "שלום עולم مرحبا ไทย",
    "x",
    " ",
]
TOOL: Json = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
}
FORMS: list[Json] = [
    {"structured_outputs": {"regex": "[a-z ]{3,9}"}},
    {"structured_outputs": {"choice": ["positive", "negative", "日本 😀"]}},
    {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"grammar": 'start: "é"+ /[0-9]/'}},
]
STOPS = ["e", " the", "over", "\n", "\ufffd", "qz", "h", "n t", "本", "</think>"]
ID = st.integers(0, VOCAB_SIZE - 1)
FRACTION = st.floats(0, 1)
END = 2
SPECIAL = {0, 1, END}


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


SAMPLING = st.fixed_dictionaries(
    {
        "seed": st.integers(-(2**63), 2**63 - 1),
        "max_tokens": st.integers(1, 16),
        "temperature": st.sampled_from([0, 0.3, 0.7, 1.0, 1.6]),
        "n": st.sampled_from([None, None, None, 1, 3]),
        "return_token_ids": st.sampled_from([True, True, False]),
        "return_tokens_as_token_ids": st.booleans(),
        "skip_special_tokens": optional(st.booleans()),
    },
    optional={
        "top_p": st.floats(0.1, 1.0),
        "top_k": st.integers(-1, 50),
        "min_p": st.floats(0.0, 0.3),
        "min_tokens": st.integers(0, 1),
        "stop_token_ids": st.lists(ID, max_size=20),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 2.0),
        "logprobs_mode": st.sampled_from(LOGPROBS_MODES),
    },
)
EDITS = st.one_of(
    st.just({}),
    st.just({}),
    st.fixed_dictionaries({"allowed_token_ids": st.lists(ID, min_size=2, max_size=40)}),
    st.fixed_dictionaries({"logprob_token_ids": st.lists(ID, min_size=1, max_size=40)}),
    st.fixed_dictionaries({"bad_words": st.lists(st.sampled_from(["a", "the", "日", " dog"]), max_size=3)}),
    # Tags, and parts of characters, more often than noise alone has them.
    st.fixed_dictionaries({"logit_bias": st.dictionaries(st.sampled_from(["330", "331", "332", "0"]), st.just(4.0))}),
    st.fixed_dictionaries({"logit_bias": st.dictionaries(ID.map(str), st.floats(-100, 20), max_size=5)}),
)
STOPPED = st.one_of(
    st.just({}),
    st.just({}),
    st.fixed_dictionaries(
        {
            "stop": st.lists(st.sampled_from(STOPS), min_size=1, max_size=3),
            "include_stop_str_in_output": st.booleans(),
        }
    ),
)
# Where in the reply of a first request, which asks for the same without it, a stop string begins, and how long it is.
STOP = st.tuples(FRACTION, st.integers(1, 6), st.booleans())


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Json]:
    body: Json = {name: value for name, value in draw(SAMPLING).items() if value is not None}
    form: Json = draw(st.sampled_from([{}, {}, {}, *FORMS]))
    edits = draw(EDITS) if not form else {}
    body |= form | edits | draw(STOPPED)
    if "allowed_token_ids" in body:
        body.pop("min_tokens", None)  # all that is allowed might end the reply
    if not form:
        body["ignore_eos"] = draw(st.booleans())
    text = draw(st.sampled_from(TEXTS))
    k = draw(st.one_of(st.none(), st.integers(0, 20)))
    if k is None and "logprob_token_ids" in body:
        k = 0
    if draw(st.booleans()):
        body["prompt"] = draw(st.one_of(st.just(text), st.lists(ID, min_size=1, max_size=12)))
        if draw(st.integers(0, 5)) == 0:
            body["prompt"] = [text, text + "!", "a"]
        body["echo"] = draw(st.booleans())
        body["logprobs"] = k
        if body["echo"] and k is not None:
            body.pop("logprobs_mode", None)  # scores of a prompt are raw
        return COMPLETIONS, body
    body["messages"] = [{"role": "user", "content": text}]
    if draw(st.integers(0, 3)) == 0:
        body["messages"].append({"role": "assistant", "content": draw(st.sampled_from(["<think>\nwell", "so"]))})
        body["continue_final_message"] = True
    elif not form and draw(st.booleans()):
        body["tools"] = [TOOL]
        body["tool_choice"] = draw(st.sampled_from(["auto", "required"])) if not edits else "auto"
        body["parallel_tool_calls"] = draw(st.booleans())
        if body["tool_choice"] == "required":
            del body["ignore_eos"]
            body["max_tokens"] = 60
    if k is not None:
        body |= {"logprobs": True, "top_logprobs": k}
    return CHAT, body


def plain(reply: Json) -> list[Json]:
    """The choices without what names a reply, and without what a stream cannot tell from nothing."""
    choices: list[Json] = []
    for choice in reply["choices"]:
        found: Json = {name: value for name, value in choice.items() if name != "logprobs"}
        logprobs = choice["logprobs"] or {}
        found["logprobs"] = {name: value for name, value in logprobs.items() if value}
        if "message" in found:
            calls = [call["function"] for call in found["message"].get("tool_calls", ())]
            texts = {name: found["message"].get(name) or "" for name in ("content", "reasoning_content")}
            found["message"] = {**texts, "calls": calls}
        choices.append(found)
    return choices


def bytes_of(server: RealServer, body: Json, choice: Json) -> bytes:
    """The bytes of a completion's text, from its ids: all but those of the end and of skipped special tokens."""
    ids = list(choice["token_ids"])
    if choice["finish_reason"] == "stop":
        ids.pop()
    skipped = SPECIAL if body.get("skip_special_tokens") is not False else set()
    return b"".join(server.tokenizer.token_bytes(token_id) for token_id in ids if token_id not in skipped)


def text_of(path: str, choice: Json) -> str:
    if path == COMPLETIONS:
        return str(choice["text"])
    message = choice["message"]
    return "".join([message.get("reasoning_content") or "", message["content"] or ""])


def check_texts(server: RealServer, path: str, body: Json, reply: Json) -> None:
    """A text is the bytes of its ids: everywhere where no stop string cut it and no parser took it apart."""
    if path != COMPLETIONS or not body.get("return_token_ids") or "stop" in body:
        return
    for choice in reply["choices"]:
        prompt = server.tokenizer.decode_bytes(choice["prompt_token_ids"]) if body.get("echo") else b""
        data = bytes_of(server, body, choice)
        assert choice["text"] == prompt.decode("utf-8", "replace") + data.decode("utf-8", "replace")


def keeps_the_rules(server: RealServer, asked: tuple[str, Json], stop: tuple[float, int, bool] | None) -> None:
    path, body = asked
    kind: Any = "chat" if path == CHAT else "completions"
    full = server.full(path, **body)
    check_reply(kind, body, full)
    check_texts(server, path, body, full)
    if stop is not None:
        place, length, include = stop
        text = text_of(path, full["choices"][0])
        prompt = body["prompt"] if isinstance(body.get("prompt"), str) and body.get("echo") else ""
        begin = len(prompt) + int(place * max(0, len(text) - len(prompt) - length))
        if not text[begin : begin + length]:
            return
        body = {**body, "stop": text[begin : begin + length], "include_stop_str_in_output": include}
        full = server.full(path, **body)
        check_reply(kind, body, full)
        check_stop(path, body, full, text, begin)
    streamed = server.full(path, **body, stream=True, stream_options={"include_usage": True})
    check_reply(kind, body, streamed)
    one, other = plain(full), plain(streamed)
    assert full["usage"] == streamed["usage"]
    if len(one) == 1:
        # Alone, the same steps: the same bits.
        assert one == other
        return
    for choice, same in zip(one, other, strict=True):
        # Choices share steps as it happens, so a draw at a near tie may go either way: then it is another reply.
        if choice.get("token_ids") == same.get("token_ids") and text_of_plain(choice) == text_of_plain(same):
            close(choice, same)


def check_stop(path: str, body: Json, reply: Json, free: str, begin: int) -> None:
    """The first choice, which is the same draw, ends at the stop string wherever that is first there."""
    if path != COMPLETIONS or body.get("echo") or body.get("min_tokens"):
        return
    choice, stop = reply["choices"][0], body["stop"]
    if len(reply["choices"]) > 1 or choice["stop_reason"] != stop:
        return
    end = free.index(stop)
    assert end <= begin
    assert choice["text"] == free[: end + body["include_stop_str_in_output"] * len(stop)]


def text_of_plain(choice: Json) -> Any:
    return choice.get("text", choice.get("message"))


@pytest.fixture(scope="module")
def uncached(tiny_reasoning: ModelSource) -> Iterator[RealServer]:
    """The same steps for the same request: the prefix cache, which would shorten the second one's, is off."""
    with serving(tiny_reasoning, prefix_caching=False) as server:
        yield server


QUIET = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


def test_the_tags_are_the_ids_that_are_biased(uncached: RealServer) -> None:
    assert [uncached.ids(tag) for tag in TAGS[:3]] == [[330], [331], [332]]


@pytest.mark.slow
@pytest.mark.rounds(200)
def test_random_requests(uncached: RealServer, rounds: int) -> None:
    @settings(max_examples=rounds, **QUIET)
    @given(asked=requests(), stop=optional(STOP))
    def check(asked: tuple[str, Json], stop: Any) -> None:
        keeps_the_rules(uncached, asked, stop)

    check()
