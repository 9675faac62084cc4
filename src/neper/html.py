"""A reply on a page: its text with each token shaded by its probability, as HTML that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Sequence

from neper.shown import Shade, ShownToken, percent, shade, shade_labels, summary

MAX_SHADED = 5000
"""The most tokens that are shaded. The rest of a longer reply is plain text: notebooks keep what they are shown."""

MAX_LISTED = 10
"""The most alternatives that a token's title has."""

# Text in the page's own colour, on whatever background it has. A reply cannot turn the direction of the page's text.
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;font-family:monospace;line-height:1.6"
_NOTES = "font-size:smaller;margin-top:0.5em"


def shaded_reply(tokens: Sequence[ShownToken], finish_reason: str) -> str:
    """A `div` with the tokens' text, a title with the alternatives on each, and the meaning of the shades below."""
    spans = [_span(token) for token in tokens[:MAX_SHADED]]
    rest = html.escape("".join(token.text for token in tokens[MAX_SHADED:]))
    meaning = " ".join(
        f'<span style="{_style(one)};padding:0 0.4em">{html.escape(name)}</span>' for name, one in shade_labels()
    )
    notes = f"probability of each token: {meaning}<br>{html.escape(summary(tokens, finish_reason))}"
    return (
        f'<div><div class="neper-text" style="{_TEXT}">{"".join(spans)}{rest}</div>'
        f'<div style="{_NOTES}">{notes}</div></div>'
    )


def plain_reply(text: str) -> str:
    """A `div` with a text of which nothing else is known."""
    return f'<div><div class="neper-text" style="{_TEXT}">{html.escape(text)}</div></div>'


def _span(token: ShownToken) -> str:
    if not token.text:
        return ""
    lines = [f"{token.name!r}  {percent(token.probability)}"]
    lines += [
        f"{place}. {one.text!r}  {percent(one.probability)}"
        for place, one in enumerate(token.alternatives[:MAX_LISTED], 1)
    ]
    title = "&#10;".join(map(html.escape, lines))
    return f'<span title="{title}" style="{_style(shade(token.probability))}">{html.escape(token.text)}</span>'


def _style(shade: Shade) -> str:
    return f"background:{shade.background};color:{shade.foreground}" if shade.background else "color:inherit"
