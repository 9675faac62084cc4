"""Dead engines are started again at once, and children that do not end are not waited for."""

from __future__ import annotations

import pytest

from tests.wire.driven import Clock


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neper.engine.remote.supervisor._FIRST_BACKOFF", 0.02)
    monkeypatch.setattr("neper.wire.child._EXIT_SECONDS", 0.2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)
