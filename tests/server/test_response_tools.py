"""Function tools in responses: asked for, called whole and in a stream, and given back with their results."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from neper.server.bodies.response_items import InputMessage
from neper.server.kept_items import KeptItems
from tests.helpers.chat_replies import joined
from tests.server.conftest import MODEL, Client
from tests.server.test_errors import check
from tests.server.test_responses import INCLUDE, PATH, THOUGHT, USER, events, fold, nameless, prompt, respond
from tests.server.test_tool_calls import CASES, PARIS, call

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather",
    "parameters": PARAMETERS,
}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock"}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "name": "clock"}
LOGPROBS = {"logprobs": True, "top_logprobs": 3}


def chats(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as chat takes it."""
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


CHAT_TOOLS = [chats(tool) for tool in TOOLS]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 200])
def test_case_103_calls_are_items(
    qwen: Client, text: str, reasoning: str, content: str, calls: list[tuple[str, str]], tokens_per_chunk: int
) -> None:
    qwen.engine.tokens_per_chunk = tokens_per_chunk
    ids = qwen.say(text)
    full = respond(qwen, tools=TOOLS, **INCLUDE)
    items = {kind: [item for item in full["output"] if item["type"] == kind] for kind in ("reasoning", "message")}
    assert [item["content"][0]["text"] for item in items["reasoning"]] == ([reasoning] if reasoning else [])
    assert [item["content"][0]["text"] for item in items["message"]] == ([content] if content else [])
    made = [item for item in full["output"] if item["type"] == "function_call"]
    assert [(item["name"], item["arguments"]) for item in made] == calls
    assert len({item["call_id"] for item in made}) == len({item["id"] for item in made}) == len(made)
    assert all(item["id"].startswith("fc_") and item["status"] == "completed" for item in made)
    assert (full["status"], full["usage"]["output_tokens"]) == ("completed", len(ids) + 1)
    entries = [entry for item in items["message"] for entry in item["content"][0]["logprobs"]]
    assert joined(entries) == (content, content.encode())
    assert entries == qwen.chat(tools=CHAT_TOOLS, **LOGPROBS)["choices"][0]["logprobs"]["content"]
    ours, theirs = [request.prompt_token_ids for request in qwen.engine.submitted]
    assert ours == theirs
    assert nameless(fold(events(qwen, tools=TOOLS, **INCLUDE))) == nameless(full)


def test_case_103_the_events_of_a_call(qwen: Client) -> None:
    qwen.say(f"Hi\n{call('get_weather', PARIS)}\n{call('clock', '{}')}")
    found = events(qwen, tools=TOOLS)
    kinds = [key for key, _ in itertools.groupby(event["type"].removeprefix("response.") for event in found)]
    call_events = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *call_events,
        *call_events,
        "completed",
    ]
    # As they are written, not at the end.
    assert sum(event["type"].endswith("arguments.delta") for event in found) > 10
    added = [event["item"] for event in found if event["type"].endswith("item.added")][1:]
    assert [(item["name"], item["arguments"], item["status"]) for item in added] == [
        ("get_weather", "", "in_progress"),
        ("clock", "", "in_progress"),
    ]


def test_case_103_a_cut_call(qwen: Client) -> None:
    ids = qwen.say(f"Hi {call('get_weather', PARIS)}")
    for length in (*range(1, len(ids) - 3, 6), *range(len(ids) - 3, len(ids) + 1)):
        full = respond(qwen, tools=TOOLS, max_output_tokens=length, **INCLUDE)
        chat = qwen.chat(tools=CHAT_TOOLS, max_tokens=length)["choices"][0]["message"]
        assert full["status"] == "incomplete"
        *_, last = full["output"]
        if "tool_calls" in chat:
            arguments = chat["tool_calls"][0]["function"]["arguments"]
            assert (last["type"], last["arguments"]) == ("function_call", arguments)
            # What came after the arguments is the form's, not the call's.
            assert last["status"] == ("completed" if arguments == PARIS else "incomplete")
        else:
            assert (last["type"], last["status"]) == ("message", "incomplete")
        assert nameless(fold(events(qwen, tools=TOOLS, max_output_tokens=length, **INCLUDE))) == nameless(full)


@pytest.mark.parametrize(
    "options",
    [{"parallel_tool_calls": False}, {"tool_choice": NAMED}, {"parallel_tool_calls": False, "max_tool_calls": 3}],
    ids=str,
)
def test_case_103_one_call_ends_the_response(qwen: Client, options: dict[str, Any]) -> None:
    qwen.say(f"Hi {call('get_weather', PARIS)}\n{call('clock', '{}')} and on")
    full = respond(qwen, tools=TOOLS, **options)
    assert [item["type"] for item in full["output"]] == ["message", "function_call"]
    assert full["output"][1]["arguments"] == PARIS
    assert nameless(fold(events(qwen, tools=TOOLS, **options))) == nameless(full)


CHOICES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"tool_choice": "auto"}, {}),
    ({"tool_choice": "none"}, {"tool_choice": "none"}),
    ({"tool_choice": "required"}, {"tool_choice": "required"}),
    ({"tool_choice": NAMED}, {"tool_choice": {"type": "function", "function": {"name": "clock"}}}),
    (
        {"tools": [{**WEATHER, "strict": True}, {**CLOCK, "strict": None}]},
        {"tools": [chats({**WEATHER, "strict": True}), chats(CLOCK)]},
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}},
        {"tools": [chats(CLOCK)]},
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}},
        {"tools": [chats(CLOCK)], "tool_choice": "required"},
    ),
    (
        {"parallel_tool_calls": False, "tool_choice": "required"},
        {"parallel_tool_calls": False, "tool_choice": "required"},
    ),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    ({"text": {"format": {"type": "json_object"}}, "tool_choice": "required"}, {"tool_choice": "required"}),
]


@pytest.mark.parametrize(("body", "chat"), CHOICES, ids=str)
def test_case_103_what_is_asked_for_is_as_in_chat(qwen: Client, body: dict[str, Any], chat: dict[str, Any]) -> None:
    qwen.say(call("clock", "{}"))
    asked = {"tools": TOOLS, **body}
    full = respond(qwen, **asked)
    qwen.chat(**{"tools": CHAT_TOOLS, **chat})
    ours, theirs = qwen.engine.submitted
    assert (ours.prompt_token_ids, ours.sampling.grammar) == (theirs.prompt_token_ids, theirs.sampling.grammar)
    assert full["tool_choice"] == asked.get("tool_choice", "auto")
    assert full["parallel_tool_calls"] == asked.get("parallel_tool_calls", True)
    assert full["tools"] == [
        {"parameters": None, **tool, "strict": tool.get("strict") is True} for tool in asked["tools"]
    ]


def test_strict_is_said_not_assumed(qwen: Client) -> None:
    """A schema that no grammar holds is no 400 while nobody asks that it be held."""
    qwen.say("Hi")
    loose = {**CLOCK, "parameters": {"type": "object", "propertyNames": {"pattern": "^a", "unheard_of": 1}}}
    for strict in (None, False):
        assert respond(qwen, tools=[{**loose, "strict": strict}])["tools"][0]["strict"] is False
    check(qwen.post(PATH, input="x", tools=[{**loose, "strict": True}]), 400, "tools")


def given(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_1", "call_id": call_id, "name": name, "arguments": arguments}


def gave(call_id: str, output: Any = "noon") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def assistant(*calls: tuple[str, str, str], content: str | None = None, **others: Any) -> dict[str, Any]:
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments, call_id in calls
    ]
    return {"role": "assistant", "content": content, **others, **({"tool_calls": made} if made else {})}


def tool(call_id: str, content: str = "noon") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


A, B = ("clock", '{"a": 1}', "call_a"), ("get_weather", PARIS, "call_b")
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see"}]}
LATER = {**SAID, "id": "msg_2", "type": "message", "status": "completed"}
HISTORIES: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([USER, given(*A), gave("call_a")], [USER, assistant(A), tool("call_a")]),
    (
        [USER, {**given(*A), "status": "completed"}, gave("call_a", [{"type": "input_text", "text": "no"}] * 2)],
        [USER, assistant(A), tool("call_a", "nono")],
    ),
    (
        [USER, THOUGHT, SAID, given(*A), given(*B), gave("call_a"), gave("call_b", "rain"), USER],
        [
            USER,
            assistant(A, B, content="Let me see", reasoning_content="so"),
            tool("call_a"),
            tool("call_b", "rain"),
            USER,
        ],
    ),
    (
        [USER, THOUGHT, given(*A), gave("call_a"), THOUGHT, given(*B), gave("call_b"), LATER, USER],
        [
            USER,
            assistant(A, reasoning_content="so"),
            tool("call_a"),
            assistant(B, reasoning_content="so"),
            tool("call_b"),
            assistant(content="Let me see"),
            USER,
        ],
    ),
    # Text and reasoning between calls leave their results where templates want them: after all of them.
    (
        [USER, given(*A), SAID, THOUGHT, given(*B), gave("call_a"), gave("call_b")],
        [USER, assistant(A, B, content="Let me see", reasoning_content="so"), tool("call_a"), tool("call_b")],
    ),
    ([USER, SAID, SAID], [USER, assistant(content="Let me see"), assistant(content="Let me see")]),
    (
        [USER, SAID, THOUGHT, SAID],
        [USER, assistant(content="Let me see"), assistant(content="Let me see", reasoning_content="so")],
    ),
    ([USER, THOUGHT, THOUGHT, SAID], [USER, assistant(content="Let me see", reasoning_content="soso")]),
]


@pytest.mark.parametrize(("items", "messages"), HISTORIES, ids=str)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
def test_case_103_items_are_the_messages_of_chat(
    qwen: Client, items: list[dict[str, Any]], messages: list[dict[str, Any]], tools: Any
) -> None:
    qwen.say("Hi")
    respond(qwen, items, tools=tools)
    body = {"messages": messages, "tools": tools and CHAT_TOOLS}
    assert qwen.post("/v1/chat/completions", **body).status_code == 200
    ours, theirs = [request.prompt_token_ids for request in qwen.engine.submitted]
    assert ours == theirs


def test_case_103_a_loop_with_the_sdk(qwen: Client) -> None:
    """What it gives goes back as it came, whole and streamed; the last answer is typed."""

    class Answer(BaseModel):
        b: int

    replies = {False: f"<think>so</think>{call(*B[:2])}", True: f"<think>so</think>{json.dumps({'b': 1})}"}

    def reply(request: Any) -> list[int]:
        text = qwen.tokenizer.decode_bytes(request.prompt_token_ids).decode()
        return qwen.tokenizer.encode(replies["tool_response" in text], add_special_tokens=False)

    qwen.engine.reply = reply
    for stream in (False, True):
        items: list[Any] = [{"role": "user", "content": "Hello"}]
        options: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "text_format": Answer}
        for _ in range(2):
            if stream:
                with qwen.sdk.responses.stream(input=items, **options) as running:
                    seen = list(running)
                    response = running.get_final_response()
                names = [
                    event.item.name
                    for event in seen
                    if event.type == "response.output_item.added" and event.item.type == "function_call"
                ]
                assert names in (["get_weather"], [])
            else:
                response = qwen.sdk.responses.parse(input=items, **options)
            items += response.output
            items += [
                {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
                for item in response.output
                if item.type == "function_call"
            ]
        kinds = [
            item["type"] if isinstance(item, dict) and "type" in item else getattr(item, "type", "") for item in items
        ]
        assert kinds == ["", "reasoning", "function_call", "function_call_output", "reasoning", "message"]
        assert response.output_parsed == Answer(b=1)
        assert f"{call(*B[:2]).split(chr(10))[1]}" in prompt(qwen)
        assert "rain" in prompt(qwen)


@pytest.mark.parametrize("stream", [False, True])
def test_case_103_items_by_their_ids_are_the_items(qwen: Client, stream: bool) -> None:
    """As the default client of one kit in JavaScript sends them back."""
    qwen.say(f"<think>so</think>Hi\n{call(*B[:2])}")
    for store, status in ((None, 200), (False, 400)):
        body = {"tools": TOOLS, "store": store}
        output = (fold(events(qwen, **body)) if stream else respond(qwen, **body))["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        results = [USER, gave(output[2]["call_id"]), USER]
        named = [USER, *[{"type": "item_reference", "id": item["id"]} for item in output], *results[1:]]
        assert qwen.post(PATH, input=named).status_code == status
    respond(qwen, [USER, *output, *results[1:]])
    named_ids, sent_ids = [qwen.engine.submitted[place].prompt_token_ids for place in (1, 3)]
    # The calls of the two have ids of their own, which this template does not show.
    assert named_ids == sent_ids


def test_kept_items_are_bounded() -> None:
    kept = KeptItems(20_000)
    for place in range(50):
        kept.keep(f"msg_{place}", InputMessage(role="assistant", content="x"), "x" * 100 * place)
        assert kept.num_bytes <= 20_000
        assert kept.get(f"msg_{place}") is not None
    assert [place for place in range(50) if kept.get(f"msg_{place}")] == [47, 48, 49]
    kept.keep("msg_long", InputMessage(role="assistant", content="x"), "x" * 20_000)
    assert kept.get("msg_long") is None
    assert kept.get("msg_49") is not None
    nothing = KeptItems(0)
    nothing.keep("msg_1", InputMessage(role="assistant", content=""), "")
    assert (nothing.get("msg_1"), nothing.num_bytes) == (None, 0)


NEUTRAL: list[dict[str, Any]] = [
    {"include": ["reasoning.encrypted_content"]},
    {"reasoning": {"summary": "auto"}},
    {"reasoning": {"generate_summary": "concise"}},
    {"client_metadata": {"a": "b"}},
    {"prompt_cache_retention": "24h"},
    {"prompt_cache_options": {"ttl": "30m"}},
    {"text": {"verbosity": "low"}},
    {"truncation": "auto"},
    {"max_tool_calls": 2},
    {"tools": []},
    {"input": [{**USER, "cache_control": {"type": "ephemeral"}}]},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello", "prompt_cache_breakpoint": {}}]}]},
]


@pytest.mark.parametrize("body", NEUTRAL, ids=str)
@pytest.mark.parametrize("reasons", [False, True])
def test_case_103_what_cannot_change_the_answer_is_taken(
    qwen: Client, client: Client, body: dict[str, Any], reasons: bool
) -> None:
    asked = qwen if reasons else client
    asked.say("<think>so</think>Hi")
    plain, full = respond(asked), respond(asked, **{"given": "Hello", **_as_given(body)})
    ours, theirs = asked.engine.submitted
    assert (ours.prompt_token_ids, ours.sampling) == (theirs.prompt_token_ids, theirs.sampling)
    assert nameless(full)["output"] == nameless(plain)["output"]
    for name in ("truncation", "max_tool_calls"):
        assert full[name] == body.get(name, plain[name])
    summary = next(iter(body.get("reasoning", {}).values()), None)
    assert full["reasoning"] == {"effort": None, "summary": summary}
    assert full["text"] == {**plain["text"], **body.get("text", {})}


def _as_given(body: dict[str, Any]) -> dict[str, Any]:
    return {"given" if name == "input" else name: value for name, value in body.items()}


def test_nothing_is_cut_where_the_input_is_too_long(client: Client) -> None:
    message = check(client.post(PATH, input="x " * 200, truncation="auto"), 400, None, "context_length_exceeded")
    assert "truncation" in message


@pytest.mark.parametrize(
    "kind",
    ["web_search", "web_search_preview", "file_search", "computer", "mcp", "code_interpreter", "custom", "local_shell"],
)
def test_case_103_other_tools_are_refused_by_kind(qwen: Client, kind: str) -> None:
    tool = {"type": kind, "name": "f", "server_label": "x", "container": {"type": "auto"}, "vector_store_ids": ["v"]}
    message = check(qwen.post(PATH, input="x", tools=[CLOCK, tool]), 400, "tools", "unsupported")
    assert message.startswith(f"tools[1]: tools of type {kind!r}")
    message = check(
        qwen.post(PATH, input="x", tools=[CLOCK], tool_choice={"type": kind, "name": "f", "server_label": "x"}),
        400,
        "tool_choice",
        "unsupported",
    )
    assert repr(kind) in message
    with pytest.raises(openai.BadRequestError, match=kind):
        qwen.sdk.responses.create(model=MODEL, input="x", tools=[tool])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        *[({"tools": value}, "tools", "") for value in ({}, "x", [5], [{}], [{"type": 5}], [CLOCK] * 2)],
        ({"tools": [{**CLOCK, "name": f"f{place}"} for place in range(129)]}, "tools", "128"),
        ({"tools": [chats(CLOCK)]}, "tools", "function"),
        ({"tools": [{**CLOCK, "mood": "sad"}]}, "tools", "mood"),
        ({"tools": [{**CLOCK, "defer_loading": True}]}, "tools", "defer_loading"),
        *[({"tools": [{**CLOCK, "name": name}]}, "tools", "tools[0]") for name in ("", "no name", "x" * 65, 5)],
        ({"tools": [{**CLOCK, "strict": True, "parameters": {"type": "array"}}]}, "tools", "clock"),
        *[({"tool_choice": value}, "tool_choice", "") for value in ("required", NAMED, "other", 5, [], {})],
        ({"tools": TOOLS, "tool_choice": {**NAMED, "name": "g"}}, "tool_choice", "'g'"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{**NAMED, "name": "g"}]},
            },
            "tool_choice",
            "'g'",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice", ""),
        ({"include": ["web_search_call.results"]}, "include", "'web_search_call.results'"),
        ({"input": [USER, {"type": "item_reference", "id": "msg_1"}]}, "input", "input[1]: no item 'msg_1'"),
        ({"input": [USER, {**given(*A), "call_id": None}]}, "input", "input[1]"),
        ({"input": [{**given(*A), "namespace": "n"}]}, "input", "namespace"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "call_id"),
        ({"input": [gave("1", [{"type": "input_image", "image_url": "x"}])]}, "input", "'input_image'"),
        ({"input": [gave("1", {"a": 1})]}, "input", "output"),
    ],
    ids=str,
)
def test_what_is_refused(qwen: Client, body: dict[str, Any], param: str, words: str) -> None:
    assert words in check(qwen.post(PATH, **{"input": "Hello", **body}), 400, param)
    assert qwen.engine.submitted == []


@pytest.mark.parametrize("name", ["input", "tools", "tool_choice"])
def test_what_is_nested_too_deeply_is_refused(qwen: Client, name: str) -> None:
    body = f'{{"input": "x", "{name}": {"[" * 5000}{"]" * 5000}}}'
    check(qwen.http.post(PATH, content=body, headers={"Content-Type": "application/json"}), 400)
