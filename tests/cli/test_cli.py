from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

import neper
from neper.cli import app
from neper.config import EngineConfig, LineEngineConfig, ServerConfig, WatchConfig
from neper.errors import StartupError
from neper.server.bodies.chat import ChatBody
from neper.server.bodies.completion import CompletionBody

DOCS = Path(__file__).parents[2] / "docs"


def neper_command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": 120} | options
    return subprocess.run([sys.executable, "-m", "neper", *arguments], **options)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the server by one that notes what it was given, and does what `outcome` says."""
    seen: dict[str, Any] = {"outcome": lambda: 0}

    def serve(engine: EngineConfig, line: LineEngineConfig, server: ServerConfig, watch: WatchConfig) -> int:
        seen.update(engine=engine, line=line, server=server, watch=watch)
        return int(seen["outcome"]())

    module = ModuleType("neper.server.run")
    module.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "neper.server.run", module)
    return seen


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, neper.cli\n"
        "try: neper.cli.app(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'uvicorn', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_help_is_fast() -> None:
    """Beside the library that writes it; of the processes' own time, which a busy machine does not change."""

    def seconds(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert subprocess.run([sys.executable, *command], capture_output=True).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(seconds("-m", "neper", "--help"), seconds("-c", "import typer.rich_utils")) for _ in range(5)]
    assert min(ours for ours, _ in pairs) < 1.5 * min(library for _, library in pairs)


COMMANDS = [
    (),
    ("serve",),
    ("chat",),
    ("engine",),
    ("doctor",),
    ("bench",),
    ("bench", "cpu"),
    ("bench", "kernels"),
    ("bench", "engine"),
    ("bench", "http"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_prints_on_an_ascii_console(command: tuple[str, ...]) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = neper_command(*command, "--help", env=environment)
    assert result.returncode == 0, result.stderr
    assert "Usage:" in result.stdout


def test_version() -> None:
    result = neper_command("--version")
    assert (result.returncode, result.stdout) == (0, f"neper {neper.__version__}\n")


def test_serve_hands_flags_to_the_server(served: dict[str, Any]) -> None:
    arguments = ["serve", "some-model", "--port", "9000", "--no-prefix-caching", "--kv-cache-memory", "1GiB"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert served["engine"] == EngineConfig(model="some-model", prefix_caching=False, kv_cache_memory=2**30)
    assert served["line"] == LineEngineConfig()
    assert served["server"] == ServerConfig(port=9000)
    arguments = ["serve", "--engine-command", "engine --serve x", "--tokenizer", "d", "--engine-silence-timeout", "5"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    expected = LineEngineConfig(engine_command="engine --serve x", tokenizer="d", engine_silence_timeout=5.0)
    assert served["line"] == expected


def test_serve_without_arguments_is_the_default_config(served: dict[str, Any]) -> None:
    assert CliRunner().invoke(app, ["serve"]).exit_code == 0
    assert (served["engine"], served["line"], served["server"]) == (EngineConfig(), LineEngineConfig(), ServerConfig())
    assert served["watch"] == WatchConfig()


def test_an_error_is_one_line_on_stderr(served: dict[str, Any]) -> None:
    def fail() -> int:
        raise StartupError("port 8000 is in use")

    served["outcome"] = fail
    result = CliRunner().invoke(app, ["serve"])
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "neper: error: port 8000 is in use\n")


def test_interrupt_ends_with_130_and_no_traceback(served: dict[str, Any]) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    served["outcome"] = interrupt
    result = CliRunner().invoke(app, ["serve"])
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["serve", "--dtype", "int8"], "dtype must be float32 or bfloat16"),
        (["serve", "--log-level", "loud"], "log_level must be debug, info, warning or error"),
        (["serve", "--engine-command", "x"], "--engine-command needs --tokenizer"),
        (["serve", "--tokenizer", "x"], "--tokenizer needs --engine-command"),
        (["serve", "x", "--engine-command", "x", "--tokenizer", "x"], "give a model (x) or --engine-command"),
        (
            ["serve", "--engine-command", "x", "--tokenizer", "/no/such", "--port", "0"],
            "--tokenizer: no model '/no/such'",
        ),
    ],
)
def test_what_a_config_refuses_is_an_error_of_the_command(arguments: list[str], says: str) -> None:
    result = neper_command(*arguments)
    assert result.returncode == 1
    assert result.stderr.startswith(f"neper: error: {says}")
    assert len(result.stderr.splitlines()) == 1


def test_wrong_usage_ends_with_2() -> None:
    assert neper_command("serve", "--no-such-flag").returncode == 2
    assert neper_command("nonsense").returncode == 2


def test_a_reader_that_goes_away_is_no_error_to_speak_of() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "neper", "doctor", "--json"], stdout=writer, stderr=subprocess.PIPE, timeout=120
        )
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.parametrize("script", ["cli_reference.py", "api_reference.py"])
def test_what_documents_take_from_the_code_is_current(script: str) -> None:
    check = subprocess.run([sys.executable, DOCS / script], capture_output=True, text=True)
    assert check.returncode == 0, check.stdout + check.stderr


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_every_field_of_a_request_is_documented(body: type[Any]) -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    assert [name for name in body.__struct_fields__ if not re.search(rf"`{name}(`|: )", text)] == []
