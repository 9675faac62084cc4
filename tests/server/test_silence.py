"""Streams that wait: their headers are there at once, and comments while nothing else comes."""

from __future__ import annotations

from typing import Any

import pytest

from neper.config import ServerConfig
from neper.text.tokenizer import Tokenizer
from tests.server.conftest import MODEL, running, until
from tests.server.test_errors import CHAT, COMPLETIONS, MESSAGES, check
from tests.server.test_failures import body
from tests.server.test_responses import PATH as RESPONSES

COMMENT = ": waiting"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_case_93_headers_come_at_once_and_comments_while_it_waits(tokenizer: Tokenizer, path: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Hello"} if path == RESPONSES else body(path)
    with running(tokenizer, ServerConfig(stream_ping_interval=0.02)) as client:
        client.say("Hello")
        client.engine.hang_after = 0
        with client.http.stream("POST", path, json={**asked, "stream": True}) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            assert [next(lines) for _ in range(4)] == [COMMENT, "", COMMENT, ""]
        until(lambda: client.server.service.num_choices == 0)


def test_case_93_clients_read_over_comments(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(stream_ping_interval=0.01)) as client:
        client.say("the quick brown")
        want = client.chat()["choices"][0]["message"]["content"]
        client.engine.delay = 0.03  # the comment's timer comes before the token's
        assert client.http.post(CHAT, json=body(CHAT, stream=True)).text.startswith(f"{COMMENT}\n\n")
        messages: Any = MESSAGES
        with client.sdk.chat.completions.create(model=MODEL, messages=messages, stream=True) as stream:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == want
        with client.sdk.responses.create(model=MODEL, input="Hello", stream=True) as events:
            assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == want


def test_case_93_no_comments_where_none_are_wanted_and_statuses_of_what_is_known_before(tokenizer: Tokenizer) -> None:
    with running(tokenizer, ServerConfig(stream_ping_interval=0)) as client:
        client.say("Hello")
        client.engine.delay = 0.05
        assert "\n:" not in "\n" + client.http.post(CHAT, json=body(CHAT, stream=True)).text
        check(client.http.post(CHAT, json=body(CHAT, stream=True, top_p=7)), 400, "top_p")
        client.engine.overloaded = True
        check(client.http.post(CHAT, json=body(CHAT, stream=True)), 503, None, "overloaded")
