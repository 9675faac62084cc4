"""Attacks on a real `neper serve` over a tiny model: what each does to the server's memory, its event loop and to an
honest client beside it.

An attack is a function that is bounded in count and time and stops by itself. `target.attack(name, function, sent=…)`
runs it and returns its Figures; `figures.check()` holds them to the bounds of `target.py`. The figures of all attacks
are printed at the end. They are marked `full`: timings need a machine that is not busy with other tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.target import Target
from tests.helpers.tiny import write_model

CONTEXT = 8192

_figures: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.full)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _figures:
        terminalreporter.section("attacks")
        for line in _figures:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def attacked_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("attacked") / "tiny"
    write_model(directory, max_position_embeddings=CONTEXT)
    return directory


@pytest.fixture(scope="module")
def target(attacked_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    watch_file = tmp_path_factory.mktemp("watch") / "loop"
    with Target(watch_file, attacked_model, "--dtype", "float32", "--log-level", "error") as target:
        target.wait_ready()
        yield target
        _figures.extend(map(str, target.figures))
