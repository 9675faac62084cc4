"""Chat replies in one form, streamed or not: every field's text with the entries that must spell it."""

from __future__ import annotations

from typing import Any

LISTS = ("content", "reasoning_content", "tool_calls")


def joined(entries: list[dict[str, Any]]) -> tuple[str, bytes]:
    return "".join(entry["token"] for entry in entries), b"".join(bytes(entry["bytes"]) for entry in entries)


def whole(reply: dict[str, Any], index: int = 0) -> dict[str, Any]:
    """One choice of a full reply."""
    choice = reply["choices"][index]
    message, logprobs = choice["message"], choice["logprobs"] or {}
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content") or "",
        "calls": calls,
        "entries": {name: logprobs.get(name, []) for name in LISTS},
        "finish": choice["finish_reason"],
        "stop": choice["stop_reason"],
        "ids": choice.get("token_ids", []),
        "numbers": choice.get("token_logprobs", []),
    }


def fold(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """One choice of a stream, each of whose chunks must be consistent by itself."""
    texts = {"content": "", "reasoning_content": ""}
    calls: list[list[str]] = []
    entries: dict[str, list[dict[str, Any]]] = {name: [] for name in LISTS}
    finish, stop = None, None
    ids: list[int] = []
    numbers: list[float] = []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            shown = dict.fromkeys(LISTS, "")
            for name in texts:
                shown[name] = choice["delta"].get(name, "")
                texts[name] += shown[name]
            for call in choice["delta"].get("tool_calls", []):
                function = call["function"]
                if "id" in call:
                    assert call["type"] == "function"
                    assert call["index"] == len(calls)
                    calls.append([function["name"], ""])
                else:
                    assert function.keys() == {"arguments"}
                calls[call["index"]][1] += function["arguments"]
                shown["tool_calls"] += function.get("name", "") + function["arguments"]
            if choice["logprobs"] is not None:
                assert choice["logprobs"].keys() >= {"content", "refusal"}
                for name in LISTS:
                    found = choice["logprobs"].get(name, [])
                    assert joined(found)[0] == shown[name]
                    entries[name] += found
            ids += choice.get("token_ids", [])
            numbers += choice.get("token_logprobs", [])
            finish = choice["finish_reason"] or finish
            stop = choice.get("stop_reason") or stop
    return {
        **texts,
        "calls": [tuple(call) for call in calls],
        "entries": entries,
        "finish": finish,
        "stop": stop,
        "ids": ids,
        "numbers": numbers,
    }


def check_spelling(reply: dict[str, Any]) -> None:
    """Every field of a `whole` or `fold` is what its entries spell, in texts and in bytes."""
    texts = {
        "content": reply["content"],
        "reasoning_content": reply["reasoning_content"],
        "tool_calls": "".join(name + arguments for name, arguments in reply["calls"]),
    }
    for name, text in texts.items():
        spelled, data = joined(reply["entries"][name])
        assert (spelled, data.decode("utf-8", "replace")) == (text, text), name
