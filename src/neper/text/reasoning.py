"""Reasoning: the tags around a model's thinking, and prompts that leave it open."""

from __future__ import annotations

from typing import NamedTuple

from neper.errors import StartupError
from neper.text.tokenizer import Tokenizer


class ReasoningTags(NamedTuple):
    open: str
    close: str

    def opened_by(self, prompt: str) -> bool:
        """True for a prompt that has begun the thinking."""
        return prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """True for a prompt that has ended the thinking, so that none comes."""
        return prompt.rstrip().endswith(self.close)


REASONING_TAGS = {
    "think": ReasoningTags("<think>", "</think>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
}

REASONING_PARSERS = (*REASONING_TAGS, "none")
"""The names in a configuration."""


def reasoning_tags(tokenizer: Tokenizer, parser: str | None = None) -> ReasoningTags | None:
    """The tags of a model, by the name of a parser, or read from its chat template and its tokens; None: it has none.

    Raises:
        StartupError: no parser has that name.
    """
    if parser is not None:
        if parser not in REASONING_PARSERS:
            raise StartupError(f"reasoning_parser must be one of {', '.join(REASONING_PARSERS)}, got {parser!r}")
        return REASONING_TAGS.get(parser)
    for tags in REASONING_TAGS.values():
        if tags.close in tokenizer.chat_template_source or tokenizer.added_tokens.issuperset(tags):
            return tags
    return None
