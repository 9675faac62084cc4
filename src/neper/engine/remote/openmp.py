"""The way that OpenMP's threads wait where neper computes: set by the environment, before torch is loaded."""

from __future__ import annotations

import os

_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_SPIN_COUNT = 1000
"""Turns that a thread waits for another before it sleeps: some ten microseconds, longer than most gaps between two
parallel loops of a step. libgomp's own 300,000 are milliseconds, in which a thread that waits holds the core that the
one it waits for needs, as soon as other programs are busy."""


def environment() -> dict[str, str]:
    """This process's environment for the engine process. Settings of the user's about waiting stay."""
    if any(variable in os.environ for variable in _VARIABLES):
        return dict(os.environ)
    return {**os.environ, "GOMP_SPINCOUNT": str(_SPIN_COUNT)}


def wait_briefly() -> None:
    """Sets the same for this process, a command's own, before it loads torch."""
    os.environ.update(environment())
