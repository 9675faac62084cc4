"""Tokens as people are shown them: their text and name, their probability and its shade, and the alternatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from neper.text.tokenizer import token_name
from neper.types import PackedRows


@dataclass(frozen=True)
class Shade:
    """The look of tokens of a probability of at least `least`.

    Attributes:
        style: on a terminal; "" = unshaded.
        background, foreground: on a page, as CSS colours; "" = unshaded.
    """

    least: float
    style: str
    background: str
    foreground: str


SHADES = (
    Shade(0.9, "", "", ""),
    Shade(0.7, "black on color(230)", "#ffffd7", "#000000"),
    Shade(0.4, "black on color(222)", "#ffd787", "#000000"),
    Shade(0.15, "black on color(209)", "#ff875f", "#000000"),
    Shade(0.0, "white on color(124)", "#af0000", "#ffffff"),
)
"""From sure to unsure. Sure tokens stay unshaded, so that the unsure ones stand out.

Every background sets its own text colour, which is readable on light and dark. The darker, the less sure: the order can
be told without seeing colours.
"""


@dataclass(frozen=True)
class Alternative:
    text: str
    logprob: float

    @property
    def probability(self) -> float:
        return math.exp(self.logprob)


@dataclass(frozen=True)
class ShownToken:
    """A token of the reply.

    Attributes:
        text: the text that it added to the reply: "" where it only began a character, or is in no text.
        name: its own text, also where it added none to the reply; `bytes:\\xf0\\x9f` for a piece of a character.
        logprob: natural log of its probability.
        alternatives: the likeliest tokens at its place, best first.
    """

    text: str
    name: str
    logprob: float
    alternatives: tuple[Alternative, ...] = ()

    @property
    def probability(self) -> float:
        return math.exp(self.logprob)


def shown_tokens(texts: Sequence[str], rows: PackedRows, token_bytes: Callable[[int], bytes]) -> list[ShownToken]:
    """Tokens of one reply or step, from the text that each released and the scores aligned with them."""
    shown = []
    for text, token_id, logprob, ids, values in zip(
        texts,
        rows.token_ids.tolist(),
        rows.logprob.tolist(),
        rows.top_ids.tolist(),
        rows.top_logprobs.tolist(),
        strict=True,
    ):
        listed = tuple(
            Alternative(token_name(token_bytes(i)), value) for i, value in zip(ids, values, strict=True) if i >= 0
        )
        shown.append(ShownToken(text, token_name(token_bytes(token_id)), logprob, listed))
    return shown


def shade(probability: float) -> Shade:
    """The shade of a token of this probability."""
    return next((shade for shade in SHADES if probability >= shade.least), SHADES[0])


def shade_labels() -> list[tuple[str, Shade]]:
    """Each shade with the probabilities that it stands for."""
    labels = [f">= {shade.least:.0%}" for shade in SHADES[:-1]]
    return list(zip([*labels, f"< {SHADES[-2].least:.0%}"], SHADES, strict=True))


def percent(probability: float) -> str:
    return f"{100 * probability:.2f}%"


def summary(tokens: Sequence[ShownToken], finish_reason: str) -> str:
    """One line on the whole reply."""
    ends = {"stop": "the model ended its turn", "length": "it reached the token limit"}
    count = f"{len(tokens)} token{'' if len(tokens) == 1 else 's'}"
    if not tokens:
        return count
    mean = sum(token.logprob for token in tokens) / len(tokens)
    scores = f"mean logprob {mean:.3f}, perplexity {math.exp(-mean):.2f}"
    return f"{count}, {scores}; ended because {ends.get(finish_reason, finish_reason)}"
