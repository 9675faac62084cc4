"""The exception tree: each error is raised by something, its code is documented, and callers of the library see it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import neper
from neper import errors
from neper.config import EngineConfig, ServerConfig

ROOT = Path(__file__).parent.parent
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.NeperError) and kind is not errors.NeperError
}


def test_codes_documented_are_those_that_requests_can_meet() -> None:
    table = (
        (ROOT / "docs/api.md").read_text(encoding="utf-8").split("<!-- begin: errors")[1].split("<!-- end: errors")[0]
    )
    documented = re.findall(r"^\| \d+ \| `\w+` \| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(documented) == sorted(
        str(kind.code) for kind in KINDS.values() if not issubclass(kind, errors.StartupError)
    )


def test_each_error_is_raised_by_something() -> None:
    made: set[str] = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            # A table of errors is one of what is called later.
            called = [node.func] if isinstance(node, ast.Call) else node.values if isinstance(node, ast.Dict) else []
            made |= {ast.unparse(kind).rpartition(".")[2] for kind in called}
    assert set(KINDS) - made == set()


def test_errors_of_the_library_are_public() -> None:
    public = {name for name in neper.__all__ if name.endswith("Error")}
    assert public < {*KINDS, "NeperError"}
    assert all(getattr(neper, name) is getattr(errors, name) for name in public)
    assert {"NeperError", "InvalidRequestError", "InvalidLogitsError", "ConfigError", "ModelLoadError"} < public


def test_wrong_arguments_are_value_errors() -> None:
    with pytest.raises(ValueError, match="top_k") as wrong:
        neper.token_logprobs(torch.zeros(1, 4), torch.tensor([0]), -2)
    assert isinstance(wrong.value, neper.InvalidRequestError)
    for make in (
        lambda: EngineConfig(dtype="float8"),
        lambda: EngineConfig(block_size=0),
        lambda: ServerConfig(log_level=""),
    ):
        with pytest.raises(ValueError, match="must be") as wrong:
            make()
        assert isinstance(wrong.value, neper.ConfigError)
        assert isinstance(wrong.value, neper.StartupError)
