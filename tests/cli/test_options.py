from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from neper.config import EngineConfig, ServerConfig
from neper.errors import StartupError
from neper.machine import format_size
from neper.options import parse_size, with_options

GIVEN: dict[str, Any] = {}
app = typer.Typer()


@app.command()
@with_options(skip=frozenset({"model"}))
def command(*, engine: EngineConfig, server: ServerConfig) -> None:
    GIVEN.update(engine=engine, server=server)


def run(*arguments: str) -> tuple[EngineConfig, ServerConfig]:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return GIVEN["engine"], GIVEN["server"]


def test_without_flags_the_configs_are_the_defaults() -> None:
    assert run() == (EngineConfig(), ServerConfig())


def test_every_field_has_a_flag_that_reaches_it() -> None:
    values: dict[type, str] = {str: "x", int: "7", float: "0.5"}
    special = {
        "dtype": "float32",
        "log_level": "debug",
        "scoring": "host",
        "max_header_bytes": "512",
        "device": "cuda:1",
        "logprobs_mode": "tempered_logprobs",
        "tool_call_parser": "hermes",
        "reasoning_parser": "think",
        "speculative": "ngram",
    }
    beside = {"draft_tokens": ("--speculative", "ngram")}
    lists = {
        "allowed_hosts": ("a.example", ("a.example",)),
        "allowed_origins": ("http://a.example", ("http://a.example",)),
    }
    for config in (EngineConfig(), ServerConfig()):
        for field in dataclasses.fields(config):
            if field.name == "model":
                continue
            if "bool" in str(field.type):
                for prefix, given in (("--", True), ("--no-", False)):
                    engine, server = run(prefix + field.name.replace("_", "-"))
                    made = engine if isinstance(config, EngineConfig) else server
                    assert made == dataclasses.replace(config, **{field.name: given})
                continue
            if field.name in lists:
                text, made = lists[field.name]
                assert run("--" + field.name.replace("_", "-"), text)[1] == ServerConfig(**{field.name: made})
                continue
            kind = next(k for k in (float, int, str) if k.__name__ in str(field.type))
            text = special.get(field.name) or values[kind]
            engine, server = run("--" + field.name.replace("_", "-"), text, *beside.get(field.name, ()))
            made = engine if isinstance(config, EngineConfig) else server
            others = {"speculative": "ngram"} if field.name in beside else {}
            assert made == dataclasses.replace(config, **{field.name: kind(text)} | others)


@pytest.mark.parametrize("option", ["--allowed-hosts", "--allowed-origins"])
@pytest.mark.parametrize("text", ["", " ", ","])
def test_an_empty_list_is_not_the_default(option: str, text: str) -> None:
    """An empty shell variable must not open what it was to close."""
    result = CliRunner().invoke(app, [option, text])
    assert result.exit_code == 2
    assert "it is empty" in result.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("512MiB", 2**29), ("2GiB", 2**31), ("2g", 2**31), ("1.5 GB", 1_500_000_000), ("10b", 10)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert run("--kv-cache-memory", text)[0].kv_cache_memory == size


@pytest.mark.parametrize("text", ["", "x", "5x", "-1", "1 2", "GiB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    result = CliRunner().invoke(app, ["--kv-cache-memory", text])
    assert result.exit_code == 2
    assert "is not a size" in result.output


def test_lists() -> None:
    several = "https://a.example, http://localhost:3000,"
    assert run("--allowed-origins", several)[1].allowed_origins == ("https://a.example", "http://localhost:3000")
    assert run("--allowed-origins", "*")[1].allowed_origins == ("*",)


def test_format_size() -> None:
    assert [format_size(n) for n in (0, 1023, 1024, 16 * 2**20, 2**30 * 3 // 2, 2**50)] == [
        "0 B", "1023 B", "1 KiB", "16 MiB", "1.5 GiB", "1024 TiB",
    ]  # fmt: skip


def test_settings_that_cannot_be_meant_are_refused() -> None:
    for wrong in (
        {"api_key": ""},
        {"max_requests": 0},
        {"max_waiting": -1},
        {"max_choices": 0},
        {"max_body_bytes": 0},
        {"max_kept_bytes": -1},
        {"request_timeout": -1.0},
        {"request_timeout": float("nan")},
        {"log_level": "loud"},
        *[{"allowed_origins": (origin,)} for origin in ("example.com", "https://a.example/path", "null", "")],
    ):
        with pytest.raises(StartupError, match=next(iter(wrong))):
            ServerConfig(**wrong)
    with pytest.raises(StartupError, match="max_logprobs"):
        EngineConfig(max_logprobs=-2)
    assert EngineConfig(max_logprobs=-1).max_logprobs == -1
