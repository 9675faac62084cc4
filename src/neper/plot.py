"""Plots of a reply's probabilities, with matplotlib (`pip install 'neper[plot]'`).

from neper import plot

plot.surprisal(reply)
plot.heatmap(reply, top=8)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from neper.engine.completion import Completion
from neper.shown import ShownToken

MAX_LABELS = 60
"""The most tokens whose texts are written on an axis. More are numbered."""

# Okabe and Ito's colours, which people with any colour vision can tell apart, on white and on black.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_MARKERS = "os^Dv*"
_MAP = "cividis"  # bright is likely; made for all kinds of colour vision
_TALL = 0.34  # inches of a row of the heatmap
_WIDE = 0.62


def surprisal(*scored: Completion | npt.ArrayLike, labels: Sequence[str] | None = None, axes: Any = None) -> Any:
    """Draw how surprising each token was, in bits: -log2 of its probability. 0 is sure, 1 as a coin.

    Args:
        *scored: one or several of: a reply with logprobs, of which the scored prompt comes before the text; or logprobs
            in natural log [n], as `LLM.score` returns them.
        labels: a name for each, for the legend; default none for one, numbers for several.
        axes: matplotlib's, to draw into; default new ones.

    Returns:
        The axes. They have a line for each, whose y data are the bits.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a reply without logprobs, or a wrong number of labels.
    """
    if labels is not None and len(labels) != len(scored):
        raise ValueError(f"labels has {len(labels)} names for {len(scored)} lines")
    axes = _axes(axes, (10, 3.6))
    lines = [_line(one) for one in scored]
    for place, (bits, _) in enumerate(lines):
        name = f"{place + 1}" if labels is None else labels[place]
        mean = f"mean {np.mean(bits):.2f} bits per token" if len(bits) else "no tokens"
        style = {"color": _COLOURS[place % 6], "marker": _MARKERS[place % 6], "linewidth": 1.5, "markersize": 5}
        axes.plot(np.arange(len(bits)), bits, label=f"{name}: {mean}", **style)
        if labels is None and len(lines) == 1:
            axes.set_title(mean, loc="left", fontsize="medium")
    if texts := _common_texts([texts for _, texts in lines]):
        _write_tokens(axes, texts)
    else:
        axes.set_xlabel("place of the token")
    axes.set_ylabel("surprisal in bits")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.02)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_title("left") == "":
        axes.legend(frameon=False)
    return axes


def heatmap(reply: Completion, *, top: int = 8, axes: Any = None) -> Any:
    """Draw the likeliest tokens at each place of a reply, best at the top; the sampled token has a frame.

    A sampled token that is not among the best `top` is in a row of its own below them.

    Args:
        reply: with logprobs of at least one alternative.
        top: the most alternatives to show.
        axes: matplotlib's, to draw into; default new ones.

    Returns:
        The axes. Their image has the probabilities, [rows, tokens], NaN where there is no token.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the reply has no alternatives.
    """
    tokens = reply.shown()
    count = min(top, max((len(token.alternatives) for token in tokens), default=0))
    if count < 1:
        raise ValueError("this reply has no alternatives: ask for them with LogprobParams(top_k=5)")
    names, chances, sampled = _cells(tokens, count)
    axes = _axes(axes, (1.4 + _WIDE * len(tokens), 1.2 + _TALL * len(names)))
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    image = axes.imshow(chances, cmap=_MAP, vmin=0, vmax=1, aspect="auto")
    for row, column in zip(*np.nonzero(~np.isnan(chances)), strict=True):
        red, green, blue, _ = colormaps[_MAP](chances[row, column])
        ink = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
        text = _visible(names[row][column], 8)
        axes.text(column, row, text, color=ink, ha="center", va="center", fontsize=8, parse_math=False)
    for column, row in enumerate(sampled):
        frame = Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="#D55E00", linewidth=2, clip_on=False)
        axes.add_patch(frame)
    ranks = [str(place + 1) for place in range(count)]
    axes.set_yticks(range(len(names)), [*ranks, "sampled"][: len(names)])
    axes.set_ylabel("rank")
    _write_tokens(axes, [token.text for token in tokens])
    axes.figure.colorbar(image, ax=axes, label="probability", pad=0.01)
    return axes


def _axes(given: Any, size: tuple[float, float]) -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise ImportError("neper.plot needs matplotlib: pip install 'neper[plot]'") from None
    return pyplot.subplots(figsize=size, layout="constrained")[1] if given is None else given


def _line(scored: Completion | npt.ArrayLike) -> tuple[npt.NDArray[np.float64], list[str]]:
    """The bits of a line's tokens [n], and their texts; none where they are not known."""
    if not isinstance(scored, Completion):
        return np.asarray(scored, dtype=np.float64) / -math.log(2), []
    tokens = scored.shown_prompt()
    if scored.logprobs is not None or not tokens:
        tokens = tokens + scored.shown()
    return np.array([token.logprob for token in tokens]) / -math.log(2), [token.text for token in tokens]


def _common_texts(lines: Sequence[Sequence[str]]) -> list[str]:
    """The text of each place, or two of them with a slash between; none where lines are long, or differ in more."""
    if not lines or len({len(texts) for texts in lines}) > 1 or len(lines[0]) > MAX_LABELS:
        return []
    different = [list(dict.fromkeys(texts)) for texts in zip(*lines, strict=True)]
    return [] if any(len(texts) > 2 for texts in different) else ["/".join(texts) for texts in different]


def _cells(tokens: Sequence[ShownToken], count: int) -> tuple[list[list[str]], npt.NDArray[np.float64], list[int]]:
    """Names and probabilities [rows, tokens] of the heatmap, and the row of each sampled token."""
    chances = np.full((count + 1, len(tokens)), np.nan)
    names = [[""] * len(tokens) for _ in range(count + 1)]
    sampled = []
    for column, token in enumerate(tokens):
        listed = [(one.text, one.probability) for one in token.alternatives[:count]]
        row = next((row for row, (name, _) in enumerate(listed) if name == token.name), count)
        if row == count:
            listed += [("", math.nan)] * (count - len(listed)) + [(token.name, token.probability)]
        for place, (name, probability) in enumerate(listed):
            names[place][column], chances[place, column] = name, probability
        sampled.append(row)
    if count not in sampled:
        return names[:count], chances[:count], sampled
    return names, chances, sampled


def _write_tokens(axes: Any, texts: Sequence[str]) -> None:
    """Write the tokens' texts at the x axis."""
    axes.set_xticks(range(len(texts)), [_visible(text, 16) for text in texts], rotation=60, ha="right", fontsize=9)
    for label in axes.get_xticklabels():
        label.set_parse_math(False)  # dollars are dollars
        label.set_rotation_mode("anchor")


def _visible(text: str, longest: int) -> str:
    """A token's text with its spaces as dots, and an escape for what the font does not have."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))

    def character(one: str) -> str:
        there = one.isprintable() and font.get_char_index(ord(one))
        return one if there else one.encode("unicode_escape").decode()

    shown = "".join(map(character, text)).replace(" ", "·")
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"
