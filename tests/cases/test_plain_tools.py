"""Case 104: tools on a chat template that shows none: told in words, called by grammar."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from neper.config import ServerConfig
from neper.errors import StartupError
from neper.server.app import create_app
from tests.cases.conftest import CHAT, RealServer
from tests.helpers.chat_replies import check_spelling, fold, whole
from tests.helpers.invariants import Json
from tests.server.conftest import CHAT_TEMPLATE, MODEL, Client, byte_level_tokenizer, fresh, new_engine, running

PARAMETERS: Json = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "日本"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Json = {"name": "get_weather", "description": "The weather “there”", "parameters": PARAMETERS}
CLOCK: Json = {"name": "clock"}
TOOLS = [{"type": "function", "function": {**function, "strict": False}} for function in (WEATHER, CLOCK)]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
USER: Json = {"role": "user", "content": "Hello"}
SYSTEM: Json = {"role": "system", "content": "Be brief."}
CALL = '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>'
# As docs/api.md has it.
DESCRIPTION = f"""\
You can call these functions:
{json.dumps(WEATHER, ensure_ascii=False)}
{json.dumps(CLOCK)}

To call one, write its name and its arguments between tags:
<tool_call>
{{"name": <name>, "arguments": <JSON object>}}
</tool_call>"""


def prompt(client: Client, **body: Any) -> str:
    response = client.post(CHAT, **{"messages": [USER], **body})
    assert response.status_code == 200, response.text
    return client.tokenizer.decode_bytes(client.engine.submitted[-1].prompt_token_ids).decode()


def written(*messages: tuple[str, str]) -> str:
    """A conversation in the template's own terms, up to the assistant's turn."""
    shown = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return shown + "<|im_start|>assistant\n"


def test_case_104_functions_are_described_in_the_system_message(scripted: Client) -> None:
    scripted.say("Hi")
    told = ("system", DESCRIPTION)
    for choice in (None, "auto", "none", "required", NAMED):
        assert prompt(scripted, tools=TOOLS, tool_choice=choice) == written(told, ("user", "Hello"))
    both = ("system", f"Be brief.\n\n{DESCRIPTION}")
    assert prompt(scripted, tools=TOOLS, messages=[SYSTEM, USER]) == written(both, ("user", "Hello"))
    parts = {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
    assert prompt(scripted, tools=TOOLS, messages=[parts, USER]) == written(both, ("user", "Hello"))


def test_case_104_calls_and_results_are_text(scripted: Client) -> None:
    scripted.say("Hi")
    made = [
        {"id": f"call_{place}", "type": "function", "function": {"name": "clock", "arguments": arguments}}
        for place, arguments in enumerate(['{"a": 1}', ""])
    ]
    results = [{"role": "tool", "tool_call_id": f"call_{place}", "content": "noon"} for place in range(2)]
    empty = CALL.replace('{"a": 1}', "{}")
    history = [USER, {"role": "assistant", "content": None, "tool_calls": made}, *results]
    shown = [
        ("user", "Hello"),
        ("assistant", f"{CALL}\n{empty}"),
        ("user", "\n".join(["<tool_response>\nnoon\n</tool_response>"] * 2)),
    ]
    for tools, before in ((None, []), (TOOLS, [("system", DESCRIPTION)])):
        assert prompt(scripted, messages=history, tools=tools) == written(*before, *shown)
        said = {"role": "assistant", "content": "Let me see", "tool_calls": made[:1]}
        again = [*history, {"role": "assistant", "content": "Noon"}, USER, said, results[0], USER]
        assert prompt(scripted, messages=again, tools=tools) == written(
            *before,
            *shown,
            ("assistant", "Noon"),
            ("user", "Hello"),
            ("assistant", f"Let me see\n{CALL}"),
            ("user", "<tool_response>\nnoon\n</tool_response>"),
            ("user", "Hello"),
        )


@pytest.mark.parametrize("choice", [None, "required", NAMED])
def test_case_104_calls_are_read_and_required_ones_forced(scripted: Client, choice: Any) -> None:
    scripted.say(f"Hm\n{CALL}")
    body: Json = {"tools": TOOLS, "tool_choice": choice, "logprobs": True}
    found = whole(scripted.chat(**body))
    assert (found["content"], found["calls"], found["finish"]) == ("Hm", [("clock", '{"a": 1}')], "tool_calls")
    check_spelling(found)
    assert fold(scripted.events(CHAT, **body)) == found
    grammar = scripted.engine.submitted[-1].sampling.grammar
    assert (grammar is None) == (choice is None)
    assert choice is None or "日本" in json.dumps(json.loads(grammar or ""), ensure_ascii=False)


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE.replace(
            "{% for", "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{% for", 1
        ),
        CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message.content if message.role != 'system' }}"),
    ],
    ids=["refuses", "ignores"],
)
def test_case_104_without_a_system_message_the_user_tells(template: str) -> None:
    with running(byte_level_tokenizer(template=template), ServerConfig()) as shared, fresh(shared, 2048) as client:
        client.say("Hi")
        assert prompt(client, tools=TOOLS[1:]) == written(
            ("user", f"{DESCRIPTION.replace(_line(WEATHER), '')}\n\nHello")
        )


def _line(function: Json) -> str:
    return json.dumps(function, ensure_ascii=False) + "\n"


def test_case_104_a_form_that_is_not_read_is_told_in_words() -> None:
    """A template that asks for calls which are no JSON is not shown the functions."""
    template = "{% if tools %}{{ tools }}<function=f>{% endif %}" + CHAT_TEMPLATE
    with running(byte_level_tokenizer(template=template), ServerConfig()) as shared, fresh(shared, 2048) as client:
        client.say(CALL)
        assert "<function=" not in prompt(client, tools=TOOLS[1:])
        assert whole(client.chat(tools=TOOLS[1:], tool_choice="required"))["calls"] == [("clock", '{"a": 1}')]


def test_case_104_a_parser_that_cannot_be_used_is_an_error_at_start() -> None:
    tokenizer = byte_level_tokenizer()
    for name in ("mistral", "llama3_json"):
        with pytest.raises(StartupError, match=f"tool_call_parser '{name}' .* shows no tools"):
            create_app(new_engine(), tokenizer, ServerConfig(tool_call_parser=name), model_name=MODEL)
    with running(tokenizer, ServerConfig(tool_call_parser="hermes")) as shared, fresh(shared, 2048) as client:
        client.say(CALL)
        assert whole(client.chat(tools=TOOLS))["calls"] == [("clock", '{"a": 1}')]
    with running(tokenizer, ServerConfig(tool_call_parser="none")) as client:
        error = client.post(CHAT, messages=[USER], tools=TOOLS).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "unsupported")


@pytest.mark.model
def test_case_104_a_real_model_is_held_to_the_call(embedded: RealServer) -> None:
    choice = embedded.choice(CHAT, tools=TOOLS, tool_choice=NAMED, max_tokens=80, seed=1)
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], choice["finish_reason"]) == ("get_weather", "tool_calls")
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
