"""Large replies: bounded by what they list, and sent in parts that are the same reply."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from neper.config import ServerConfig
from neper.server.entries.entries import Entries
from neper.server.replies import choices as choices_reply
from neper.server.replies import sse
from neper.server.transport import asgi
from neper.text.tokenizer import Tokenizer
from tests.helpers.invariants import fold
from tests.server.conftest import Client, running
from tests.server.test_errors import CHAT, COMPLETIONS, check

IDS = list(range(5, 45))
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "echo": (COMPLETIONS, {"prompt": [IDS] * 3, "echo": True, "logprobs": 5, "n": 2, "max_tokens": 3}),
    "prompts": (COMPLETIONS, {"prompt": [IDS] * 2, "prompt_logprobs": 4, "max_tokens": 2, "n": 2}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 3, "logprobs": True, "n": 3}),
    "plain": (COMPLETIONS, {"prompt": "Hi", "n": 3}),
}


@pytest.mark.parametrize("name", ASKED)
def test_case_114_parts_are_the_whole_reply(client: Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client.say("Hello there")
    path, body = ASKED[name]
    whole = client.post(path, **body)
    assert whole.headers["content-length"]
    monkeypatch.setattr(asgi, "LARGE_REPLY", 100)
    parts = client.post(path, **body)
    assert parts.headers["transfer-encoding"] == "chunked"
    assert "content-length" not in parts.headers
    expected, found = whole.json(), parts.json()
    for reply in (expected, found):
        del reply["id"], reply["created"]
    assert found == expected


def test_case_114_large_events_are_the_same_stream(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.say("Hello there")
    _, body = ASKED["echo"]
    monkeypatch.setattr(sse, "LARGE_EVENT", 10)
    response = client.post(COMPLETIONS, **body, stream=True)
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    whole = client.post(COMPLETIONS, **body).json()
    streamed = sorted(fold(events)["choices"], key=lambda choice: choice["index"])
    assert streamed == whole["choices"]


def test_case_114_prompts_of_many_alternatives_are_not_written_in_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices_reply, "INLINE_PROMPT_ENTRIES", 40 * 6)
    threads: list[int] = []
    plain = Entries.legacy

    def noted(self: Entries, tokens: Any, *arguments: Any, **options: Any) -> Any:
        if len(tokens) == len(IDS):
            threads.append(threading.get_ident())
        return plain(self, tokens, *arguments, **options)

    monkeypatch.setattr(Entries, "legacy", noted)
    loop_thread = client.server.call(threading.get_ident)
    assert client.post(COMPLETIONS, **ASKED["echo"][1]).status_code == 200
    assert len(threads) == 3
    assert loop_thread not in threads
    threads.clear()
    assert client.post(COMPLETIONS, **{**ASKED["echo"][1], "logprobs": 4}).status_code == 200
    assert threads == [loop_thread] * 3


def test_case_114_short_lists_of_prompts_count(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(max_listed=800)) as client:
        asked: dict[str, Any] = {"prompt": [IDS] * 4, "max_tokens": 1}
        for fields, param in (({"echo": True, "logprobs": 5}, "logprobs"), ({"prompt_logprobs": 5}, "prompt_logprobs")):
            assert client.http.post(COMPLETIONS, json={**asked, **fields}).status_code == 200
            more = {**asked, **fields, "prompt": [IDS] * 5}
            message = check(client.http.post(COMPLETIONS, json=more), 400, param)
            assert "1000" in message
            assert "800" in message
            assert "--max-listed" in message
        # A choice of a stream shows its prompt itself.
        more = {**asked, "echo": True, "logprobs": 5, "n": 2}
        assert client.http.post(COMPLETIONS, json=more).status_code == 200
        check(client.http.post(COMPLETIONS, json={**more, "stream": True}), 400, "logprobs")
