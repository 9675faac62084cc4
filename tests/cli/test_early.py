"""What a command line can know is said before anything takes time, and what cannot be written is one line."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from neper import config
from neper.cli import app
from neper.config import ServerConfig
from neper.errors import StartupError
from neper.server.run import api_key
from neper.text.reasoning import REASONING_PARSERS
from neper.text.tools import TOOL_CALL_PARSERS
from neper.types import LOGPROBS_MODES
from tests.cli.serving import ServerProcess

LATE = [
    ("--tool-call-parser", "x", "tool_call_parser must be one of hermes, llama3_json, mistral, none; got 'x'"),
    ("--reasoning-parser", "x", "reasoning_parser must be one of think, mistral, none; got 'x'"),
    ("--logprobs-mode", "x", "logprobs_mode must be one of raw_logprobs, tempered_logprobs, processed_logprobs; got"),
    ("--device", "abacus", "device 'abacus' is not known; use cpu or cuda"),
    ("--served-model-name", "", "served_model_name is empty"),
    ("--api-key-file", "/no/such/key", "/no/such has no key"),
    ("--api-key-env", "NEPER_NO_SUCH", "--api-key-env NEPER_NO_SUCH: there is no such environment variable"),
    ("--api-key", "two words", "--api-key holds no key"),
]


@pytest.fixture(scope="module")
def tiny(tiny_dir: Callable[..., Path]) -> str:
    return str(tiny_dir("llama"))


@pytest.mark.parametrize(("flag", "value", "says"), LATE)
def test_case_99_a_flag_is_checked_before_a_model_is_looked_for(flag: str, value: str, says: str) -> None:
    result = CliRunner().invoke(app, ["serve", "/no/such/model", flag, value, "--port", "0"], catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"neper: error: {says}"), result.stderr


def test_case_99_more_connections_than_files_are_told_before_a_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("neper.server.transport.connections._free_files", lambda: 100)
    result = CliRunner().invoke(app, ["serve", "/no/such/model", "--max-connections", "101", "--port", "0"])
    assert result.stderr.startswith("neper: error: the limit of open files leaves 100 for connections"), result.stderr


@pytest.mark.parametrize("engine", ["own", "of others"])
def test_case_104_a_parser_that_the_template_cannot_use_is_told_before_weights_are_loaded(
    tiny: str, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    arguments = [tiny] if engine == "own" else ["--engine-command", "no-such-engine", "--tokenizer", tiny]
    if engine == "own":

        async def never(_: object) -> None:
            await asyncio.sleep(3600)

        monkeypatch.setattr("neper.server.backend.EngineClient.start", never)
    result = CliRunner().invoke(app, ["serve", *arguments, "--tool-call-parser", "mistral", "--port", "0"])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("neper: error: tool_call_parser 'mistral' cannot be used")


def test_case_99_the_choices_are_those_that_are_known() -> None:
    assert config.TOOL_CALL_PARSERS == TOOL_CALL_PARSERS
    assert config.REASONING_PARSERS == REASONING_PARSERS
    assert config.LOGPROBS_MODES == LOGPROBS_MODES


def test_case_99_a_context_that_the_model_lacks_is_told_before_an_engine_starts(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neper.server.backend.EngineClient", None)
    result = CliRunner().invoke(app, ["serve", tiny, "--max-model-len", "999999", "--port", "0"])
    assert result.stderr.endswith("max_model_len 999999 is beyond the model's context of 512 tokens\n")


def test_case_99_a_key_from_a_file_or_a_named_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("sesame\n")
    monkeypatch.setenv("MY_KEY", "open")
    assert api_key(ServerConfig(api_key_file=str(tmp_path / "key"))) == "sesame"
    assert api_key(ServerConfig(api_key_env="MY_KEY")) == "open"
    assert api_key(ServerConfig(api_key="plain")) == "plain"
    assert api_key(ServerConfig()) is None
    for content in ("", "\n", "two words", "schlüssel", "a\nb"):
        (tmp_path / "key").write_text(content)
        with pytest.raises(StartupError, match="holds no key"):
            api_key(ServerConfig(api_key_file=str(tmp_path / "key")))
    with pytest.raises(StartupError, match="give one of"):
        ServerConfig(api_key="x", api_key_env="MY_KEY")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_case_99_the_list_of_processes_shows_no_key(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame\n")
    with ServerProcess(tiny, "--api-key-file", tmp_path / "key") as server:
        server.wait_ready()
        for pid in (server.process.pid, *server.children()):
            for what in ("cmdline", "environ"):
                assert b"sesame" not in Path(f"/proc/{pid}/{what}").read_bytes()
        assert "Authorization: Bearer" in server.command


COMMANDS = [
    ("--help",),
    ("serve", "--help"),
    ("doctor", "--json"),
    ("chat", "Hi", "--num-threads", "1", "--max-tokens", "2"),
    ("engine", "--num-threads", "1"),
]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_case_99_a_full_disk_is_one_line(arguments: tuple[str, ...], tiny: str) -> None:
    model = {"chat": ["--model", tiny], "engine": [tiny]}.get(arguments[0], [])
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "neper", *arguments, *model],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    (line,) = [line for line in result.stderr.splitlines() if " INFO " not in line and not line.endswith("...")]
    assert line == "neper: error: cannot write: No space left on device"
    assert result.returncode == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
@pytest.mark.parametrize("arguments", ["doctor", "chat Hi", "engine x"])
def test_case_99_closed_outputs_are_told(arguments: str) -> None:
    command = f"exec {sys.executable} -m neper {arguments}"
    result = subprocess.run(["sh", "-c", f"{command} >&-"], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "neper: error: standard output is closed: there is nowhere to write to\n"
    assert subprocess.run(["sh", "-c", f"{command} >&- 2>&-"], timeout=120).returncode == 1


@pytest.mark.parametrize("where", ["standard input", "text", "system"])
def test_case_99_a_byte_that_is_no_text_is_replaced(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr("neper.chat.chat", lambda config, text, **rest: seen.update(text=text, system=rest["system"]))
    argument = os.fsdecode(b"caf\xe9")
    arguments = {"standard input": ["-"], "text": [argument], "system": ["Hi", "--system", argument]}[where]
    result = CliRunner().invoke(app, ["chat", *arguments], input=b"caf\xe9\r\n", catch_exceptions=False)
    assert result.exit_code == 0
    expected = {"standard input": "caf\ufffd\n", "text": "caf\ufffd", "system": "caf\ufffd"}[where]
    assert seen["system" if where == "system" else "text"] == expected


def test_case_99_too_much_standard_input_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neper.cli.MAX_STDIN", 100)
    result = CliRunner().invoke(app, ["chat", "-"], input=b"a" * 101)
    assert result.stderr == "neper: error: standard input has more than 100 bytes, which no model reads at once\n"


def test_a_model_without_a_chat_template_is_told_before_it_is_loaded(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    directory = Path(shutil.copytree(tiny, tmp_path / "base"))
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (directory / name).unlink(missing_ok=True)
    monkeypatch.setattr("neper.engine.llm.LLM", None)
    result = CliRunner().invoke(app, ["chat", "Hi", "--model", str(directory)], catch_exceptions=False)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert "no chat template" in result.stderr
