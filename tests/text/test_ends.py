"""The ends of a reply, and the chat templates of a model: all places that name one count."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neper.engine.llm import LLM
from neper.errors import InvalidRequestError, ModelLoadError
from neper.models.gguf_metadata import Metadata
from neper.models.gguf_tokenizer import end_token_ids, write_tokenizer
from neper.models.source import named_ends
from neper.text.ends import describe_ends, reply_ends
from neper.text.tokenizer import Tokenizer
from tests.helpers.templates import NAMES, TEMPLATES, template_source
from tests.server.conftest import byte_level_tokenizer
from tests.text.test_control_texts import new_backend

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("name", NAMES)
def test_case_84_a_template_s_own_end(name: str) -> None:
    backend = new_backend()
    ends = sorted({own.end for own in TEMPLATES.values()} - {""})
    backend.add_special_tokens(ends)
    ours = Tokenizer(backend, {"eos_token": "</s>"}, template_source(name))
    end = TEMPLATES[name].end
    assert ours.chat_end() == (backend.token_to_id(end) if end else None)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",  # an end that is text is none
        "{% for m in messages %}{{ m.content }}<tool_call>{% endfor %}",  # nor is a token that is no control token
        "{{ messages[0].content }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_case_84_a_base_model_gets_no_end_that_is_text(template: str) -> None:
    ours = byte_level_tokenizer(template=template, tags=["<tool_call>"])
    assert ours.chat_end() is None
    assert reply_ends(ours, {}) == {2: ["tokenizer"]}


def test_case_84_all_of_them_and_where_they_are_said(tiny_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_dir(), tmp_path / "copy"))
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 0]}')
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    ours = Tokenizer.from_directory(directory)
    ends = reply_ends(ours, named_ends(directory))
    assert ends == {
        5: ["generation_config.json"],
        0: ["generation_config.json", "config.json"],
        2: ["tokenizer", "chat template"],
    }
    assert describe_ends(ours, ends) == (
        "a reply ends at '#' (5, generation_config.json), "
        "'<|endoftext|>' (0, generation_config.json, config.json), '<|im_end|>' (2, tokenizer, chat template)"
    )
    assert LLM(str(directory)).eos_token_ids == (5, 0, 2)
    assert "no token ends a reply" in describe_ends(ours, {})


def metadata(**changes: Any) -> Metadata:
    tokens = ["a", "b", "ab", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "</s>", "<|end|>"]
    return Metadata(
        {
            "general.architecture": "llama",
            "llama.context_length": 16,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 3, 3, 1, 3],
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.eos_token_id": 4,
        }
        | {key.replace("__", "."): value for key, value in changes.items()}
    )


def test_case_84_a_gguf_file_that_names_one_of_several() -> None:
    # </s> is no control token here, but a word.
    assert end_token_ids(metadata()) == [4, 3, 5, 6, 8]
    assert end_token_ids(metadata(tokenizer__ggml__eos_token_id=0, tokenizer__ggml__eot_token_id=1))[:2] == [0, 1]
    channels = [*metadata()["tokenizer.ggml.tokens"][:5], "<|channel|>", "<|return|>", "</s>", "<|end|>"]
    assert end_token_ids(metadata(tokenizer__ggml__tokens=channels)) == [4, 3, 6]


def test_case_100_named_templates_of_a_gguf_file(tmp_path: Path) -> None:
    more = {"tokenizer__chat_template": "a", "tokenizer__chat_template__tool_use": "{{ tools }}b"}
    write_tokenizer(metadata(**more), tmp_path)
    ours = Tokenizer.from_directory(tmp_path)
    assert ours.chat_template == {"default": "a", "tool_use": "{{ tools }}b"}
    assert ours.apply_chat_template([USER]) == ours.encode("a")
    assert ours.apply_chat_template([USER], template_kwargs={"tools": [7]}) == ours.encode("[7]b")
    write_tokenizer(metadata(tokenizer__chat_template="b"), tmp_path)
    assert Tokenizer.from_directory(tmp_path).chat_template == "b"


def test_case_100_additional_templates_of_a_directory(tiny_dir: Callable[..., Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_dir(), tmp_path / "copy"))
    (directory / "chat_template.jinja").write_text("fox")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("dog{{ tools }}")
    (directory / "additional_chat_templates" / "rag.jinja").write_text("{% broken")
    ours = Tokenizer.from_directory(directory)
    ours.check_chat_template()  # one that nobody uses may be what it likes
    assert ours.apply_chat_template([USER]) == ours.encode("fox")
    assert ours.apply_chat_template([USER], template_kwargs={"tools": [7]}) == ours.encode("dog[7]")
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{% for %}")
    with pytest.raises(ModelLoadError, match="does not compile: line 1"):
        Tokenizer.from_directory(directory).check_chat_template()
    given = Tokenizer.from_directory(directory, chat_template="sun")
    assert given.apply_chat_template([USER], template_kwargs={"tools": [7]}) == given.encode("sun")


@pytest.mark.parametrize("templates", [{}, {"rag": "fox"}, {"rag": "{% broken"}, {"tool_use": "dog<|im_end|>"}])
def test_case_100_several_templates_without_a_default_harm_no_start(templates: dict[str, str]) -> None:
    ours = byte_level_tokenizer(template=templates)
    ours.check_chat_template()
    assert ours.chat_end() is None
    assert reply_ends(ours, {}) == {2: ["tokenizer"]}
    assert ours.new_call_id().startswith("call_")
    with pytest.raises(InvalidRequestError, match="no default chat template"):
        ours.apply_chat_template([USER])
    if "tool_use" in templates:
        ids = ours.apply_chat_template([USER], template_kwargs={"tools": [7]})
        assert ours.decode_bytes(ids) == b"dog<|im_end|>"


@pytest.mark.parametrize("value", ['[{"name": "default"}]', "[5]", '["x"]'])
def test_case_100_a_malformed_list_is_refused(tiny_dir: Callable[..., Path], tmp_path: Path, value: str) -> None:
    directory = Path(shutil.copytree(tiny_dir(), tmp_path / "copy"))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": json.loads(value)}))
    with pytest.raises(ModelLoadError, match="chat_template of"):
        Tokenizer.from_directory(directory)
