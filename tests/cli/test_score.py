"""`neper score` as a command; tests/score has what it does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner, Result

from neper.cli import app


def score(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["score", *map(str, arguments)], catch_exceptions=False)


def test_exit_codes_tell_what_became_of_the_rows(tmp_path: Path, tiny_dir: Callable[..., Path]) -> None:
    flags = ["--model", tiny_dir("llama"), "--num-threads", "1", "--top", "21"]
    (tmp_path / "a.jsonl").write_text('{"text": "the quick brown fox"}\n')
    done = score(tmp_path / "a.jsonl", *flags)
    assert done.exit_code == 0
    assert done.stdout == ""
    assert f"1 rows scored: {tmp_path / 'a.scored.jsonl'}" in done.stderr
    assert len(json.loads((tmp_path / "a.scored.jsonl").read_text())["top_ids"][0]) == 21
    (tmp_path / "b.jsonl").write_text('{"text": "the quick brown fox"}\n{"text": 1}\n')
    some = score(tmp_path / "b.jsonl", *flags, "--errors", tmp_path / "bad.jsonl")
    assert some.exit_code == 3
    assert "1 rows scored" in some.stderr
    assert json.loads((tmp_path / "bad.jsonl").read_text())["row"] == 2
    again = score(tmp_path / "a.jsonl", *flags)
    assert again.exit_code == 1
    assert again.stderr.count("\n") == 1
    assert "exists already" in again.stderr
    assert score(tmp_path / "a.jsonl", "--mode", "riddle").exit_code == 1
    assert score("--no-such-option").exit_code == 2
    assert score().exit_code == 2


def test_an_unwritable_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n')
    result = score(tmp_path / "a.jsonl", "--out", tmp_path / "no/such/out.jsonl")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "no/such/out.jsonl" in result.stderr
