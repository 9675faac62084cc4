"""Cases 34 to 41: ends, streams, parsers, and who shares a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.cases.conftest import CHAT, COMPLETIONS, RealServer
from tests.helpers.chat_replies import joined
from tests.helpers.invariants import Json, check_reply, close, fold
from tests.helpers.scripted_engine import scores, top
from tests.server.conftest import END, VOCAB_SIZE, Client, until

TOOL: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "日本"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "日本"}}\n</tool_call>'


@pytest.mark.parametrize("server_name", ["tiny", pytest.param("embedded", marks=pytest.mark.model)])
def test_case_34_a_stop_string_cuts_text_and_entries_alike(server_name: str, request: Any) -> None:
    server: RealServer = request.getfixturevalue(server_name)
    fixed: Json = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    free = server.choice(COMPLETIONS, **fixed)["text"]
    said = server.choice(CHAT, **fixed)["message"]["content"]
    places = [(0, 2), (5, 6), (3, 1), (9, 2), (len(free) - 4, 3)]
    for begin, length in places[: 2 if server_name == "embedded" else 5]:
        for include in (False, True):
            for stream in (False, True):
                stop = free[begin : begin + length]
                cut = free[: free.index(stop) + include * len(stop)]
                body: Json = {**fixed, "stop": ["never there", stop], "include_stop_str_in_output": include}
                body |= {"stream": stream, "return_token_ids": True}
                reply = server.full(COMPLETIONS, **body, logprobs=2)
                check_reply("completions", body | {"logprobs": 2}, reply)
                [choice] = reply["choices"]
                assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (cut, "stop", stop)
                arrays = choice["logprobs"] or {"tokens": [], "text_offset": []}
                # At the cut itself there may be one that is in no text, before the stop string.
                assert all(offset <= len("Hello") + len(cut) for offset in arrays["text_offset"])
                # Every token that was sampled is counted, those of the stop string too.
                assert len(choice["token_ids"]) >= len(arrays["tokens"])
                body["stop"] = stop = said[begin : begin + length]
                cut = said[: said.index(stop) + include * len(stop)]
                reply = server.full(CHAT, **body, logprobs=True)
                check_reply("chat", body | {"logprobs": True}, reply)
                [choice] = reply["choices"]
                assert (choice["message"]["content"], choice["stop_reason"]) == (cut, stop)
                entries = (choice["logprobs"] or {"content": []})["content"]
                assert joined(entries)[0] == cut
                assert joined(entries)[1].decode("utf-8", "replace") == cut


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", [2, 40])
def test_case_35_the_first_token_ends_the_reply(tiny: RealServer, end: int, stream: bool) -> None:
    options: Json = {"allowed_token_ids": [end], "stream": stream, "return_token_ids": True, "max_tokens": 5}
    options |= {"stop_token_ids": [40]} if end == 40 else {}
    if stream:
        options["stream_options"] = {"include_usage": True}
    for echo in (False, True):
        body: Json = {**options, "prompt": "Hello", "logprobs": 1, "echo": echo}
        reply = tiny.full(COMPLETIONS, **body)
        check_reply("completions", body, reply)
        [choice] = reply["choices"]
        assert reply["usage"]["completion_tokens"] == 1
        assert choice["token_ids"] == [end]
        assert choice["text"] == ("Hello" if echo else "")
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == (40 if end == 40 else None)
        arrays = choice["logprobs"]
        text = tiny.tokenizer.token_text(end)
        assert arrays["tokens"] == (["Hello", text] if echo else [text])
        assert arrays["token_logprobs"] == ([None, 0.0] if echo else [0.0])
        assert arrays["top_logprobs"] == ([None, {text: 0.0}] if echo else [{text: 0.0}])
        assert arrays["text_offset"] == ([0, 5] if echo else [5])
    reply = tiny.full(CHAT, **options, logprobs=True, top_logprobs=3)
    check_reply("chat", options | {"logprobs": True, "top_logprobs": 3}, reply)
    [choice] = reply["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    assert (choice["logprobs"] or {"content": []})["content"] == []
    assert (choice["token_ids"], choice["token_logprobs"]) == ([end], [0.0])
    assert reply["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
def test_case_38_every_token_of_a_chunk_has_its_own_list(scripted: Client, tokens_per_chunk: int) -> None:
    scripted.engine.tokens_per_chunk = tokens_per_chunk
    ids = scripted.say("the quick brown fox 日本 😀 jumps")
    for body in ({"stream": True}, {}, {"stream": True, "stop": "umps"}):
        options: Json = {"max_tokens": len(ids), "logprobs": 4, "return_tokens_as_token_ids": True, **body}
        if options.pop("stream", False):
            pieces = [event["choices"][0]["logprobs"] for event in scripted.events(COMPLETIONS, prompt="a", **options)]
            found = [best for piece in pieces if piece for best in piece["top_logprobs"]]
        else:
            found = scripted.complete("a", **options)["choices"][0]["logprobs"]["top_logprobs"]
        assert len(found) >= len(ids) - 2
        for place, best in enumerate(found):
            row = scores(1 + place, ids[place], VOCAB_SIZE)
            expected = {f"token_id:{i}": pytest.approx(float(row[i])) for i in (ids[place], *top(row, 4))}
            assert best == expected


@pytest.mark.parametrize("tokens_per_chunk", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_case_39_reasoning_and_calls_keep_their_entries(reasoning: Client, stream: bool, tokens_per_chunk: int) -> None:
    reasoning.engine.tokens_per_chunk = tokens_per_chunk
    thought, answer = "Hello 日本 😀", "the answer"
    for text, content, calls in (
        (f"<think>\n{thought}\n</think>\n\n{answer}", answer, []),
        (f"<think>\n{thought}\n</think>\n\n{answer}\n{CALL}", answer, [("get_weather", '{"city": "日本"}')]),
        (f"<think>\n{thought}\n</think>\n\n{CALL}", "", [("get_weather", '{"city": "日本"}')]),
    ):
        ids = reasoning.say(text)
        body: Json = {"tools": [TOOL], "logprobs": True, "top_logprobs": 3, "return_token_ids": True}
        if stream:
            data = reasoning.post(CHAT, messages=[{"role": "user", "content": "x"}], stream=True, **body).text
            reply = fold_text(data)
        else:
            reply = reasoning.chat(**body)
        check_reply("chat", body, reply)
        [choice] = reply["choices"]
        message, logprobs = choice["message"], choice["logprobs"]
        assert message["reasoning_content"] == thought
        assert (message["content"] or "") == content
        found = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        assert found == calls
        assert joined(logprobs["reasoning_content"]) == (thought, thought.encode())
        assert joined(logprobs["content"]) == (content, content.encode())
        spelled = "".join(name + arguments for name, arguments in calls)
        assert joined(logprobs.get("tool_calls", [])) == (spelled, spelled.encode())
        assert choice["token_ids"] == [*ids, END]
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        for entries in (logprobs["content"], logprobs["reasoning_content"], logprobs.get("tool_calls", [])):
            assert all(len(entry["top_logprobs"]) == 3 for entry in entries)


def fold_text(data: str) -> Json:
    *events, done, rest = data.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return fold(events)


@pytest.mark.parametrize("stream", [False, True])
def test_case_39_a_real_models_calls(tiny: RealServer, stream: bool) -> None:
    """A grammar makes noise into calls; cut off, what never became one is content."""
    fixed: Json = {"tools": [TOOL], "tool_choice": "required", "logprobs": True, "top_logprobs": 4, "stream": stream}
    blank = [token_id for token_id in range(334) if tiny.tokenizer.token_bytes(token_id).isspace()]
    for seed in range(4):
        for max_tokens in (1, 9, 200):
            body: Json = {**fixed, "seed": seed, "max_tokens": max_tokens, "return_token_ids": True}
            # Between a member and the next there may be any space, of which a random model writes a lot.
            body["logit_bias"] = {str(token_id): -100 for token_id in blank}
            body["chat_template_kwargs"] = {"enable_thinking": False}
            reply = tiny.full(CHAT, **body)
            check_reply("chat", body, reply)
            [choice] = reply["choices"]
            if max_tokens == 1:
                assert "tool_calls" not in choice["message"]
                assert choice["message"]["content"]
                assert joined(choice["logprobs"]["content"])[0] == choice["message"]["content"]
            if choice["finish_reason"] == "tool_calls":
                for call in choice["message"]["tool_calls"]:
                    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "日本")
            assert max_tokens != 200 or choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_case_39_calls_that_nobody_required(tiny: RealServer, stream: bool) -> None:
    """A strict function's calls follow its schema, and text stays free; with a form there is JSON of it or a call."""
    [tag] = tiny.ids("<tool_call>")
    spelled = {token_id: tiny.tokenizer.token_bytes(token_id) for token_id in range(334)}
    blank = [token_id for token_id, data in spelled.items() if data.isspace()]
    begin = [token_id for token_id, data in spelled.items() if data.startswith(b"<")]
    schema: Json = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    fixed: Json = {"logprobs": True, "top_logprobs": 2, "stream": stream, "parallel_tool_calls": False}
    fixed["chat_template_kwargs"] = {"enable_thinking": False}
    calls = forms = 0
    for seed in range(6):
        # A bias makes a call likely, or not; it is no constraint.
        for bias in (-100, 100):
            biases = {str(token_id): -100 for token_id in [*blank, *begin]} | {str(tag): bias}
            body: Json = {**fixed, "seed": seed, "tools": [strict], "logit_bias": biases, "max_tokens": 100}
            for extra in ({}, {"response_format": form}):
                reply = tiny.full(CHAT, **body, **extra)
                check_reply("chat", body, reply)
                [choice] = reply["choices"]
                message = choice["message"]
                assert (choice["finish_reason"] == "tool_calls") == (bias > 0), choice
                for call in message.get("tool_calls", ()):
                    assert call["function"]["name"] == "get_weather"
                    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "日本")
                    calls += 1
                if extra and bias < 0:
                    assert json.loads(message["content"])["n"] in (1, 2)
                    forms += 1
    assert (calls, forms) == (12, 6)


def test_case_40_the_client_leaves_in_the_middle(tiny: RealServer) -> None:
    def busy() -> bool:
        stats = tiny.engine.stats()
        return bool(stats.running or stats.waiting or stats.free_blocks < stats.total_blocks)

    until(lambda: not busy())
    for path, body in (
        (CHAT, {"max_tokens": 450}),
        (COMPLETIONS, {"max_tokens": 450, "logprobs": 5}),
        (COMPLETIONS, {"max_tokens": 450, "n": 16, "logprobs": 20}),
        (COMPLETIONS, {"max_tokens": 450, "structured_outputs": {"regex": "a*"}}),
    ):
        fixed: Json = {"messages": [{"role": "user", "content": "Hello"}]} if path == CHAT else {"prompt": "Hello"}
        before = tiny.engine.stats()
        with (
            httpx.Client(base_url=tiny.url, timeout=120) as http,
            http.stream("POST", path, json={**fixed, **body, "ignore_eos": "n" in body, "stream": True}) as response,
        ):
            assert response.status_code == 200
            next(response.iter_lines())
        until(lambda: tiny.service.num_choices == 0)
        until(lambda: not busy())
        after = tiny.engine.stats()
        assert after.generated_tokens - before.generated_tokens < 450 * body.get("n", 1) // 2
        assert after.restarts == 0
    # Nothing is computed any more, and the next request finds all blocks.
    assert tiny.engine.stats() == after
    assert len(tiny.choice(COMPLETIONS, max_tokens=400, ignore_eos=True, return_token_ids=True)["token_ids"]) == 400


def neighbours(server: RealServer) -> list[Callable[[], Json]]:
    """Requests that differ in all that a step can tell apart."""
    fixed: Json = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    bodies: list[tuple[str, Json]] = [
        (COMPLETIONS, {}),
        (COMPLETIONS, {"logprobs": 0}),
        (COMPLETIONS, {"logprobs": 20, "stream": True}),
        (COMPLETIONS, {"logprobs": 3, "echo": True}),
        (COMPLETIONS, {"logprobs": 5, "logprob_token_ids": list(range(100))}),
        (COMPLETIONS, {"logprobs": 5, "allowed_token_ids": list(range(40, 300))}),
        (COMPLETIONS, {"logprobs": 2, "logprobs_mode": "processed_logprobs", "logit_bias": {"50": 5}}),
        (COMPLETIONS, {"logprobs": 2, "logprobs_mode": "tempered_logprobs", "frequency_penalty": 1.0}),
        (CHAT, {"logprobs": True, "top_logprobs": 4, "prompt_logprobs": 6}),
        (CHAT, {"logprobs": True, "bad_words": ["a", "the"]}),
        (COMPLETIONS, {"logprobs": 1, "structured_outputs": {"regex": "[a-z]{40}"}, "ignore_eos": False}),
        (COMPLETIONS, {"logprobs": 1, "n": 3, "prompt": "日本 😀"}),
        (COMPLETIONS, {"logprobs": 1, "prompt": [5] * 400, "prompt_logprobs": 1}),
    ]
    return [lambda path=path, body=body: server.full(path, **{**fixed, **body}) for path, body in bodies]


def test_case_41_unlike_neighbours_change_nothing(tiny: RealServer, together: Callable[..., list[Any]]) -> None:
    asked = neighbours(tiny)
    alone = [ask() for ask in asked]
    for _ in range(3):
        for expected, found in zip(alone, together(asked), strict=True):
            for single, choice in zip(expected["choices"], found["choices"], strict=True):
                assert choice["token_ids"] == single["token_ids"]
                close(choice, single)
