from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from neper.shown import SHADES, Alternative, ShownToken, shade, shown_tokens, summary
from neper.terminal import alternatives_table, legend, plain_line, printable, quoted, shaded
from neper.text.tokenizer import token_name
from neper.types import PackedRows

BYTES = {1: b"Hi", 2: b" \xf0\x9f", 3: b"\x98\x80", 4: b"Ho"}
ROWS = PackedRows.pack([1, 2, 3], [-0.1, -0.2, -3.0], [1, 1, 2], [[1, 4], [2, -1], [4, 3]], [[-0.1, -2.0]] * 3)


def token(text: str, probability: float, *alternatives: tuple[str, float]) -> ShownToken:
    return ShownToken(text, text, math.log(probability), tuple(Alternative(t, math.log(p)) for t, p in alternatives))


def test_rows_become_tokens_and_unused_places_are_left_out() -> None:
    shown = shown_tokens(["Hi", " ", "😀"], ROWS, BYTES.__getitem__)
    assert [t.text for t in shown] == ["Hi", " ", "😀"]
    assert [t.name for t in shown] == ["Hi", r"bytes:\x20\xf0\x9f", r"bytes:\x98\x80"]
    assert [[a.text for a in t.alternatives] for t in shown] == [
        ["Hi", "Ho"],
        [r"bytes:\x20\xf0\x9f"],
        ["Ho", r"bytes:\x98\x80"],
    ]
    assert shown[2].logprob == -3.0


def test_texts_and_rows_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError):
        shown_tokens(["Hi"], ROWS, BYTES.__getitem__)


def test_token_name_spells_the_bytes_of_a_broken_character() -> None:
    assert token_name("é".encode()) == "é"
    assert token_name(b"\xc3") == r"bytes:\xc3"


def test_less_sure_tokens_are_shaded_and_sure_ones_are_not() -> None:
    assert shade(1.0) == shade(0.9) == SHADES[0]
    assert shade(0.0) == SHADES[-1]
    styles = [shade(p).style for p in (0.95, 0.8, 0.5, 0.2, 0.01)]
    assert len(set(styles)) == len(styles)


def test_shaded_text_is_the_reply_and_line_ends_carry_no_shade() -> None:
    text = shaded([token("one\n", 0.1), token("two", 0.99), token("\n\n", 0.1)])
    assert text.plain == "one\ntwo\n\n"
    for span in text.spans:
        assert "\n" not in text.plain[span.start : span.end] or not span.style


def test_a_reply_cannot_drive_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x9b\n\t") == "a\\x1b[2Jb\\x0d\\x9b\n\t"
    assert "\x1b" not in shaded([token("\x1b[31m", 0.5)]).plain
    assert "\x9b" not in quoted("\x9b\x7f")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
@pytest.mark.parametrize("text", ["Paris", ' "x"\t', "日本\n", "é\x1b\x9f", "\u2028"])
def test_quoted_is_one_line_of_json_that_the_console_can_show(text: str, encoding: str) -> None:
    string = quoted(text, encoding)
    string.encode(encoding)
    assert json.loads(string) == text
    assert "\t" not in string
    assert "\n" not in string


def test_plain_line_has_stable_columns() -> None:
    line = plain_line(token(" Paris", 0.5, (" Paris", 0.5), (" Rome", 0.25)))
    assert line == '" Paris"\t-0.6931\t0.5000\t" Paris" 0.5000\t" Rome" 0.2500'


def test_plain_line_escapes_what_the_console_lacks() -> None:
    assert plain_line(token("é", 0.5), "ascii").startswith('"\\u00e9"\t')
    assert plain_line(token("é", 0.5), "latin-1").startswith('"é"\t')


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_table_and_legend_print_on_any_console(encoding: str) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    console = Console(file=file, width=70, markup=False, highlight=False)
    console.print(legend(), soft_wrap=True)
    console.print(alternatives_table([token("[b]é[/b]", 0.5, ("日本", 0.5), ("x", 0.25))], encoding))
    file.flush()
    printed = raw.getvalue().decode(encoding)
    assert "25.00%" in printed
    assert "[b]" in printed


def test_summary() -> None:
    assert summary([token("a", math.exp(-1)), token("b", math.exp(-3))], "length") == (
        "2 tokens, mean logprob -2.000, perplexity 7.39; ended because it reached the token limit"
    )
    assert summary([], "stop") == "0 tokens"
