"""What the engine process's environment tells OpenMP, and whether torch's OpenMP takes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from neper.engine.remote import openmp
from tests.helpers.tiny import write_model


def displayed(environment: dict[str, str], *arguments: str) -> str:
    """What torch's OpenMP says of its settings in a Python with these arguments."""
    environment = {**environment, "OMP_DISPLAY_ENV": "VERBOSE"}
    arguments = arguments or ("-c", "import torch; torch.get_num_threads()")
    return subprocess.run(
        [sys.executable, *arguments], env=environment, input="", capture_output=True, text=True, check=True, timeout=600
    ).stderr


def test_case_108_threads_of_the_engine_process_do_not_spin_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(variable, raising=False)
    said = displayed(openmp.environment())
    if "GOMP_SPINCOUNT" not in said:
        pytest.skip("this torch has another OpenMP than libgomp")
    assert "GOMP_SPINCOUNT = '1000'" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [("engine",), ("chat", "Hi", "--max-tokens", "1", "--model")], ids=["engine", "chat"]
)
def test_case_108_commands_that_compute_themselves_wait_briefly_too(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(variable, raising=False)
    if "GOMP_SPINCOUNT" not in displayed(openmp.environment()):
        pytest.skip("this torch has another OpenMP than libgomp")
    write_model(tmp_path / "tiny")
    said = displayed(dict(os.environ), "-m", "neper", *command, str(tmp_path / "tiny"))
    assert "GOMP_SPINCOUNT = '1000'" in said


@pytest.mark.parametrize(("variable", "value"), [("GOMP_SPINCOUNT", "77"), ("OMP_WAIT_POLICY", "ACTIVE")])
def test_case_108_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    given = openmp.environment()
    assert given[variable] == value
    assert ("GOMP_SPINCOUNT" in given) == (variable == "GOMP_SPINCOUNT")
