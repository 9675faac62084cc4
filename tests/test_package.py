"""The wheel: what is in it, and what an environment that has only the wheel can do."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

import neper
from tests.cli.serving import ServerProcess

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
USER_SCRIPT = """
from typing_extensions import assert_type

import neper
from neper import LLM, Completion, FinishReason, LogprobParams, PackedRows, SamplingParams, TextDelta, TokenLogprobs
import torch

assert_type(neper.__version__, str)
llm = LLM("smollm2-135m", max_model_len=64)
for reply in llm.generate(["a", "b"], SamplingParams(top_p=0.9, max_tokens=4), LogprobParams(top_k=5)):
    assert_type(reply, Completion)
    assert_type(reply.text, str)
    assert_type(reply.logprobs, PackedRows | None)
    assert_type(reply.finish_reason, FinishReason)
for delta in llm.stream_chat([{"role": "user", "content": "a"}]):
    assert_type(delta, TextDelta)
scores = neper.token_logprobs(torch.zeros(2, 8), torch.tensor([1, 2]), 3)
assert_type(scores, TokenLogprobs)
assert_type(scores.logprob, torch.Tensor)
SamplingParams(top_p="much")  # type: ignore[arg-type]
neper.nothing  # type: ignore[attr-defined]
"""


def run(*command: str | Path) -> str:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, for the build leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    run(*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel, and with this environment's packages in neper's need."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    made = folder / "bin/python"
    run(*PIP, "--python", made, "install", "--no-deps", "--no-index", wheel)
    # An editable neper among them is in a .pth file of theirs, which counts only in its own environment.
    (installed,) = folder.glob("lib/python*/site-packages")
    (installed / "others.pth").write_text(sysconfig.get_path("purelib"))
    return made


@pytest.fixture(autouse=True)
def _no_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"neper-{neper.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    about = {name for name in names if name.startswith(f"neper-{neper.__version__}.dist-info/")}
    sources = (path for path in (ROOT / "src/neper").rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert names - about == {path.relative_to(ROOT / "src").as_posix() for path in sources}
    assert "neper/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in about)


def test_the_command_knows_its_version(python: Path) -> None:
    assert run(python.with_name("neper"), "--version").strip() == f"neper {neper.__version__}"
    code = "import importlib.metadata, neper; print(neper.__file__, importlib.metadata.version('neper'))"
    file, version = run(python, "-c", code).split()
    assert Path(file).is_relative_to(python.parents[1])
    assert version == neper.__version__


def test_an_installed_server_answers(python: Path, tiny_dir: Callable[..., Path]) -> None:
    with ServerProcess(tiny_dir(), python=python) as server:
        url = server.wait_ready().url
        assert httpx.get(f"{url}/health", timeout=120).status_code == 200
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "the", "max_tokens": 3, "logprobs": 1}, timeout=120)
        assert len(reply.json()["choices"][0]["logprobs"]["token_logprobs"]) == 3


def test_public_names_are_typed(python: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(USER_SCRIPT)
    options = ["--strict", "--python-executable", str(python), "--cache-dir", str(tmp_path / "cache")]
    assert run(sys.executable, "-m", "mypy", *options, script).startswith("Success")
