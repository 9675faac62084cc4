"""What a reply must be whatever the client: entries that spell the text, and the numbers that raw HTTP brings."""

from __future__ import annotations

from typing import Any

import httpx

Entries = list[dict[str, Any]]


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The reply's JSON, without any client."""
    response = httpx.post(url + path, json=body, timeout=120)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def check_spelling(text: str, entries: Entries, top: int) -> None:
    """Tokens and bytes join to the text; alternatives are `top` distinct ones, in order."""
    assert text
    assert "".join(entry["token"] for entry in entries) == text
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace") == text
    for entry in entries:
        values = [alternative["logprob"] for alternative in entry["top_logprobs"]]
        assert len({bytes(alternative["bytes"]) for alternative in entry["top_logprobs"]}) == len(values) == top
        assert values == sorted(values, reverse=True)
        assert all(value <= 0 for value in [entry["logprob"], *values])


def plain(entries: Any) -> Entries:
    """Entries that a client made objects of, as JSON again, without the keys that only a client adds."""
    keys = ("token", "logprob", "bytes")
    return [
        {
            **{key: entry[key] for key in keys},
            "top_logprobs": [{key: other[key] for key in keys} for other in entry["top_logprobs"]],
        }
        for entry in (entry if isinstance(entry, dict) else entry.model_dump() for entry in entries)
    ]


def legacy_bytes(token: str) -> bytes:
    """The bytes of a token of the legacy arrays, where a piece of a character is written out: `bytes:\\xf0\\x9f`."""
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
