"""Long texts: as prompts that can never fit, from clients that wait and from those that leave at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.attacks.target import Target, at_once

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
CHARACTERS = 4_000_000
CLIENTS = 6
TEXTS = {"letters": "a ", "word": "a", "spaces": " ", "digits": "1", "kanji": "語", "newlines": "\n"}


def bodies(text: str) -> dict[str, Any]:
    return {
        COMPLETIONS: {"prompt": text, "max_tokens": 1},
        CHAT: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
        TOKENIZE: {"prompt": text},
    }


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, TOKENIZE])
@pytest.mark.parametrize("name", TEXTS)
def test_case_111_texts_that_never_fit(target: Target, name: str, path: str) -> None:
    unit = TEXTS[name]
    body = json.dumps(bodies(unit * (CHARACTERS // len(unit.encode())))[path], ensure_ascii=False).encode()
    statuses: list[int] = []

    def send() -> None:
        statuses.extend(target.post(path, body)[0] for _ in range(3))

    figures = target.attack(f"case 111, {name} to {path}", lambda: at_once([send, send]), sent=2 * len(body))
    assert {*statuses} <= {400, 413}
    figures.check()


def test_case_111_clients_that_leave_at_once(target: Target) -> None:
    body = json.dumps({"prompt": "a " * (CHARACTERS // 2)}).encode()
    # The engine computes it once, before the attack: its steps are no business of the bodies that are measured.
    prompt = json.dumps({"prompt": "the fox " * 1_500, "max_tokens": 1}).encode()
    assert target.post(COMPLETIONS, prompt)[0] == 200
    left = target.cpu_seconds()

    def leave() -> None:
        target.leave(TOKENIZE, body)
        target.leave(COMPLETIONS, body)

    def attack() -> None:
        at_once([leave] * CLIENTS)
        # Whoever waits with a long prompt of its own does not wait for them.
        assert target.post(COMPLETIONS, prompt)[0] == 200

    figures = target.attack("case 111, six clients that leave", attack, sent=CLIENTS * len(body), seconds=10)
    figures.check()
    # All of it, the honest client's and what was read of the bodies included.
    assert target.cpu_seconds() - left < 15 * figures.times
