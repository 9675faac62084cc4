"""The responses endpoint: items with their text and its entries, named events that fold into them, and input items."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from neper.config import ServerConfig
from neper.server.schemas import responses as schemas
from neper.types import LOGPROBS_MODES
from tests.helpers.chat_replies import joined
from tests.server.conftest import CHAT_TEMPLATE, MODEL, VOCAB_SIZE, Client, byte_level_tokenizer, running, until
from tests.server.test_errors import check, check_failed
from tests.server.test_named_ids import set_capabilities

PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
INCLUDE: dict[str, Any] = {"include": [LOGPROBS], "top_logprobs": 3}
TEXT = "the answer is 日本語 😀"
# The SDK itself builds its objects without a look at what it got.
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def respond(client: Client, given: Any = "Hello", **body: Any) -> dict[str, Any]:
    """A full reply, which must be one by the SDK's types and by the document's."""
    response = client.post(PATH, input=given, **body)
    assert response.status_code == 200, response.text
    Response.model_validate_json(response.content)
    msgspec.json.decode(response.content, type=schemas.Response)
    return response.json()


def events(client: Client, given: Any = "Hello", **body: Any) -> list[dict[str, Any]]:
    """A stream's events, each of which must be one by both, named as it says, and numbered."""
    response = client.post(PATH, input=given, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return told(response.text)


def told(text: str) -> list[dict[str, Any]]:
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    found: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        content = data.removeprefix("data: ")
        EVENT.validate_json(content)
        msgspec.json.decode(content, type=schemas.ResponseEvent)
        found.append(json.loads(content))
        assert name == "event: " + found[-1]["type"]
        assert found[-1]["sequence_number"] == number
    return found


def fold(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that a stream's deltas make; whatever tells of it again must agree with them."""
    created, progress, *middle, last = found
    assert (created["type"], progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == progress["response"]
    assert (created["response"]["status"], created["response"]["output"]) == ("in_progress", [])
    output: list[dict[str, Any]] = []
    for event in middle:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["item"]["status"] == "in_progress"
            assert event["item"].get("content", []) == []
            assert event["item"].get("arguments", "") == ""
            output.append(event["item"])
            continue
        assert event["output_index"] == len(output) - 1
        item = output[-1]
        if kind == "output_item.done":
            item["status"] = event["item"]["status"]
            assert event["item"] == item
            continue
        assert event["item_id"] == item["id"]
        if kind == "function_call_arguments.delta":
            assert event["delta"]
            item["arguments"] += event["delta"]
            continue
        if kind == "function_call_arguments.done":
            assert event["arguments"] == item["arguments"]
            continue
        assert event["content_index"] == 0
        if kind == "content_part.added":
            assert event["part"]["text"] == ""
            item["content"].append(event["part"])
            continue
        [part] = item["content"]
        if kind == "content_part.done":
            assert event["part"] == part
            continue
        name, _, what = kind.partition(".")
        assert name == part["type"]
        if what == "delta":
            assert event["delta"] or event["logprobs"]
            part["text"] += event["delta"]
            if name == "output_text":
                assert not event["logprobs"] or joined(event["logprobs"])[0] == event["delta"]
                part["logprobs"] += event["logprobs"]
        else:
            assert event["text"] == part["text"]
            assert event.get("logprobs") == part.get("logprobs")
    assert last["type"] == "response." + last["response"]["status"]
    assert last["response"]["output"] == output
    return last["response"]


def nameless(response: dict[str, Any]) -> dict[str, Any]:
    """Without what is another one's each time."""
    times = {"created_at": 0, "completed_at": response["completed_at"] and 0}
    output = [
        {**item, **{key: item[key].partition("_")[0] for key in ("id", "call_id") if key in item}}
        for item in response["output"]
    ]
    return {**response, **times, "id": response["id"].partition("_")[0], "output": output}


def shown(response: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(item["type"], item["status"], item["content"][0]["text"]) for item in response["output"]]


def prompt(client: Client) -> str:
    return client.tokenizer.decode_bytes(client.engine.submitted[-1].prompt_token_ids).decode()


def test_a_response(client: Client) -> None:
    ids = client.say("the answer")
    client.engine.num_cached_tokens = 2
    found = respond(client, instructions="Be brief.", metadata={"a": "b"}, user="u", seed=5, top_p=0.5, text={})
    sent = len(client.engine.submitted[-1].prompt_token_ids)
    created, completed = found.pop("created_at"), found.pop("completed_at")
    assert 0 <= completed - created < 10
    [item] = found.pop("output")
    assert found.pop("id").startswith("resp_")
    assert item.pop("id").startswith("msg_")
    part = {"type": "output_text", "text": "the answer", "annotations": [], "logprobs": []}
    assert item == {"type": "message", "status": "completed", "role": "assistant", "content": [part]}
    assert found == {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "background": False,
        "instructions": "Be brief.",
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": MODEL,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 0.5,
        "truncation": "disabled",
        "user": "u",
        "usage": {
            "input_tokens": sent,
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": len(ids) + 1,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": sent + len(ids) + 1,
        },
    }
    assert client.engine.submitted[-1].sampling.seed == 5
    assert client.engine.submitted[-1].logprobs.top_k is None


def test_drafts_are_counted_as_in_chat(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = client.engine.chunks
    client.engine.tokens_per_chunk = 3
    num_chunks, rest = divmod(len(client.say(TEXT)) + 1, 3)
    assert rest == 0
    assert respond(client)["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    assert "completion_tokens_details" not in client.chat()["usage"]
    set_capabilities(client, speculative=True)
    none = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert respond(client)["usage"]["output_tokens_details"] == {"reasoning_tokens": 0, **none}
    monkeypatch.setattr(
        client.engine,
        "chunks",
        lambda request: [msgspec.structs.replace(chunk, num_drafts=5, num_accepted=2) for chunk in chunks(request)],
    )
    counts = {"accepted_prediction_tokens": 2 * num_chunks, "rejected_prediction_tokens": 3 * num_chunks}
    full = respond(client)
    assert full["usage"]["output_tokens_details"] == {"reasoning_tokens": 0, **counts}
    assert client.chat()["usage"]["completion_tokens_details"] == counts
    assert nameless(fold(events(client))) == nameless(full)


@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 100])
@pytest.mark.parametrize("options", [{}, INCLUDE, {"include": [LOGPROBS]}, {**INCLUDE, "stop": "ans"}], ids=str)
def test_a_full_response_is_its_stream_folded(client: Client, options: dict[str, Any], tokens_per_chunk: int) -> None:
    client.engine.tokens_per_chunk = tokens_per_chunk
    for text in (TEXT, "", "a"):
        client.say(text)
        for limit in (None, 1, 5):
            full = respond(client, **options, max_output_tokens=limit)
            assert nameless(fold(events(client, **options, max_output_tokens=limit))) == nameless(full)


@pytest.mark.parametrize("top", [None, 0, 1, 20])
def test_entries_are_those_of_chat(client: Client, top: int | None) -> None:
    """On the part, in the deltas and in what ends them (`fold` compares these)."""
    client.say(TEXT)
    full = respond(client, include=[LOGPROBS], top_logprobs=top)
    [part] = full["output"][0]["content"]
    assert joined(part["logprobs"]) == (TEXT, TEXT.encode())
    assert part["logprobs"] == client.chat(logprobs=True, top_logprobs=top)["choices"][0]["logprobs"]["content"]
    assert full["top_logprobs"] == (top or 0)
    streamed = events(client, include=[LOGPROBS], top_logprobs=top)
    assert nameless(fold(streamed)) == nameless(full)
    done = {event["type"]: event for event in streamed}
    assert done["response.output_text.done"]["logprobs"] == part["logprobs"]
    assert done["response.content_part.done"]["part"]["logprobs"] == part["logprobs"]
    set_capabilities(client, logprobs_modes=LOGPROBS_MODES)
    for options in ({"logprobs_mode": "tempered_logprobs", "temperature": 0.5}, {"logprob_token_ids": [7, 9]}):
        changed = respond(client, include=[LOGPROBS], top_logprobs=top, **options)["output"][0]["content"][0]
        chat = client.chat(logprobs=True, top_logprobs=top, **options)["choices"][0]["logprobs"]["content"]
        assert changed["logprobs"] == chat != part["logprobs"]


def test_what_is_not_included_is_not_scored(client: Client) -> None:
    client.say(TEXT)
    for include in (None, []):
        assert respond(client, include=include)["output"][0]["content"][0]["logprobs"] == []
        fold(events(client, include=include))
        assert all(request.logprobs.top_k is None for request in client.engine.submitted)


REASONED = [
    ("<think>\nHello there\n</think>\n\nthe answer", "Hello there", "the answer"),
    ("<think>日本語 😀</think>naïve 😀", "日本語 😀", "naïve 😀"),
    ("<think>\n\n</think>\n\nHi", None, "Hi"),
    ("Hi", None, "Hi"),
    ("<think>Hello</think>", "Hello", ""),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), REASONED)
@pytest.mark.parametrize("tokens_per_chunk", [1, 100])
def test_reasoning(qwen: Client, text: str, reasoning: str | None, content: str, tokens_per_chunk: int) -> None:
    qwen.engine.tokens_per_chunk = tokens_per_chunk
    qwen.say(text)
    full = respond(qwen, **INCLUDE)
    before = [] if reasoning is None else [("reasoning", "completed", reasoning)]
    assert shown(full) == [*before, ("message", "completed", content)]
    message = full["output"][-1]
    assert joined(message["content"][0]["logprobs"]) == (content, content.encode())
    for item in full["output"][:-1]:
        assert item["id"].startswith("rs_")
        assert item["summary"] == []
        assert item["content"] == [{"type": "reasoning_text", "text": reasoning}]
    chat = qwen.chat(logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]
    assert message["content"][0]["logprobs"] == chat["content"]
    count = full["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert count == len(chat["reasoning_content"])
    assert (count > 0) == (reasoning is not None)
    assert nameless(fold(events(qwen, **INCLUDE))) == nameless(full)


def test_a_cut_response(qwen: Client) -> None:
    ids = qwen.say("<think>Hello there</think>the answer")
    for limit in range(1, len(ids) + 2):
        full = respond(qwen, max_output_tokens=limit, **INCLUDE)
        cut = limit <= len(ids)
        status = "incomplete" if cut else "completed"
        assert full["status"] == full["output"][-1]["status"] == status
        assert full["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
        assert (full["completed_at"] is None) == cut
        assert all(item["status"] == "completed" for item in full["output"][:-1])
        assert full["usage"]["output_tokens"] == full["max_output_tokens"] == limit
        assert nameless(fold(events(qwen, max_output_tokens=limit, **INCLUDE))) == nameless(full)


def test_where_reasoning_is_cut_there_is_no_message(qwen: Client) -> None:
    ids = qwen.say("<think>Hello there</think>the answer")
    end = ids.index(qwen.tokenizer.encode("</think>", add_special_tokens=False)[0])
    [item] = respond(qwen, max_output_tokens=end)["output"]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")
    assert item["content"][0]["text"] == "Hello there"
    reasoning, message = respond(qwen, max_output_tokens=end + 2)["output"]
    assert (reasoning["status"], message["type"], message["status"]) == ("completed", "message", "incomplete")
    # Nothing at all is an empty message.
    assert shown(respond(qwen, max_output_tokens=1)) == [("message", "incomplete", "")]


def test_effort(qwen: Client, client: Client) -> None:
    qwen.say("Hi")
    assert respond(qwen, reasoning={"effort": "high"})["reasoning"] == {"effort": "high", "summary": None}
    assert prompt(qwen).endswith("assistant\n(high) ")
    respond(qwen, reasoning={"effort": "none"})
    assert prompt(qwen).endswith("</think>\n\n")
    client.say("Hi")
    respond(client, reasoning={"effort": "none", "summary": None})
    respond(client, reasoning={"effort": "low"})  # a hint that this model cannot take


PART = {"type": "input_text", "text": "Hello"}
ANSWER = {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}
REPLY = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [ANSWER]}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}
USER = {"role": "user", "content": "Hello"}
INPUTS: list[tuple[Any, list[dict[str, Any]]]] = [
    ("Hello", [USER]),
    ([USER], [USER]),
    ([{**USER, "type": "message", "status": "completed"}], [USER]),
    (
        [{"role": "user", "content": [PART, {"type": "input_text", "text": "!"}]}],
        [{"role": "user", "content": "Hello!"}],
    ),
    (
        [{"role": "developer", "content": [PART]}, USER],
        [{"role": "system", "content": "Hello"}, USER],
    ),
    ([USER, REPLY, USER], [USER, {"role": "assistant", "content": "Hi"}, USER]),
    (
        [USER, {**REPLY, "content": [ANSWER, {"type": "refusal", "refusal": " no"}]}, USER],
        [USER, {"role": "assistant", "content": "Hi no"}, USER],
    ),
    ([USER, {"role": "assistant", "content": "Hi"}, USER], [USER, {"role": "assistant", "content": "Hi"}, USER]),
    (
        [USER, {**THOUGHT, "encrypted_content": None, "status": "completed"}, REPLY, USER],
        [USER, {"role": "assistant", "content": "Hi", "reasoning_content": "so"}, USER],
    ),
    (
        [USER, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "well"}]}, REPLY, USER],
        [USER, {"role": "assistant", "content": "Hi", "reasoning_content": "well"}, USER],
    ),
    ([USER, {**THOUGHT, "content": []}, REPLY], [USER, {"role": "assistant", "content": "Hi"}]),
    ([USER, THOUGHT, USER], [USER, {"role": "assistant", "content": "", "reasoning_content": "so"}, USER]),
    ([USER, THOUGHT], [USER, {"role": "assistant", "content": "", "reasoning_content": "so"}]),
]


@pytest.mark.parametrize(("given", "messages"), INPUTS, ids=str)
def test_input_is_the_conversation_that_chat_gets(qwen: Client, given: Any, messages: list[dict[str, Any]]) -> None:
    qwen.say("Hi")
    respond(qwen, given)
    assert qwen.post("/v1/chat/completions", messages=messages).status_code == 200
    respond(qwen, given, instructions="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert qwen.post("/v1/chat/completions", messages=[system, *messages]).status_code == 200
    ours, chats, instructed, chat_instructed = [request.prompt_token_ids for request in qwen.engine.submitted]
    assert ours == chats
    assert instructed == chat_instructed != ours


SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "seed": 3,
    "stop": ["x"],
    "stop_token_ids": [9],
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1.0},
    "min_tokens": 1,
    "allowed_token_ids": [5, 7],
    "bad_words": ["no"],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
}


def test_sampling_is_as_in_chat(client: Client) -> None:
    client.say([5, 7])
    respond(client, max_output_tokens=3, **SAMPLING)
    client.chat(max_tokens=3, **SAMPLING)
    ours, chats = client.engine.submitted
    assert ours.sampling == chats.sampling
    assert (ours.sampling.seed, ours.sampling.allowed_token_ids) == (3, (5, 7))


SCHEMA = {"type": "object", "properties": {"b": {"enum": [1]}}, "required": ["b"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "name": "answer", "schema": SCHEMA}


def test_forms(client: Client) -> None:
    client.say('{"b": 1}')
    for format, chat in (
        ({"type": "text"}, {"response_format": {"type": "text"}}),
        ({"type": "json_object"}, {"response_format": {"type": "json_object"}}),
        (
            {**FORMAT, "strict": True, "description": "an answer"},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
        ),
    ):
        assert respond(client, text={"format": format})["text"] == {"format": format}
        client.chat(**chat)
        ours, chats = client.engine.submitted[-2:]
        assert ours.sampling.grammar == chats.sampling.grammar
        assert (ours.sampling.grammar is None) == (format["type"] == "text")
    respond(client, structured_outputs={"choice": ["a", "b"]})
    assert "choice" in (client.engine.submitted[-1].sampling.grammar or "")


def test_reasoning_before_a_form(qwen: Client) -> None:
    qwen.say('<think>so</think>{"b": 1}')
    assert shown(respond(qwen, text={"format": FORMAT}))[1] == ("message", "completed", '{"b": 1}')
    assert "</think>" in (qwen.engine.submitted[-1].sampling.grammar or "")


WRONG: list[tuple[dict[str, Any], str]] = [
    *[({"input": value}, "input") for value in (None, [], 5, [5], ["Hello"], {}, [{}], [{"role": "user"}])],
    *[
        ({"input": [value]}, "input")
        for value in (
            {"content": "x"},
            {"role": "king", "content": "x"},
            {**USER, "mood": "sad"},
            {**USER, "phase": "commentary"},
            {**USER, "summary": []},
            {**USER, "content": [{"type": "input_text"}]},
            {**USER, "content": [{"type": "text", "text": "x"}]},
            {**USER, "content": [{"type": "refusal", "refusal": "no"}]},
            {**USER, "content": [{"type": "input_image", "image_url": "x"}]},
            {"type": "item_reference", "id": "msg_1"},
            {"type": "item_reference"},
            {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "x"}},
            {**THOUGHT, "encrypted_content": "x"},
            {**THOUGHT, "role": "assistant"},
            {**THOUGHT, "content": "so"},
            {**THOUGHT, "content": [ANSWER]},
            {**THOUGHT, "summary": [PART]},
        )
    ],
    ({"instructions": ["x"]}, "instructions"),
    *[({"max_output_tokens": value}, "max_output_tokens") for value in (0, -1, 1.0, "5", True)],
    *[({"include": [LOGPROBS], "top_logprobs": value}, "top_logprobs") for value in (21, -1, True, 1.0, "5")],
    *[({"top_logprobs": value}, "top_logprobs") for value in (0, 5)],
    ({"include": [], "top_logprobs": 5}, "top_logprobs"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids"),
    *[({"include": value}, "include") for value in (LOGPROBS, [5], ["file_search_call.results"], ["other"])],
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    *[
        ({"stream": True, "stream_options": {name: True}}, "stream_options")
        for name in ("include_obfuscation", "include_usage", "other")
    ],
    *[({"text": value}, "text") for value in ("x", {"verbosity": "loud"}, {"format": "text"}, {"format": {}})],
    *[
        ({"text": {"format": value}}, "text")
        for value in (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
            {"type": "json_schema", "schema": {}},
            {"type": "json_schema", "name": "a"},
            {**FORMAT, "name": "a b"},
            {**FORMAT, "type": "json_object"},
            {"type": "text", "strict": True},
            {**FORMAT, "schema": {"type": "nothing"}},
            {**FORMAT, "schema": {"$ref": "#/nowhere"}},
        )
    ],
    ({"text": {"format": FORMAT}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"text": {"format": FORMAT}, "ignore_eos": True}, "ignore_eos"),
    *[({"reasoning": value}, "reasoning") for value in ("low", {"effort": "huge"}, {"summary": "some"}, {"x": 1})],
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    *[({"truncation": value}, "truncation") for value in ("other", True)],
    ({"metadata": {"a": 1}}, "metadata"),
    *[
        ({name: "x"}, name)
        for name in (
            "previous_response_id",
            "conversation",
            "prompt",
            "context_management",
            "moderation",
        )
    ],
    *[
        ({name: value}, name)
        for name, value in (
            ("max_tool_calls", 0),
            ("n", 1),
            ("prompt_logprobs", 1),
            ("prompt_logprobs_start", 1),
            ("return_token_ids", True),
            ("response_format", {"type": "text"}),
            ("messages", [USER]),
            ("max_tokens", 5),
            ("logprobs", True),
            ("temperature", 2.1),
            ("stop", [""]),
            ("allowed_token_ids", [VOCAB_SIZE]),
            ("unheard_of", 1),
        )
    ],
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=str)
def test_what_is_refused(client: Client, body: dict[str, Any], param: str) -> None:
    check(client.post(PATH, **{"input": "Hello", **body}), 400, param)
    assert client.engine.submitted == []


def test_messages_of_errors_speak_of_this_body(client: Client) -> None:
    def message(**body: Any) -> str:
        response = client.post(PATH, **{"input": "Hello", **body})
        assert response.status_code == 400, response.text
        return str(response.json()["error"]["message"])

    assert LOGPROBS in message(top_logprobs=5)
    assert LOGPROBS in message(include=["other"])
    named = {"$defs": {"response_format": {}}, "other": 1}
    assert message(text={"format": {**FORMAT, "schema": named}}).startswith("text.format.schema")
    assert message(text={"format": {**FORMAT, "schema": {"type": "nothing"}}}).startswith("text.format")
    assert "text.format" in message(text={"format": FORMAT}, ignore_eos=True)
    assert "text.format" in message(text={"format": FORMAT}, structured_outputs={"regex": "a"})
    assert "input" in message(previous_response_id="resp_1")
    assert "'mcp_call'" in message(input=[{"type": "mcp_call", "id": "1", "server_label": "f"}])
    assert "input[1]" in message(input=[USER, {"type": "function_call", "call_id": "1", "name": "f"}])
    too_long = client.post(PATH, input="Hello", max_output_tokens=500)
    assert "max_output_tokens 500" in check(too_long, 400, None, "context_length_exceeded")


def test_what_makes_no_difference(client: Client) -> None:
    client.say("Hi")
    plain = nameless(respond(client))
    nothing = dict.fromkeys(("instructions", "include", "tools", "text", "reasoning", "conversation", "n", "store"))
    assert nameless(respond(client, **nothing)) == plain
    for same in ({"tools": []}, {"store": False}, {"background": False}, {"truncation": "disabled"}, {"model": MODEL}):
        assert nameless(respond(client, **same)) == plain
    found = respond(
        client,
        prompt_cache_key="k",
        safety_identifier="s",
        tool_choice="none",
        parallel_tool_calls=False,
        service_tier="x",
    )
    assert found["output"][0]["content"] == plain["output"][0]["content"]
    assert (found["prompt_cache_key"], found["safety_identifier"]) == ("k", "s")
    assert (found["tool_choice"], found["parallel_tool_calls"]) == ("none", False)
    fold(events(client, stream_options={"include_obfuscation": False}))
    assert client.post(PATH, input="x", model="other").status_code == 404


def test_a_template_that_refuses_names_the_input() -> None:
    template = "{{ raise_exception('no messages today') }}" + CHAT_TEMPLATE
    with running(byte_level_tokenizer(template=template), ServerConfig()) as client:
        assert "no messages today" in check(client.post(PATH, input="Hello"), 400, "input")


def test_failures(client: Client) -> None:
    client.say("the answer is")
    client.engine.fail_after = 0
    assert check_failed(client.post(PATH, input="Hello", stream=True), "engine_error", stream=True) == "a row was NaN"
    client.engine.fail_after = 2
    check(client.post(PATH, input="Hello"), 500, None, "engine_error")
    response = client.post(PATH, input="Hello", stream=True, **INCLUDE)
    assert response.status_code == 200
    *deltas, last, error = told(response.text)
    assert (error["type"], error["code"], error["param"]) == ("error", "engine_error", None)
    assert error["message"] == last["response"]["error"]["message"] == "a row was NaN"
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["usage"] is None
    text = "".join(event["delta"] for event in deltas if event["type"] == "response.output_text.delta")
    assert shown(last["response"]) == [("message", "incomplete", text)]
    assert text
    with pytest.raises(openai.APIError, match="NaN"):
        list(client.sdk.responses.create(model=MODEL, input="Hello", stream=True))


def test_a_client_that_leaves(client: Client) -> None:
    client.say("word " * 30)
    client.engine.delay = 0.01
    with client.http.stream("POST", PATH, json={"input": "Hello", "stream": True}) as response:
        lines = response.iter_lines()
        while "output_text.delta" not in next(lines):
            pass
    until(lambda: client.server.service.num_choices == 0)
    assert client.engine.streams[-1].emitted < 20


def sdk_options(**others: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Hello", **INCLUDE, **others}


def dumped(response: Any) -> dict[str, Any]:
    """A response of the SDK's as the JSON that came."""
    return json.loads(response.to_json(exclude_unset=True))


def test_the_sdk(client: Client) -> None:
    client.say(TEXT)
    expected = nameless(respond(client, **INCLUDE))
    whole = client.sdk.responses.create(**sdk_options())
    assert whole.output_text == TEXT
    assert nameless(dumped(whole)) == expected
    streamed = list(client.sdk.responses.create(**sdk_options(), stream=True))
    assert nameless(dumped(streamed[-1].response)) == expected
    assert "".join(event.delta for event in streamed if event.type == "response.output_text.delta") == TEXT
    with client.sdk.responses.stream(**sdk_options()) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == TEXT
    assert final.output[0].content[0].logprobs == whole.output[0].content[0].logprobs


def test_the_sdk_gives_its_output_back(qwen: Client) -> None:
    class Answer(BaseModel):
        b: int

    qwen.say('<think>so</think>{"b": 1}')
    user = {"role": "user", "content": "Hello"}
    conversation: list[Any] = [user]
    parsed = qwen.sdk.responses.parse(**sdk_options(input=conversation, text_format=Answer))
    assert parsed.output_parsed == Answer(b=1)
    grammar = qwen.engine.submitted[-1].sampling.grammar
    assert grammar is not None
    assert '"b"' in grammar
    with qwen.sdk.responses.stream(**sdk_options(input=conversation, text_format=Answer)) as stream:
        assert stream.get_final_response().output_parsed == Answer(b=1)
    conversation += [*parsed.output, user]
    qwen.sdk.responses.create(**sdk_options(input=conversation))
    assistant = {"role": "assistant", "content": '{"b": 1}', "reasoning_content": "so"}
    assert qwen.post("/v1/chat/completions", messages=[user, assistant, user]).status_code == 200
    ours, chats = [request.prompt_token_ids for request in qwen.engine.submitted[-2:]]
    assert ours == chats


@pytest.mark.parametrize("stream", [False, True])
def test_eight_at_a_time(client: Client, stream: bool) -> None:
    """Each has its own text and lists, threads and tasks alike."""
    client.engine.reply = lambda request: client.tokenizer.encode(
        f"the answer to {request.sampling.seed} 日本", add_special_tokens=False
    )
    client.engine.delay = 0.001
    tops = [0, 1, 2, 5, 20, 0, 3, 7]
    bodies = [sdk_options(extra_body={"seed": place}, top_logprobs=top) for place, top in enumerate(tops)]

    def one(body: dict[str, Any]) -> Any:
        if not stream:
            return client.sdk.responses.create(**body)
        return list(client.sdk.responses.create(**body, stream=True))[-1].response

    async def all_of_them() -> list[Any]:
        url = client.server.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as sdk:

            async def another(body: dict[str, Any]) -> Any:
                if not stream:
                    return await sdk.responses.create(**body)
                found = [event async for event in await sdk.responses.create(**body, stream=True)]
                return found[-1].response

            return list(await asyncio.gather(*map(another, bodies)))

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(one, bodies))
    for place, (top, thread, task) in enumerate(zip(tops, replies, asyncio.run(all_of_them()), strict=True)):
        assert thread.output_text == task.output_text == f"the answer to {place} 日本"
        for response in (thread, task):
            entries = dumped(response)["output"][0]["content"][0]["logprobs"]
            assert joined(entries)[0] == response.output_text
            assert {len(entry["top_logprobs"]) for entry in entries} == {top}
