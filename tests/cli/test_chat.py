from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from neper.cli import app
from neper.models.source import ModelSource
from neper.terminal import PLAIN_HEADER


@pytest.fixture(scope="module")
def tiny(tiny_dir: Callable[..., Path]) -> str:
    return str(tiny_dir("llama"))


def plain(*arguments: str, charset: str = "utf-8", text: str = "Hello", stdin: str | None = None) -> tuple[str, str]:
    """Standard output and error of a `neper chat` in a pipe."""
    flags = ["--num-threads", "1", "--max-tokens", "24", *arguments]
    result = CliRunner(charset=charset).invoke(app, ["chat", text, *flags], input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def read(output: str) -> tuple[list[tuple[str, float, float, list[str]]], str]:
    """The tokens and the reply of the plain form, as the help describes it."""
    lines, reply = output.split("\n\n", 1)
    header, *rows = lines.split("\n")
    assert header == PLAIN_HEADER
    tokens = []
    for row in rows:
        token, logprob, probability, *alternatives = row.split("\t")
        tokens.append((json.loads(token), float(logprob), float(probability), alternatives))
    return tokens, reply


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What a terminal receives on stdout from a `neper chat`."""
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "neper", "chat", "Hello", "--num-threads", "1", "--max-tokens", "8", *arguments],
        stdout=theirs,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env={k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm-256color"} | environment,
    )
    os.close(theirs)
    received = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not data:
            break
        received += data
    os.close(ours)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return received.decode().replace("\r\n", "\n")


def test_a_pipe_gets_one_line_a_token_and_then_the_reply(tiny: str) -> None:
    output, notes = plain("--model", tiny, "--top", "3")
    tokens, _ = read(output)
    assert 1 <= len(tokens) <= 24
    for _name, logprob, probability, alternatives in tokens:
        assert probability == pytest.approx(math.exp(logprob), abs=1e-4)
        assert len(alternatives) == 3
        listed = [float(alternative.rsplit(" ", 1)[1]) for alternative in alternatives]
        assert listed == sorted(listed, reverse=True)
        assert probability == listed[0]  # greedy
    assert f"{len(tokens)} token" in notes


@pytest.mark.model
def test_the_reply_is_the_tokens_joined(smollm2: ModelSource) -> None:
    output, notes = plain("--model", str(smollm2.path), text="What is the capital of France?")
    tokens, reply = read(output)
    assert "Paris" in reply
    assert reply.removesuffix("\n") == "".join(name for name, *_ in tokens if name != "<|im_end|>")
    assert "the model ended its turn" in notes


@pytest.mark.parametrize("charset", ["ascii", "latin-1"])
def test_a_console_without_utf8_gets_escapes(tiny: str, charset: str) -> None:
    # A seed whose reply holds characters of several alphabets: random models write anything.
    flags = ("--model", tiny, "--temperature", "2", "--seed", "3", "--top", "5")
    wide, _ = plain(*flags)
    assert not wide.isascii()
    narrow, _ = plain(*flags, charset=charset)
    assert [t[0] for t in read(narrow)[0]] == [t[0] for t in read(wide)[0]]


def test_a_seed_repeats_a_reply(tiny: str) -> None:
    flags = ("--model", tiny, "--temperature", "1.5", "--seed", "7")
    first = plain(*flags)
    assert plain(*flags) == first
    assert plain(*flags[:-1], "8") != first


def test_a_dash_reads_standard_input(tiny: str) -> None:
    assert plain("--model", tiny, text="-", stdin="Hello") == plain("--model", tiny)
    assert plain("--model", tiny, text="-", stdin="Good bye") != plain("--model", tiny)


def test_more_alternatives_than_the_servers_default_may_be_listed(tiny: str) -> None:
    tokens, _ = read(plain("--model", tiny, "--top", "30", "--max-tokens", "1")[0])
    assert len(tokens[0][3]) == 30


def test_a_system_message_counts(tiny: str) -> None:
    assert plain("--model", tiny, "--system", "Be brief.") != plain("--model", tiny)


def test_a_model_that_is_not_there_is_one_line() -> None:
    result = CliRunner().invoke(app, ["chat", "Hello", "--model", "no-such-model"])
    assert result.exit_code == 1
    assert result.stderr.startswith("neper: error: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_a_terminal_gets_shades_and_a_table(tiny: str) -> None:
    shown = on_a_terminal("--model", tiny, "--top", "2")
    assert "\x1b[" in shown
    assert "alternatives" in shown
    assert PLAIN_HEADER not in shown


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_without_colour_gets_numbers(tiny: str, environment: dict[str, str]) -> None:
    shown = on_a_terminal("--model", tiny, **environment)
    assert "\x1b[" not in shown
    assert read(shown)[0]
