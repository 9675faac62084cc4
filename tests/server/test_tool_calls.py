"""Tool calls in chat: asked for, read off the reply, and spelled by their own entries."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from openai.types.chat import ChatCompletion
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import render_jinja_template

from neper.config import ServerConfig
from neper.errors import StartupError
from neper.server.app import create_app
from tests.helpers.chat_replies import check_spelling, fold, whole
from tests.helpers.qwen_template import QWEN_TEMPLATE
from tests.server.conftest import MODEL, TAGS, Client, byte_level_tokenizer, fresh, new_engine, running

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
NAMED = {"type": "function", "function": {"name": "clock"}}
PARIS = '{"city": "Paris 😀 \\"naïve\\""}'


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (call("get_weather", PARIS), "", "", [("get_weather", PARIS)]),
    (
        f"<think>\nso\n</think>\n\nLet me see\n{call('get_weather', PARIS)}\n{call('clock', '{}')}",
        "so",
        "Let me see",
        [("get_weather", PARIS), ("clock", "{}")],
    ),
    (f"<think>{call('clock', '{}')}</think>no", call("clock", "{}"), "no", []),
    ('<tool_call>{"arguments": {"a": 1}, "name": "clock"}</tool_call>', "", "", [("clock", '{"a": 1}')]),
    ("the answer", "", "the answer", []),
    ("<tool_call>\n{oops}\n</tool_call>", "", "<tool_call>\n{oops}\n</tool_call>", []),
]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
@pytest.mark.parametrize("tokens_per_chunk", [1, 3, 200])
def test_fields_and_their_entries(
    qwen: Client, text: str, reasoning: str, content: str, calls: list[tuple[str, str]], tokens_per_chunk: int
) -> None:
    qwen.engine.tokens_per_chunk = tokens_per_chunk
    ids = qwen.say(text)
    options: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    full = qwen.chat(**options)
    found = whole(full)
    assert (found["reasoning_content"], found["content"], found["calls"]) == (reasoning, content, calls)
    check_spelling(found)
    assert found["finish"] == ("tool_calls" if calls else "stop")
    assert found["ids"] == [*ids, 2]
    message, logprobs = full["choices"][0]["message"], full["choices"][0]["logprobs"]
    assert ("tool_calls" in message) == ("tool_calls" in logprobs) == bool(calls)
    assert (message["content"] is None) == (calls != [] and content == "")
    made = message.get("tool_calls", [])
    assert all(re.fullmatch("call_[0-9a-f]{24}", one["id"]) and one["type"] == "function" for one in made)
    assert len({one["id"] for one in made}) == len(made)
    assert fold(qwen.events(PATH, **options, stream_options={"include_usage": True})) == found
    jsonschema.validate(full, ChatCompletion.model_json_schema())


def test_a_call_is_streamed_as_it_is_written(qwen: Client) -> None:
    qwen.say(call("get_weather", PARIS))
    events = qwen.events(PATH, tools=TOOLS, logprobs=True)
    _, first, *middle, last = [event["choices"][0] for event in events]
    (begun,) = first["delta"]["tool_calls"]
    assert begun == {
        "index": 0,
        "id": begun["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert len(middle) > 10
    for choice in middle:
        assert choice["delta"].keys() == {"tool_calls"}
        assert choice["delta"]["tool_calls"][0].keys() == {"index", "function"}
        assert choice["logprobs"].keys() == {"content", "refusal", "tool_calls"}
        assert choice["logprobs"]["content"] == []
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")


def test_a_cut_reply(qwen: Client) -> None:
    text = f"Hi {call('get_weather', PARIS)}"
    ids = qwen.say(text)
    for length in range(1, len(ids) + 1):
        options: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "max_tokens": length}
        found = whole(qwen.chat(**options))
        check_spelling(found)
        assert fold(qwen.events(PATH, **options)) == found
        assert found["finish"] == "length"
        so_far = qwen.tokenizer.decode_bytes(ids[:length]).decode("utf-8", "replace")
        if '"arguments": {' in so_far:
            (name, arguments), *_ = found["calls"]
            assert (name, found["content"]) == ("get_weather", "Hi")
            assert PARIS.startswith(arguments.rstrip("�")) or arguments == PARIS
        else:
            assert (found["calls"], found["content"]) == ([], so_far)
    qwen.say(call("clock", "{}"))
    first = whole(qwen.chat(tools=TOOLS, logprobs=True, max_tokens=1))
    assert first["content"] == "<tool_call>"
    assert [entry["token"] for entry in first["entries"]["content"]] == ["<tool_call>"]


@pytest.mark.parametrize("tokens_per_chunk", [1, 4, 200])
def test_one_call_ends_the_reply(qwen: Client, tokens_per_chunk: int) -> None:
    qwen.engine.tokens_per_chunk = tokens_per_chunk
    qwen.say(f"Hi {call('get_weather', PARIS)}\n{call('clock', '{}')} and on")
    for one in ({"parallel_tool_calls": False}, {"tool_choice": NAMED}):
        options: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "return_token_ids": True, **one}
        full = qwen.chat(**options)
        found = whole(full)
        assert (found["content"], found["calls"], found["finish"]) == (
            "Hi",
            [("get_weather", PARIS)],
            "tool_calls",
        )
        check_spelling(found)
        assert fold(qwen.events(PATH, **options)) == found
        text = qwen.tokenizer.decode_bytes(found["ids"]).decode()
        assert PARIS in text
        assert "clock" not in text
        assert full["usage"]["completion_tokens"] == len(found["ids"]) == len(found["numbers"])
        assert qwen.engine.streams[-1].closed


def test_tools_reach_the_template(qwen: Client) -> None:
    qwen.say("")

    def prompt(**body: Any) -> str:
        response = qwen.post(PATH, **{"messages": USER, **body})
        assert response.status_code == 200, response.text
        return qwen.tokenizer.decode_bytes(qwen.engine.submitted[-1].prompt_token_ids).decode()

    plain = prompt()
    assert prompt(tools=TOOLS, tool_choice="none") == prompt(tools=TOOLS) != plain
    assert prompt(tool_choice="auto") == prompt(tool_choice="none") == plain
    shown = [json.loads(line) for line in prompt(tools=TOOLS).split("\n") if line.startswith('{"type"')]
    assert shown == TOOLS
    messages = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "so",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "noon"}]},
    ]
    assert prompt(messages=messages, tools=TOOLS).endswith(
        "<think>\nso\n</think>\n\n"
        '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_schemas_of_transformers_reach_the_template(qwen: Client) -> None:
    """What `get_json_schema` writes of a Python function has a `return`; a trainer's client sends it."""

    def get_weather(city: str) -> str:
        """The weather.

        Args:
            city: The city.

        Returns:
            The weather there.
        """
        return city

    tool = get_json_schema(get_weather)
    assert "return" in tool["function"]
    qwen.say("yes")
    qwen.chat(tools=[tool])
    prompt = qwen.tokenizer.decode_bytes(qwen.engine.submitted[-1].prompt_token_ids).decode()
    [expected], _ = render_jinja_template([USER], [tool], chat_template=QWEN_TEMPLATE, add_generation_prompt=True)
    assert prompt == expected


def test_without_tools_a_call_is_text(qwen: Client) -> None:
    qwen.say(call("clock", "{}"))
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = qwen.chat(**options)["choices"][0]["message"]
        assert message["content"] == call("clock", "{}")
        assert "tool_calls" not in message
        assert fold(qwen.events(PATH, **options))["content"] == call("clock", "{}")


def test_a_required_call_is_constrained(qwen: Client) -> None:
    qwen.say(call("clock", "{}"))
    grammars = []
    for choice in (None, "auto", "required", NAMED):
        for kwargs in ({}, {"enable_thinking": False}):
            found = whole(qwen.chat(tools=TOOLS, tool_choice=choice, chat_template_kwargs=kwargs))
            assert found["calls"] == [("clock", "{}")]
            grammars.append(qwen.engine.submitted[-1].sampling.grammar)
    assert grammars[:4] == [None] * 4
    assert None not in grammars[4:]
    assert len(set(grammars[4:])) == 4


def test_strict_functions_and_forms_constrain_what_may_be_a_call(qwen: Client) -> None:
    qwen.say(call("clock", "{}"))
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    form = {"type": "json_object"}
    grammars = []
    for body in (
        {"tools": [strict], "tool_choice": "required"},
        {"tools": [strict]},
        {"tools": [strict, CLOCK]},
        {"tools": [strict], "response_format": form},
        {"tools": TOOLS, "response_format": form},
    ):
        assert whole(qwen.chat(**body))["calls"] == [("clock", "{}")]
        request = qwen.engine.submitted[-1]
        assert '"strict"' not in qwen.tokenizer.decode_bytes(request.prompt_token_ids).decode()
        grammars.append(request.sampling.grammar)
    assert len({*grammars, None}) == 6
    # What they let through is tested with the grammars, and with a model in the cases.
    assert ["city" in str(grammar) for grammar in grammars] == [True, True, True, True, False]


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


def message(role: str, **fields: Any) -> list[dict[str, Any]]:
    return [*USER, {"role": role, "content": "x", **fields}]


MADE = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        *[({"tools": value}, "tools") for value in ({}, "x", [5], [{}], [{"type": "function"}], function() * 129)],
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        *[({"tools": function(name=name)}, "tools") for name in ("", "no name", "x" * 65, "f\n", 5, None)],
        ({"tools": function(parameters=[])}, "tools"),
        ({"tools": function(mood="sad")}, "tools"),
        ({"tools": function() * 2}, "tools"),
        ({"tools": TOOLS, "tool_choice": "other"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": function(strict=True, parameters={"type": "array"})}, "tools"),
        ({"tools": TOOLS, "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"json_object": True}},
            "structured_outputs",
        ),
        ({"functions": [{}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"messages": message("tool")}, "messages"),
        ({"messages": message("user", tool_call_id="call_1")}, "messages"),
        ({"messages": message("user", tool_calls=[MADE])}, "messages"),
        ({"messages": message("assistant", tool_calls=[{"id": "1", "type": "function"}])}, "messages"),
        ({"messages": message("assistant", function_call={})}, "messages"),
        ({"messages": message("function", name="f")}, "messages"),
        ({"messages": [*USER, {"role": "assistant", "content": None}]}, "messages"),
    ],
    ids=str,
)
def test_what_is_refused(qwen: Client, body: dict[str, Any], param: str) -> None:
    response = qwen.post(PATH, **{"messages": USER, **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert qwen.engine.submitted == []


def test_what_changes_nothing_is_taken(qwen: Client) -> None:
    qwen.say("Hi")
    qwen.chat(tools=TOOLS, response_format={"type": "text"}, modalities=["text"], parallel_tool_calls=True)
    qwen.chat(tools=TOOLS, tool_choice="none", response_format={"type": "json_object"}, logprobs=True)
    assert qwen.engine.submitted[-1].sampling.grammar is not None
    # A required call leaves no text that a form could be of.
    for form in ({}, {"response_format": {"type": "json_object"}}):
        qwen.chat(tools=TOOLS, tool_choice="required", **form)
    assert qwen.engine.submitted[-1].sampling.grammar == qwen.engine.submitted[-2].sampling.grammar


def test_the_parser_can_be_named() -> None:
    tokenizer = byte_level_tokenizer(template="{{ messages[0].content }}{% if tools %}tools{% endif %}")
    with running(tokenizer, ServerConfig(tool_call_parser="mistral")) as client:
        client.say('[TOOL_CALLS] [{"name": "clock", "arguments": {}}]')
        found = whole(client.chat(tools=TOOLS, logprobs=True))
        assert (found["content"], found["calls"]) == ("", [("clock", "{}")])
        check_spelling(found)
    tokenizer = byte_level_tokenizer(template=QWEN_TEMPLATE, tags=TAGS)
    with running(tokenizer, ServerConfig(tool_call_parser="none")) as shared, fresh(shared, 2048) as client:
        assert client.post(PATH, messages=USER, tools=TOOLS).status_code == 400
        client.say(call("clock", "{}"))
        assert whole(client.chat(tools=TOOLS, tool_choice="none"))["content"] == call("clock", "{}")
    with pytest.raises(StartupError, match="hermes, llama3_json, mistral, none"):
        create_app(new_engine(), tokenizer, ServerConfig(tool_call_parser="other"), model_name=MODEL)


def test_the_openai_client(qwen: Client) -> None:
    qwen.say(f"{call('get_weather', PARIS)}\n{call('clock', '{}')}")
    options: Any = {"model": MODEL, "messages": USER, "tools": TOOLS, "logprobs": True}
    reply = qwen.sdk.chat.completions.create(**options)
    made = reply.choices[0].message.tool_calls or []
    assert [(one.function.name, one.function.arguments) for one in made] == [("get_weather", PARIS), ("clock", "{}")]
    with qwen.sdk.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [(one.function.name, one.function.arguments) for one in calls] == [("get_weather", PARIS), ("clock", "{}")]
    assert final.choices[0].finish_reason == "tool_calls"
