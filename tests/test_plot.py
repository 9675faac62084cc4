"""Plots by their data: bits of each token, and the probabilities of alternatives with the sampled one marked."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from neper import PackedRows
from tests.test_html import completion

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture
def plot() -> Iterator[Any]:
    matplotlib.use("agg")
    from matplotlib import pyplot

    from neper import plot

    yield plot
    pyplot.close("all")


def drawn(axes: Any) -> None:
    """Draw it: texts that a font lacks, or that look like mathematics, would warn or fail."""
    axes.figure.canvas.draw()


def test_the_lines_are_bits(plot: Any) -> None:
    given = np.array([-0.5, -math.log(2), -3.25], np.float32)
    axes = plot.surprisal(completion(), given, labels=["reply", "text"])
    first, second = axes.get_lines()
    assert first.get_ydata() == pytest.approx(np.array([0.5, 1.0]) / math.log(2))
    assert second.get_ydata() == pytest.approx(-given.astype(float) / math.log(2))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "reply: mean 1.08 bits per token",
        "text: mean 2.14 bits per token",
    ]
    drawn(axes)


def test_tokens_are_written_where_there_is_room(plot: Any) -> None:
    prompt = PackedRows.pack([3, 4], [-1.0, -2.0], [1, 1])
    axes = plot.surprisal(completion(prompt_logprobs=prompt))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["<3>", "<4>", "<b>", "&"]
    assert axes.get_lines()[0].get_ydata() == pytest.approx(np.array([1.0, 2.0, 0.5, 1.0]) / math.log(2))
    other = plot.surprisal(completion(), completion(logprobs=None, prompt_logprobs=prompt))
    assert [label.get_text() for label in other.get_xticklabels()] == ["<b>/<3>", "&/<4>"]


def test_the_heatmap_has_the_alternatives_and_frames_the_sampled_ones(plot: Any) -> None:
    axes = plot.heatmap(completion(), top=2)
    [image] = axes.get_images()
    best, second = math.exp(-0.5), math.exp(-2.0)
    assert np.ma.filled(image.get_array(), np.nan) == pytest.approx(np.array([[best, best], [second, second]]))
    assert [text.get_text() for text in axes.texts] == ["<7>", "<9>", "<5>", "<8>"]
    assert [(frame.get_x() + 0.5, frame.get_y() + 0.5) for frame in axes.patches] == [(0, 0), (1, 1)]
    drawn(axes)


def test_a_sampled_token_that_is_not_listed_has_a_row_of_its_own(plot: Any) -> None:
    axes = plot.heatmap(completion(), top=1)
    [image] = axes.get_images()
    assert np.ma.filled(image.get_array(), np.nan) == pytest.approx(
        np.array([[math.exp(-0.5)] * 2, [np.nan, math.exp(-1.0)]]), nan_ok=True
    )
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "sampled"]


def test_texts_are_no_mathematics_and_need_no_font(plot: Any) -> None:
    reply = completion()
    tokens = [reply.tokens[0]._replace(text="$\\frac$"), reply.tokens[1]._replace(text=" 日\n")]
    axes = plot.surprisal(completion(tokens=tokens))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["$\\frac$", "·\\u65e5\\n"]
    drawn(axes)


def test_they_draw_into_given_axes(plot: Any) -> None:
    from matplotlib import pyplot

    _, (left, right) = pyplot.subplots(1, 2)
    assert plot.surprisal(completion(), axes=left) is left
    assert plot.heatmap(completion(), axes=right) is right


def test_what_cannot_be_drawn_is_said(plot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no logprobs"):
        plot.surprisal(completion(logprobs=None))
    with pytest.raises(ValueError, match="no alternatives"):
        plot.heatmap(completion(logprobs=PackedRows.pack([7, 8, 2], [-1.0] * 3)))
    with pytest.raises(ValueError, match="1 names for 2 lines"):
        plot.surprisal([-1.0], [-2.0], labels=["a"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'neper\[plot\]'"):
        plot.surprisal([-1.0])
