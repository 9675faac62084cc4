"""What every reply must be, whatever was asked: the API's rules for text and entries, checked from outside."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import pytest

Json = dict[str, Any]
Kind = Literal["chat", "completions"]

FLOOR = -9999.0
ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
RAW_VIEWS = (None, "raw_logprobs", "tempered_logprobs")
TEXTS = ("content", "reasoning_content")


def fold(events: Sequence[str]) -> Json:
    """The full reply that a stream's events (without [DONE]) amount to. Each chunk must be consistent by itself."""
    chunks: list[Json] = [json.loads(event.removeprefix("data: ")) for event in events]
    reply: Json = {key: value for key, value in chunks[0].items() if key not in ("choices", "usage")}
    reply["object"] = reply["object"].removesuffix(".chunk")
    choices: dict[int, Json] = {}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        assert {chunk[key] for key in ("id", "created", "model")} == {reply[key] for key in ("id", "created", "model")}
        if chunk.get("usage") is not None:
            assert chunk is chunks[-1]
            assert chunk["choices"] == []
            reply["usage"] = chunk["usage"]
            continue
        if "prompt_token_ids" in chunk:
            reply["prompt_token_ids"] = chunk["prompt_token_ids"]
        [piece] = chunk["choices"]
        choice = choices.setdefault(piece["index"], {"index": piece["index"], "logprobs": None, "finish_reason": None})
        assert choice["finish_reason"] is None, "a chunk after the last"
        if "delta" in piece:
            _fold_chat(choice, piece)
        else:
            _fold_completion(choice, piece)
        for name in ("token_ids", "token_logprobs"):
            if name in piece:
                choice[name] = choice.get(name, []) + piece[name]
        choice["finish_reason"] = piece["finish_reason"]
        choice["stop_reason"] = piece.get("stop_reason")
    for choice in choices.values():
        assert choice["finish_reason"] in ("stop", "length", "tool_calls")
    return {**reply, "choices": [choices[index] for index in sorted(choices)]}


def _fold_chat(choice: Json, piece: Json) -> None:
    delta, logprobs = piece["delta"], piece["logprobs"]
    if "message" not in choice:
        assert delta == {"role": "assistant", "content": ""}
        assert logprobs is None
        choice["message"] = {**delta, "refusal": None}
        return
    message = choice["message"]
    shown = dict.fromkeys([*TEXTS, "tool_calls"], "")
    for name in TEXTS:
        shown[name] = delta.get(name, "")
        if shown[name]:
            message[name] = message.get(name, "") + shown[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if "id" in call:
            assert call["index"] == len(calls)
            calls.append({key: value for key, value in call.items() if key != "index"})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        shown["tool_calls"] += call["function"].get("name", "") + call["function"]["arguments"]
    if logprobs is None:
        return
    lists = choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
    assert logprobs["refusal"] is None
    for name, text in shown.items():
        entries = logprobs.get(name, [])
        if entries:
            lists[name] = lists.get(name, []) + entries
            if not _is_id(entries[0]["token"]):
                assert "".join(entry["token"] for entry in entries) == text, "entries of another delta"


def _fold_completion(choice: Json, piece: Json) -> None:
    choice["text"] = choice.get("text", "") + piece["text"]
    if "prompt_token_ids" in piece:
        choice["prompt_token_ids"] = piece["prompt_token_ids"]
    arrays = piece["logprobs"]
    if arrays is None:
        return
    if choice["logprobs"] is None:
        choice["logprobs"] = {name: None if arrays[name] is None else [] for name in ARRAYS}
    for name in ARRAYS:
        assert (arrays[name] is None) == (choice["logprobs"][name] is None)
        if arrays[name] is not None:
            choice["logprobs"][name] += arrays[name]


def check_reply(kind: Kind, body: Json, reply: Json) -> None:
    """Asserts all that a full reply (or a stream folded into one) to this request must fulfil.

    What needs token ids is checked where the request asks for them: `return_token_ids`, and
    `return_tokens_as_token_ids`, which makes every token's text `token_id:N`.
    """
    assert reply["object"] == ("chat.completion" if kind == "chat" else "text_completion")
    n = body.get("n") or 1
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(reply["choices"])))
    assert len(reply["choices"]) % n == 0
    if kind == "chat":
        assert len(reply["choices"]) == n
    for choice in reply["choices"]:
        if kind == "chat":
            _check_message(body, choice)
        else:
            _check_completion(body, choice)
    if "usage" in reply:
        _check_usage(body, reply)


def _check_usage(body: Json, reply: Json) -> None:
    usage, choices = reply["usage"], reply["choices"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    if not body.get("return_token_ids"):
        return
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    prompts = [reply] if "prompt_token_ids" in reply else choices[:: body.get("n") or 1]
    assert usage["prompt_tokens"] == sum(len(prompt["prompt_token_ids"]) for prompt in prompts)


def _check_message(body: Json, choice: Json) -> None:
    message, logprobs = choice["message"], choice["logprobs"]
    assert message["role"] == "assistant"
    assert message["refusal"] is None
    calls = message.get("tool_calls", [])
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")
    assert choice["finish_reason"] != "tool_calls" or calls
    if _top_logprobs(body) is None:
        assert logprobs is None
        assert "token_logprobs" not in choice
        return
    fields = {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content") or "",
        "tool_calls": "".join(call["function"]["name"] + call["function"]["arguments"] for call in calls),
    }
    if logprobs is None:  # a stream without a single entry
        assert set(fields.values()) == {""}
        return
    assert logprobs["refusal"] is None
    assert logprobs.keys() <= {"content", "refusal", "reasoning_content", "tool_calls"}
    for name, text in fields.items():
        entries = logprobs.get(name, [])
        data = b"".join(bytes(entry["bytes"]) for entry in entries)
        assert data.decode("utf-8", "replace") == text, f"bytes of {name}"
        if not body.get("return_tokens_as_token_ids"):
            assert "".join(entry["token"] for entry in entries) == text, f"tokens of {name}"
        for entry in entries:
            _check_entry(body, entry)
        _check_numbers(body, choice, [(entry["token"], entry["logprob"]) for entry in entries])


def _check_entry(body: Json, entry: Json) -> None:
    assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
    listed = entry["top_logprobs"]
    assert all(item.keys() == {"token", "logprob", "bytes"} for item in listed)
    values = [item["logprob"] for item in listed]
    _check_values([entry["logprob"], *values])
    assert values == sorted(values, reverse=True)
    as_ids = bool(body.get("return_tokens_as_token_ids"))
    # Ids without a token have no bytes of their own; in this tokenizer all others differ.
    names = [item["token"] for item in listed] if as_ids else [bytes(i["bytes"]) for i in listed if i["bytes"]]
    assert len(set(names)) == len(names)
    least, most = _list_length(body, _top_logprobs(body) or 0)
    assert least <= len(listed) <= most
    if not as_ids:
        return
    own = [item["logprob"] for item in listed if item["token"] == entry["token"]]
    assert own in ([], [entry["logprob"]])
    ids = {int(item["token"].removeprefix("token_id:")) for item in listed}
    if body.get("logprob_token_ids"):
        assert ids == set(body["logprob_token_ids"])
    elif body.get("allowed_token_ids"):
        assert ids == set(body["allowed_token_ids"])
    elif values:
        # Among the top k: equal to the last of them it may be either.
        assert own or entry["logprob"] <= values[-1] or len(values) < least
        assert not own or entry["logprob"] >= values[-1]


def _check_numbers(body: Json, choice: Json, entries: Sequence[tuple[str, float]]) -> None:
    """Entries are among the sampled tokens, in their order and with their numbers."""
    if not body.get("return_token_ids"):
        return
    assert len(choice["token_logprobs"]) == len(choice["token_ids"])
    _check_values(choice["token_logprobs"])
    sampled: Iterator[tuple[int, float]] = iter(zip(choice["token_ids"], choice["token_logprobs"], strict=True))
    current = next(sampled, None)
    for token, value in entries:
        while current is not None and not _same(token, value, current):
            current = next(sampled, None)
        # It stays: a token can have a part in a name and in the arguments after it.
        assert current is not None, f"{token!r} {value} was not sampled there"


def _same(token: str, value: float, sampled: tuple[int, float]) -> bool:
    return value == sampled[1] and (not _is_id(token) or token == f"token_id:{sampled[0]}")


def _check_completion(body: Json, choice: Json) -> None:
    arrays = choice["logprobs"]
    if body.get("logprobs") is None:
        assert arrays is None
        assert "token_logprobs" not in choice
        return
    if arrays is None:  # a stream without a single entry
        assert not body.get("echo")
        assert choice["text"] == ""
        return
    assert set(arrays) == set(ARRAYS)
    tokens, values, tops, offsets = (arrays[name] for name in ARRAYS)
    count = len(tokens)
    assert len(values) == len(offsets) == count
    least, most = _list_length(body, body["logprobs"])
    assert len(tops) == count
    prompt = choice.get("prompt_token_ids")
    begin = 0
    if body.get("echo"):
        assert values[0] is None
        assert offsets[0] == 0
        assert tops[0] is None
        begin = 1
        if prompt is not None:
            begin = len(prompt)
            _check_legacy_rows(body, arrays, range(1, begin), body["logprobs"], body["logprobs"])
    _check_values(values[1 if body.get("echo") else 0 :])
    assert offsets == sorted(offsets)
    if not body.get("echo") or prompt is not None:
        _check_legacy_rows(body, arrays, range(begin, count), least, most)
        if body.get("return_token_ids"):
            sampled = choice["token_ids"]
            # A stop string cuts off the entries of tokens that it spells.
            assert count - begin <= len(sampled)
            assert values[begin:] == choice["token_logprobs"][: count - begin]
            if choice["finish_reason"] == "length" or not isinstance(choice["stop_reason"], str):
                assert count - begin == len(sampled)
            if body.get("return_tokens_as_token_ids"):
                everything = [*prompt[:begin], *sampled] if body.get("echo") and prompt else sampled
                assert tokens == [f"token_id:{token_id}" for token_id in everything[:count]]
    if count and not body.get("return_tokens_as_token_ids"):
        _check_spans(choice["text"], tokens, [*offsets, offsets[0] + len(choice["text"])])


def _check_legacy_rows(body: Json, arrays: Json, places: range, least: int, most: int) -> None:
    for place in places:
        token, value, top = (arrays[name][place] for name in ("tokens", "token_logprobs", "top_logprobs"))
        listed = list(top.values())
        _check_values(listed)
        assert token in top
        assert len(top) <= most + 1
        # Other ids than the sampled one may read alike: the best of them is the value then.
        assert top[token] >= value
        if body.get("return_tokens_as_token_ids"):
            assert top[token] == value
            assert len(top) >= least
            others = sorted((v for key, v in top.items() if key != token), reverse=True)
            assert len(top) <= most or least < most or all(v >= value for v in others) or _named(body)


def _check_spans(text: str, tokens: Sequence[str], offsets: Sequence[int]) -> None:
    """Each token's label fits the text from its offset to the next one's.

    Before its own text may stand what it broke off: one U+FFFD, or two for the beginning of a surrogate (ED A0 to
    ED BF), which a decoder keeps until the third byte.
    """
    base = offsets[0]
    for token, (start, end) in zip(tokens, pairwise(offsets), strict=True):
        span = text[start - base : end - base]
        if token.startswith("bytes:"):
            # What it breaks, and a stop string in the middle of what it completes aside, shows as U+FFFD.
            data = bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
            whole = data.decode("utf-8", "replace")
            assert len(span) <= len(whole) + 2, (token, span)
            assert all(character == "\ufffd" or character in whole or ord(character) > 127 for character in span)
        else:
            # Invisible, or in the text.
            assert span in ("", token, "\ufffd" + token, "\ufffd\ufffd" + token), (token, span)


def _check_values(values: Sequence[float]) -> None:
    for value in values:
        assert isinstance(value, float | int)
        assert FLOOR <= value <= 0, value


def _top_logprobs(body: Json) -> int | None:
    logprobs = body.get("logprobs")
    if logprobs is None or logprobs is False:
        return None
    return body.get("top_logprobs") or 0 if logprobs is True else int(logprobs)


def _named(body: Json) -> bool:
    return bool(body.get("logprob_token_ids") or body.get("allowed_token_ids"))


def _list_length(body: Json, k: int) -> tuple[int, int]:
    """The fewest and the most alternatives that a generated token's list may have."""
    for name in ("logprob_token_ids", "allowed_token_ids"):
        if body.get(name):
            return len(set(body[name])), len(set(body[name]))
    # Only the sampler's own view leaves tokens without any probability.
    return (k if body.get("logprobs_mode") in RAW_VIEWS else min(k, 1)), k


def close(found: Any, expected: Any) -> None:
    """The same but for numbers, which are within 1e-4, and for ids whose numbers are too near to tell apart."""
    if isinstance(expected, dict):
        values = list(expected.values())
        if values and all(isinstance(value, float) for value in values):
            # At the end of a list two may be too near to tell which is in it.
            assert sorted(found.values()) == pytest.approx(sorted(values), abs=1e-4)
            return
        assert found.keys() == expected.keys()
        for name in expected:
            if name != "top_logprobs" or not isinstance(expected[name], list):
                close(found[name], expected[name])
            else:
                close([_values_of(item) for item in found[name]], [_values_of(item) for item in expected[name]])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4)
    else:
        assert found == expected


def _values_of(item: Any) -> Any:
    return item["logprob"] if isinstance(item, dict) and "logprob" in item else item


def _is_id(token: str) -> bool:
    return token.startswith("token_id:")
