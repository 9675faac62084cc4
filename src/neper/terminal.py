"""A reply and its probabilities on a terminal, and as plain text: pure functions from tokens to output."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from neper.shown import ShownToken, percent, shade, shade_labels

PLAIN_HEADER = "token\tlogprob\tprobability\talternatives"


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
        style = shade(token.probability).style
        for line in printable(token.text).splitlines(keepends=True):
            body = line.rstrip("\n")
            text.append(body, style)
            text.append(line[len(body) :])
    return text


def legend() -> Text:
    """The meaning of the shades."""
    text = Text("probability of each token: ")
    for label, one in shade_labels():
        text.append(f" {label} ", one.style)
        text.append(" ")
    return text


def quoted(text: str, encoding: str = "utf-8") -> str:
    """Text as a JSON string without line ends and control characters, which `encoding` can spell."""
    string = json.dumps(text, ensure_ascii=not encodable(text, encoding))
    return "".join(c if unicodedata.category(c) != "Cc" else f"\\u{ord(c):04x}" for c in string)


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
            Text.assemble(cell(a.text), " ", (percent(a.probability), "dim")) for a in token.alternatives
        )
        table.add_row(Text(cell(token.name)), Text(percent(token.probability)), listed)
    return table


def plain_line(token: ShownToken, encoding: str = "utf-8") -> str:
    """One token as one line of tab-separated columns: token, logprob, probability, then `token probability` of each
    alternative. Tokens are JSON strings."""
    columns = [quoted(token.name, encoding), f"{token.logprob:.4f}", f"{token.probability:.4f}"]
    columns += [f"{quoted(a.text, encoding)} {a.probability:.4f}" for a in token.alternatives]
    return "\t".join(columns)
