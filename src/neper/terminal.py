"""A reply and its probabilities on a terminal, and as plain text: pure functions from tokens to output."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from neper.text.tokenizer import token_name
from neper.types import PackedRows

# From sure to unsure: (least probability, style). Sure tokens stay unshaded, so that the unsure ones stand out. Every
# background sets its own text colour, which is readable on light and dark terminals.
SHADES: tuple[tuple[float, str], ...] = (
    (0.9, ""),
    (0.7, "black on color(230)"),
    (0.4, "black on color(222)"),
    (0.15, "black on color(209)"),
    (0.0, "white on color(124)"),
)
PLAIN_HEADER = "token\tlogprob\tprobability\talternatives"


@dataclass(frozen=True)
class Alternative:
    text: str
    logprob: float


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
    """Tokens of one step, from the text that each released and the scores aligned with them."""
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


def shade(probability: float) -> str:
    """Style of a token of this probability."""
    return next((style for least, style in SHADES if probability >= least), "")


def printable(text: str) -> str:
    """Text with control characters escaped, so that a reply cannot drive the terminal. Newline and tab stay."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else f"\\x{ord(c):02x}" for c in text)


def encodable(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def shaded(tokens: Iterable[ShownToken]) -> Text:
    """The tokens' text, each shaded by its probability. Line ends are not shaded: the shade would run to the margin."""
    text = Text()
    for token in tokens:
        style = shade(token.probability)
        for line in printable(token.text).splitlines(keepends=True):
            body = line.rstrip("\n")
            text.append(body, style)
            text.append(line[len(body) :])
    return text


def legend() -> Text:
    """The meaning of the shades."""
    text = Text("probability of each token: ")
    upper = 1.0
    for least, style in SHADES:
        label = f">= {least:.0%}" if least else f"< {upper:.0%}"
        text.append(f" {label} ", style)
        text.append(" ")
        upper = least
    return text


def quoted(text: str, encoding: str = "utf-8") -> str:
    """Text as a JSON string without line ends and control characters, which `encoding` can spell."""
    string = json.dumps(text, ensure_ascii=not encodable(text, encoding))
    return "".join(c if unicodedata.category(c) != "Cc" else f"\\u{ord(c):04x}" for c in string)


def percent(probability: float) -> str:
    return f"{100 * probability:.2f}%"


def alternatives_table(tokens: Iterable[ShownToken], encoding: str = "utf-8") -> Table:
    """One row per token: the token, its probability, and the listed alternatives with theirs."""

    def cell(text: str) -> str:
        return quoted(text, encoding).replace("\\\\", "\\")  # for the eye, not for a parser

    table = Table(show_edge=False, pad_edge=False)
    table.add_column("token", overflow="fold")
    table.add_column("probability", justify="right", no_wrap=True)
    table.add_column("alternatives", overflow="fold")
    for token in tokens:
        listed = Text("   ").join(
            Text.assemble(cell(a.text), " ", (percent(math.exp(a.logprob)), "dim")) for a in token.alternatives
        )
        table.add_row(Text(cell(token.name)), Text(percent(token.probability)), listed)
    return table


def plain_line(token: ShownToken, encoding: str = "utf-8") -> str:
    """One token as one line of tab-separated columns: token, logprob, probability, then `token probability` of each
    alternative. Tokens are JSON strings."""
    columns = [quoted(token.name, encoding), f"{token.logprob:.4f}", f"{token.probability:.4f}"]
    columns += [f"{quoted(a.text, encoding)} {math.exp(a.logprob):.4f}" for a in token.alternatives]
    return "\t".join(columns)


def summary(tokens: Sequence[ShownToken], finish_reason: str) -> str:
    """One line on the whole reply."""
    ends = {"stop": "the model ended its turn", "length": "it reached the token limit"}
    count = f"{len(tokens)} token{'' if len(tokens) == 1 else 's'}"
    if not tokens:
        return count
    mean = sum(token.logprob for token in tokens) / len(tokens)
    scores = f"mean logprob {mean:.3f}, perplexity {math.exp(-mean):.2f}"
    return f"{count}, {scores}; ended because {ends.get(finish_reason, finish_reason)}"
