"""Replies that are many times their body: scored prompts with all the alternatives that may be listed."""

from __future__ import annotations

import json

import pytest

from tests.attacks.honest import HEALTH
from tests.attacks.target import Target, at_once

COMPLETIONS = "/v1/completions"
PROMPT = [5 + i % 300 for i in range(500)]


def body(num_prompts: int, **fields: object) -> bytes:
    asked = {"prompt": [PROMPT] * num_prompts, "echo": True, "logprobs": 20, "max_tokens": 0}
    return json.dumps({**asked, **fields}).encode()


def test_case_114_more_than_may_be_listed(target: Target) -> None:
    sent = body(128)
    statuses: list[int] = []

    def send() -> None:
        statuses.extend(target.post(COMPLETIONS, sent)[0] for _ in range(10))

    figures = target.attack("case 114, 128 prompts", lambda: at_once([send, send]), sent=2 * len(sent))
    assert {*statuses} == {400}
    figures.check()


@pytest.mark.parametrize("stream", [False, True])
def test_case_114_as_much_as_may_be_listed(target: Target, stream: bool) -> None:
    sent = body(100, stream=stream)
    replies: list[bytes] = []

    def send() -> None:
        status, reply = target.post(COMPLETIONS, sent)
        assert status == 200
        replies.append(reply)

    figures = target.attack(
        f"case 114, 100 prompts, {'streamed' if stream else 'whole'}", send, sent=len(sent) + 19 * 2**20
    )
    assert len(replies[0]) > 15 * 2**20
    # A small completion takes three of the engine's steps, full ones here: tests/engine/test_scheduler.py counts them.
    figures.check([HEALTH])
