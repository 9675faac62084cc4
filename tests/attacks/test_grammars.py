"""Hostile grammars beside an honest client."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.attacks.grammars import COMPLETIONS, HOSTILE, TOKENIZE, Client, hostile_body
from tests.attacks.honest import p99
from tests.attacks.target import LEAST_P99, MOST_SLOWER, QUIET_SECONDS, Target, at_once

CLIENTS = 24
ATTACK_SECONDS = 20.0


@pytest.mark.timeout(600)
def test_case_112_hostile_grammars_hold_nobody_up(target: Target) -> None:
    """24 clients send new hostile grammars all the time, and as soon as one is answered another."""
    with Client(target.url) as client:
        time.sleep(QUIET_SECONDS)
    quiet = {path: p99(seconds) for path, seconds in client.seconds.items()}
    end = time.monotonic() + ATTACK_SECONDS
    answers: Counter[int] = Counter()

    def attack(place: int) -> None:
        number = place
        while time.monotonic() < end:
            status, _ = target.post(COMPLETIONS, hostile_body(number % len(HOSTILE), number))
            answers[status] += 1
            number += CLIENTS
            if status == 503:
                time.sleep(0.2)

    with Client(target.url) as client:
        at_once([lambda place=place: attack(place) for place in range(CLIENTS)])
    attacked = {path: p99(seconds) for path, seconds in client.seconds.items()}
    asked = {path: len(seconds) for path, seconds in client.seconds.items()}
    print(f"answers {dict(answers)}; honest requests {asked}; p99 {quiet} -> {attacked}; memory {target.memory()}")
    assert answers.keys() <= {200, 400, 503}
    for path in (COMPLETIONS, TOKENIZE):
        assert attacked[path] <= MOST_SLOWER * max(quiet[path], LEAST_P99), (path, quiet, attacked)
