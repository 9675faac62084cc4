"""Conversations as ids, and templates that a request brings along; case 110."""

from __future__ import annotations

from typing import Any

import pytest

from neper.config import ServerConfig
from neper.text.tokenizer import Tokenizer
from tests.server.conftest import Client, running
from tests.server.test_errors import CHAT, MESSAGES, check

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"mood": "glad"}},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "I"}], "continue_final_message": True},
    ],
    ids=str,
)
def test_case_110_a_conversation_s_ids_are_those_that_chat_computes(client: Client, options: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, **options}
    ids = client.http.post("/tokenize", json=body).json()["tokens"]
    client.say("Hello")
    assert client.http.post(CHAT, json={**body, "max_tokens": 2}).status_code == 200
    assert client.engine.submitted[-1].prompt_token_ids == ids


def test_case_110_a_request_s_own_template(tokenizer: Tokenizer, client: Client) -> None:
    refused = client.http.post(CHAT, json={"messages": MESSAGES, "chat_template": TEMPLATE})
    assert "--trust-request-chat-template" in check(refused, 400, "chat_template", "unsupported")
    with running(tokenizer, ServerConfig(trust_request_chat_template=True)) as trusting:
        trusting.say("Hello")
        body = {"messages": [{"role": "user", "content": "Hello there"}], "chat_template": TEMPLATE}
        assert trusting.http.post(CHAT, json=body).status_code == 200
        ids = trusting.engine.submitted[-1].prompt_token_ids
        assert tokenizer.decode_bytes(ids) == b"[Hello there]>"
        assert trusting.http.post("/tokenize", json=body).json()["tokens"] == ids
        for wrong in (
            "{% for",
            "{{ raise_exception('no') }}",
            "{% for a in range(99999999) %}{% endfor %}",
            "{{ 1/0 }}",
            "",
            "{{ nothing }}",
            "{{ messages[0].content }}" * 9000,
        ):
            response = trusting.http.post(CHAT, json={**body, "chat_template": wrong})
            assert response.status_code == 400, response.text
            assert "template" in response.json()["error"]["message"]
        assert trusting.http.post(CHAT, json={"messages": MESSAGES}).status_code == 200
