"""What chat templates of real models take, and that a conversation with calls reaches each of them in its own terms.

The oracle is transformers, which renders a conversation that was written by hand in a template's terms.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from neper.text.chat_template import ChatTemplate
from neper.text.history import new_call_id, short_id
from tests.helpers.templates import NAMES, SPECIAL, TEMPLATES, Own, template_source

PARIS = {"city": "Paris", "days": 2}


def oracle(name: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    [text], _ = render_jinja_template(
        [messages], chat_template=template_source(name), add_generation_prompt=True, **SPECIAL, **kwargs
    )
    return str(text)


def render(name: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return ChatTemplate(template_source(name), SPECIAL).render(messages, template_kwargs=kwargs)


def tool(name: str = "get_weather") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "It.", "parameters": parameters}}


def call(call_id: str, arguments: Any, name: str = "get_weather") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def conversation(*, ids: tuple[str, str], arguments: tuple[Any, Any], **absent: Any) -> list[dict[str, Any]]:
    """Three turns: a call and its result, a second one, an answer and a new question."""
    found: list[dict[str, Any]] = [{"role": "user", "content": "The weather?"}]
    for call_id, given in zip(ids, arguments, strict=True):
        found.append({"role": "assistant", **absent, "tool_calls": [call(call_id, given)]})
        found.append({"role": "tool", "tool_call_id": call_id, "content": '{"sun": true}'})
    return [*found, {"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "Thanks. And now?"}]


def in_own_terms(own: Own, ids: tuple[str, str]) -> list[dict[str, Any]]:
    if own.written:
        found: list[dict[str, Any]] = [{"role": "user", "content": "The weather?"}]
        for call_id, given in zip(ids, (PARIS, {}), strict=True):
            text = json.dumps({"name": "get_weather", "arguments": given})
            found.append({"role": "assistant", "content": f"<tool_call>\n{text}\n</tool_call>"})
            result = {"role": "tool", "tool_call_id": call_id, "content": '{"sun": true}'}
            if own.results_written:
                result = {"role": "user", "content": '<tool_response>\n{"sun": true}\n</tool_response>'}
            found.append(result)
        found += [{"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "Thanks. And now?"}]
    else:
        both = (json.dumps(PARIS), "{}") if own.text_arguments else (PARIS, {})
        absent = {} if own.content == "missing" else {"content": None if own.content == "null" else ""}
        found = conversation(ids=ids, arguments=both, **absent)
    if own.parts:
        for message in found:
            message["content"] = [{"type": "text", "text": message["content"]}]
    return found


@pytest.mark.parametrize("absent", [{"content": None}, {"content": ""}, {}], ids=["null", "empty", "missing"])
@pytest.mark.parametrize("name", NAMES)
def test_case_78_79_80_calls_in_a_history(name: str, absent: dict[str, Any]) -> None:
    own = TEMPLATES[name]
    ids = ("a1B2c3D4e", "123456789") if own.short_ids else ("call_0123456789abcdef01234567", "call_x")
    # No text is no arguments.
    given = conversation(ids=ids, arguments=(json.dumps(PARIS), ""), **absent)
    before = json.dumps(given)
    text = render(name, given)
    assert text == oracle(name, in_own_terms(own, ids))
    assert "Paris" in text
    assert text.count("sun") == 2
    assert json.dumps(given) == before


@pytest.mark.parametrize("name", ["mistral_nemo", "mistral_small"])
def test_case_79_foreign_ids_become_ones_that_the_template_takes(name: str) -> None:
    foreign = ("call_0123456789abcdef01234567", "toolu-é")
    mapped = tuple(map(short_id, foreign))
    assert all(len(one) == 9 and one.isascii() and one.isalnum() for one in mapped)
    given = conversation(ids=foreign, arguments=(json.dumps(PARIS), "{}"))
    text = render(name, given)
    assert text == oracle(name, in_own_terms(TEMPLATES[name], (mapped[0], mapped[1])))
    for one in mapped:
        assert text.count(one) == 2  # the call's, and its result's
    terms = ChatTemplate(template_source(name), SPECIAL).terms
    made = [new_call_id(terms) for _ in range(50)]
    assert [short_id(one) for one in made] == made
    assert len(set(made)) == 50


def test_ids_are_openai_s_where_a_template_does_not_mind() -> None:
    made = new_call_id(ChatTemplate(template_source("qwen3")).terms)
    assert made.startswith("call_")
    assert len(made) == 29


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2", "gpt_oss"])
def test_two_calls_of_one_message_where_a_template_takes_one(name: str) -> None:
    user = {"role": "user", "content": "The weather?"}
    both = [call("call_a", '{"city": "Paris"}'), call("call_b", '{"city": "Rome"}')]
    results = [{"role": "tool", "tool_call_id": one, "content": f"of {one}"} for one in ("call_b", "call_a")]
    text = render(name, [user, {"role": "assistant", "content": None, "tool_calls": both}, *results])
    absent = {"content": ""} if TEMPLATES[name].content == "empty" else {}
    expected: list[dict[str, Any]] = [user]
    for one, city in (("call_a", "Paris"), ("call_b", "Rome")):
        expected.append({"role": "assistant", **absent, "tool_calls": [call(one, {"city": city})]})
        expected.append({"role": "tool", "tool_call_id": one, "content": f"of {one}"})
    assert text == oracle(name, expected)


def test_a_text_beside_calls_is_kept_where_a_template_shows_calls_alone() -> None:
    user = {"role": "user", "content": "The weather?"}
    message = {"role": "assistant", "content": "I look.", "tool_calls": [call("call_a", '{"city": "Paris"}')]}
    result = {"role": "tool", "tool_call_id": "call_a", "content": "Sun"}
    text = render("deepseek_r1_distill", [user, message, result])
    assert "I look." in text
    assert '{"city": "Paris"}' in text


@pytest.mark.parametrize("name", NAMES)
def test_tools_are_shown_as_transformers_shows_them(name: str) -> None:
    own = TEMPLATES[name]
    if own.written and own.results_written:
        pytest.skip("the template has no tools")
    ids = ("a1B2c3D4e", "123456789")
    given = conversation(ids=ids, arguments=(json.dumps(PARIS), "{}"))
    assert render(name, given, tools=[tool()]) == oracle(name, in_own_terms(own, ids), tools=[tool()])


def test_a_template_for_tools_alone() -> None:
    """It fails without tools, so it is asked with some."""
    source = (
        "{% for t in tools %}{{ t.function.name }}{% endfor %}{% for m in messages %}[{{ m.role }}]"
        "{{ m.tool_calls[0].function.arguments | tojson if m.tool_calls else m.content }}{% endfor %}"
    )
    messages = conversation(ids=("a", "b"), arguments=('{"city": "Paris"}', "{}"))
    template = ChatTemplate({"default": "{{ messages[0].content }}", "tool_use": source})
    text = template.render(messages, template_kwargs={"tools": [tool()]})
    assert text.startswith('get_weather[user]The weather?[assistant]{"city": "Paris"}[tool]{"sun": true}')


def test_the_templates_are_told_apart() -> None:
    """Without this, a table of one kind would pass."""
    assert {own.content for own in TEMPLATES.values()} == {"null", "empty"}
    assert len({own.text_arguments for own in TEMPLATES.values()}) == 2
    assert len(NAMES) >= 12
