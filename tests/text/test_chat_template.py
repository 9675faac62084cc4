"""Chat templates: what they render, against transformers where it renders the same, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from neper.errors import InvalidRequestError
from neper.text.chat_template import ChatTemplate
from neper.text.tokenizer import Tokenizer
from tests.text.conftest import Pair

USER = {"role": "user", "content": "What is the answer?"}
REPLY = {"role": "assistant", "content": " forty-two "}
LOOP = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def render(source: str, messages: list[Any] | None = None, **kwargs: Any) -> str:
    return ChatTemplate(source).render([USER] if messages is None else messages, **kwargs)


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}, {"continue_final_message": True}])
@pytest.mark.parametrize(
    "messages", [[USER], [USER, REPLY], [USER, REPLY, {"role": "user", "content": "日本 <|im_end|>"}]]
)
def test_ids_are_those_of_transformers(
    byte_level: Pair, messages: list[dict[str, Any]], options: dict[str, bool]
) -> None:
    options = {"add_generation_prompt": False} | options
    expected = byte_level.oracle.apply_chat_template(messages, return_dict=False, **options)
    assert byte_level.ours.apply_chat_template(messages, special_tokens_in_messages=True, **options) == expected


def test_the_generation_prompt_is_the_default(byte_level: Pair) -> None:
    text = byte_level.ours.decode_bytes(byte_level.ours.apply_chat_template([USER])).decode()
    assert text == "<|im_start|>user\nWhat is the answer?<|im_end|>\n<|im_start|>assistant\n"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert render(LOOP, [{"role": "user", "content": parts}]) == "[user]one two"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hello"],
        [{"content": "no role"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"type": "text", "text": "x"}}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "content": None}],
    ],
)
def test_malformed_messages_are_refused(messages: list[Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(LOOP, messages)
    assert (caught.value.param, caught.value.status) == ("messages", 400)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'] + messages[0]['missing'] }}",
        "{{ 1 / 0 }}",
        "{% for x in messages %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_fails_is_a_clear_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template") as caught:
        render(source)
    assert caught.value.param == "messages"


def test_the_templates_own_message_is_passed_on() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_the_templates_own_message_is_one_line() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(r"{{ raise_exception('roles\n\n  must\talternate\r\x1b') }}")
    assert caught.value.message == "the model's chat template failed: roles must alternate \ufffd"


def test_a_model_without_template(byte_level: Pair, tmp_path: Path) -> None:
    shutil.copytree(byte_level.path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ours.apply_chat_template([USER])


def test_templates_in_the_configuration(byte_level: Pair, tmp_path: Path) -> None:
    shutil.copytree(byte_level.path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text('{"chat_template": "dog"}')
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.apply_chat_template([USER]) == ours.encode("dog")
    (tmp_path / "chat_template.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "fox"}, {"name": "tool_use", "template": "{{ tools }}"}]}'
    )
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.apply_chat_template([USER]) == ours.encode("fox")
    assert ours.apply_chat_template([USER], template_kwargs={"tools": [7]}) == ours.encode("[7]")


def test_special_tokens_and_keywords_reach_the_template() -> None:
    template = ChatTemplate("{{ bos_token }}{{ eos_token }}{{ enable_thinking }}", {"bos_token": "<s>"})
    assert template.render([USER], template_kwargs={"enable_thinking": False}) == "<s>False"


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_keywords_cannot_replace_the_request(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(LOOP, template_kwargs={name: []})
    assert caught.value.param == "chat_template_kwargs"


def test_filters_and_tags_of_hugging_face_templates() -> None:
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{% generation %}x{{ messages[0].role }}{% endgeneration %}") == "xuser"
    assert render("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}") == "1"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


def test_nulls_are_left_out_and_tool_arguments_are_objects() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    source = (
        "{% for m in messages if m.tool_calls %}{{ m.content }} {{ m.tool_calls[0].function.arguments }}{% endfor %}"
    )
    assert render(source, [message]) == ' {"x": 1}'
    assert calls[0]["function"]["arguments"] == '{"x": 1}'  # the caller's messages stay as they were
    for arguments in ("not json", "[1]"):
        calls[0]["function"]["arguments"] = arguments
        each = "{% for m in messages %}{{ m.tool_calls[0].function.arguments if m.tool_calls }}{% endfor %}"
        assert render(each, [message]) == arguments


class TestContinueFinalMessage:
    def test_ends_where_the_content_ends(self) -> None:
        source = LOOP + "<end>"
        assert render(source, [USER, REPLY], continue_final_message=True, add_generation_prompt=False).endswith(
            "[assistant] forty-two "
        )

    def test_a_template_that_trims(self) -> None:
        source = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<end>{% endfor %}"
        text = render(source, [USER, REPLY], continue_final_message=True, add_generation_prompt=False)
        assert text.endswith("<end>[assistant]forty-two")

    def test_empty_content_keeps_the_header_whole(self) -> None:
        source = "{% for m in messages %}[{{ m.role }}]\n{{ m.content | trim }}{% endfor %}"
        empty = {"role": "assistant", "content": ""}
        assert render(source, [empty], continue_final_message=True, add_generation_prompt=False) == "[assistant]\n"

    def test_a_template_that_hides_it_is_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match="does not show"):
            render("{{ messages[0].role }}", continue_final_message=True, add_generation_prompt=False)

    def test_not_with_a_generation_prompt(self) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            render(LOOP, continue_final_message=True)
        assert caught.value.param == "continue_final_message"
