"""Chat templates of real models (tests/data/templates), and the terms that each takes, read off it by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_DIRECTORY = Path(__file__).parents[1] / "data" / "templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@dataclass(frozen=True)
class Own:
    """A template's terms.

    Attributes:
        form: of the calls that the server reads off this model's replies; None where it reads none.
        content: of a message with calls alone.
        written: calls are not shown, so they are written into the text.
        results_written: neither are results.
        end: the token after an assistant's message.
    """

    form: Literal["hermes", "llama3_json", "mistral"] | None = None
    content: Literal["null", "empty", "missing"] = "null"
    text_arguments: bool = False
    short_ids: bool = False
    one_call: bool = False
    written: bool = False
    results_written: bool = False
    parts: bool = False
    end: str = "</s>"


TEMPLATES = {
    "qwen2_5": Own("hermes", end="<|im_end|>"),
    "qwen3": Own("hermes", content="empty", end="<|im_end|>"),
    "qwq": Own("hermes", content="empty", end="<|im_end|>"),
    "llama3_1": Own("llama3_json", one_call=True, end="<|eot_id|>"),
    "llama3_2": Own("llama3_json", one_call=True, end="<|eot_id|>"),
    "mistral_nemo": Own("mistral", short_ids=True),
    "mistral_small": Own("mistral", short_ids=True),
    "granite4": Own("hermes", end="<|end_of_text|>"),
    "deepseek_r1_distill": Own(text_arguments=True, end="<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "deepseek_v3_1": Own(end="<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "glm4": Own(content="empty", end=""),
    "gpt_oss": Own(content="empty", one_call=True, end="<|return|>"),
    "smollm3": Own(written=True, end="<|im_end|>"),
    "lfm2": Own(written=True, end="<|im_end|>"),
    "phi3_5": Own(written=True, results_written=True, end="<|end|>"),
    "gemma2": Own(written=True, results_written=True, end="<end_of_turn>"),
    "smolvlm": Own(written=True, parts=True, end="<end_of_utterance>"),
}
NAMES = tuple(TEMPLATES)


def template_source(name: str) -> str:
    return (_DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8")
