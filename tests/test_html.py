"""A reply on a page: its text is the reply's, whatever is in it, and nothing of it becomes markup."""

from __future__ import annotations

import math
import pickle
from html.parser import HTMLParser
from typing import Any

from neper import Completion, FinishReason, PackedRows
from neper.html import MAX_SHADED, shaded_reply
from neper.shown import SHADES, Alternative, ShownToken
from neper.text.detokenizer import TextToken

HOSTILE = ["<script>", 'a"b', " onclick='x'", "&lt;", "</div>", "<!--", "\u202e", "\0", "日本", "\n ", "]]>", "$x$"]


class Page(HTMLParser):
    """The parts of a page: the text of the reply, elements, and attributes by name."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text = ""
        self.elements: set[str] = set()
        self.attributes: dict[str, list[str]] = {}
        self._inside = 0
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")
        if self._inside or ("class", "neper-text") in attrs:
            self._inside += tag != "br"

    def handle_endtag(self, tag: str) -> None:
        self._inside -= bool(self._inside)

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.text += data


def shown(text: str, probability: float = 0.5) -> ShownToken:
    return ShownToken(text, text, math.log(probability), (Alternative(f"{text}<b>", math.log(0.25)),))


def test_hostile_text_stays_text() -> None:
    page = Page(shaded_reply([shown(text) for text in HOSTILE], "<stop>"))
    assert page.text == "".join(HOSTILE)
    assert page.elements == {"div", "span", "br"}
    assert page.attributes.keys() == {"class", "style", "title"}
    assert page.attributes["title"] == [f"{text!r}  50.00%\n1. {text + '<b>'!r}  25.00%" for text in HOSTILE]


def test_each_token_has_the_shade_of_its_probability() -> None:
    tokens = [shown(str(place), least.least + 0.05) for place, least in enumerate(SHADES)]
    styles = Page(shaded_reply(tokens, "stop")).attributes["style"]
    for style, expected in zip(styles[1:], SHADES, strict=False):
        assert (f"background:{expected.background}" in style) is bool(expected.background)
        assert expected.foreground in style


def test_the_rest_of_a_long_reply_is_plain() -> None:
    page = Page(shaded_reply([shown("<a>")] * (MAX_SHADED + 2), "length"))
    assert page.text == "<a>" * (MAX_SHADED + 2)
    assert len(page.attributes["title"]) == MAX_SHADED


class Names:
    """A tokenizer of which only the bytes of ids are needed."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"<%d>" % token_id


def completion(**changes: Any) -> Completion:
    """Two visible tokens and an end token, with two alternatives each."""
    texts = ["<b>", "&"]
    rows = PackedRows.pack([7, 8, 2], [-0.5, -1.0, -3.0], [1, 2, 1], [[7, 5], [9, 8], [2, 7]], [[-0.5, -2.0]] * 3)
    values: dict[str, Any] = {
        "text": "".join(texts),
        "token_ids": [7, 8, 2],
        "logprobs": rows,
        "tokens": [TextToken(place, text, text.encode(), b"", True) for place, text in enumerate(texts)],
        "prompt_token_ids": [1, 3],
        "prompt_logprobs": None,
        "finish_reason": FinishReason.STOP,
        "stop_reason": None,
        "tokenizer": Names(),
    }
    return Completion(**{**values, **changes})


def test_a_completion_shows_its_visible_tokens() -> None:
    reply = completion()
    page = Page(reply._repr_html_())
    assert page.text == reply.text
    assert [token.alternatives[0].text for token in reply.shown()] == ["<7>", "<9>"]
    assert [token.logprob for token in reply.shown()] == [-0.5, -1.0]
    assert "'<9>'" in page.attributes["title"][1]


def test_without_logprobs_it_is_plain_text() -> None:
    page = Page(completion(logprobs=None)._repr_html_())
    assert page.text == "<b>&"
    assert "title" not in page.attributes


def test_a_copy_from_another_process_names_tokens_by_their_ids() -> None:
    copy = pickle.loads(pickle.dumps(completion(tokenizer=None)))
    assert copy == completion()
    assert [token.name for token in copy.shown()] == ["token 7", "token 8"]
