"""Case 82: every list of a chunk belongs to that chunk's text, however text, stops and tokens meet."""

from __future__ import annotations

import random

import pytest

from tests.cases.conftest import CHAT, COMPLETIONS
from tests.helpers.invariants import Json
from tests.helpers.scripted_engine import scores
from tests.server.conftest import END, VOCAB_SIZE, Client

TOOL: Json = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
CALLS = [
    '<tool_call>\n{"name": "clock", "arguments": {"a": "日本 😀"}}\n</tool_call>',
    '<tool_call>{"arguments": {"city": "Paris"}, "name": "clock"}</tool_call>',
    "<tool_call>\n{oops",
]
WORDS = [
    "the answer",
    " is ",
    "日本語",
    "😀",
    "STOP",
    "ST",
    "aaab",
    "aab",
    "\n",
    "naïve",
    " ",
    "<",
    "{",
    "Hello, world!",
]
OPTIONS: Json = {"logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True}


def random_text(draw: random.Random, *, parsed: bool) -> str:
    texts = ["".join(draw.choices(WORDS, k=draw.randrange(6))) for _ in range(3)]
    if not parsed:
        return "".join(texts)
    thought = f"<think>\n{texts[0]}\n</think>\n\n" if draw.random() < 0.6 else ""
    calls = "\n".join(draw.choices(CALLS, k=draw.randrange(3)))
    return f"{thought}{texts[1]}{calls}{texts[2]}"


def random_ids(draw: random.Random, client: Client, text: str) -> list[int]:
    """Ids that spell the text, cut into tokens at random places too: also in the middle of characters."""
    ids: list[int] = []
    while text:
        length = draw.choice([1, draw.randrange(1, 40)])
        if length == 1:
            ids += [bytes_of(client).index(bytes([byte])) for byte in text[:1].encode()]
        else:
            ids += client.tokenizer.encode(text[:length], add_special_tokens=False)
        text = text[length:]
    return ids


def bytes_of(client: Client) -> list[bytes]:
    return [client.tokenizer.token_bytes(token_id) for token_id in range(VOCAB_SIZE)]


def random_stops(draw: random.Random, text: str) -> list[str]:
    """Some that the text has, some that it only begins to have."""
    stops = []
    for _ in range(draw.randrange(4)):
        start = draw.randrange(max(len(text), 1))
        found = text[start : start + draw.randrange(1, 9)]
        stops.append((found or "x") + "!" * draw.randrange(2))
    return stops


def entries_of(choice: Json) -> list[tuple[int, float]]:
    """(id, logprob) of all entries of a chunk, in the order of its text."""
    lists = choice["logprobs"]
    if lists is None:
        return []
    if "tokens" in lists:
        return [
            (int(token.removeprefix("token_id:")), number)
            for token, number in zip(lists["tokens"], lists["token_logprobs"], strict=True)
        ]
    return [
        (int(entry["token"].removeprefix("token_id:")), entry["logprob"])
        for name in ("content", "reasoning_content", "tool_calls")
        for entry in lists.get(name, [])
    ]


def text_of(choice: Json) -> str:
    if "text" in choice:
        return str(choice["text"])
    delta = choice["delta"]
    texts = [delta.get("reasoning_content", ""), delta.get("content", "")]
    for call in delta.get("tool_calls", []):
        texts += [call["function"].get("name", ""), call["function"].get("arguments", "")]
    return "".join(texts)


class Read:
    """A stream that is read chunk by chunk, each held against what came before it.

    Attributes:
        shown: places of the tokens of all entries so far.
        textless: places of tokens that came while they had no entry: none may come for them.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.numbers: list[float] = []
        self.text = ""
        self.shown: list[int] = []
        self.textless: set[int] = set()
        self.chunks = 0
        self._waiting: list[Json] = []

    def take(self, choice: Json) -> None:
        self._waiting.append(choice)
        before = len(self.ids)
        ids, numbers = list(self.ids), list(self.numbers)
        for waiting in self._waiting:
            ids += waiting.get("token_ids", [])
            numbers += waiting.get("token_logprobs", [])
        assert len(numbers) == len(ids)
        # Of which token an entry is: that with its number, for numbers tell places apart.
        tokens = list(zip(ids, numbers, strict=True))
        entries = [entry for waiting in self._waiting for entry in entries_of(waiting)]
        calls = choice.get("delta", {}).get("tool_calls", [])
        if calls and "id" in calls[0] and not set(entries) <= set(tokens):
            return  # a name that came after its arguments: it is shown before them, and its tokens come with theirs
        places = [tokens.index(entry) for entry in entries]
        # None of a token that came before, but for one that has a part in this text too.
        assert all(place >= before or place == max(self.shown) for place in places)
        self.ids, self.numbers = ids, numbers
        self.text += "".join(map(text_of, self._waiting))
        self.shown += places
        self.textless |= set(range(before, len(ids))) - set(places)
        self.chunks += 1
        self._waiting = []

    def end(self, prompt: int) -> None:
        assert self._waiting == []
        assert not self.textless & set(self.shown), "a token came before its text"
        for place, (token_id, number) in enumerate(zip(self.ids, self.numbers, strict=True), prompt):
            assert number == pytest.approx(float(scores(place, token_id, VOCAB_SIZE)[token_id]), abs=1e-5)


def read(client: Client, path: str, body: Json) -> Read:
    found = Read()
    for event in client.events(path, **({"prompt": "Hello"} if path == COMPLETIONS else {}), **body):
        [choice] = event["choices"]
        if choice.get("delta", {}).get("role"):
            assert "token_ids" not in choice
        else:
            found.take(choice)
    found.end(len(client.engine.submitted[-1].prompt_token_ids))
    return found


def check_one(client: Client, seed: int, *, parsed: bool) -> int:
    draw = random.Random(seed)
    text = random_text(draw, parsed=parsed)
    ids = random_ids(draw, client, text)
    client.say(ids)
    client.engine.tokens_per_chunk = draw.choice([1, 1, 2, 3, 7, 100])
    body: Json = {"stop": random_stops(draw, text), "include_stop_str_in_output": draw.random() < 0.3}
    if draw.random() < 0.3:
        body["max_tokens"] = draw.randrange(1, len(ids) + 2)
    if parsed:
        path = CHAT
        body |= {"tools": [TOOL], "parallel_tool_calls": draw.random() < 0.8}
    else:
        path = draw.choice([CHAT, COMPLETIONS])
    if path == COMPLETIONS:
        body |= {"logprobs": draw.randrange(3), "max_tokens": body.get("max_tokens", 500)}
    full_body = {**OPTIONS, **body}
    found = read(client, path, full_body)
    whole = client.chat(**full_body) if path == CHAT else client.complete(**full_body)
    [choice] = whole["choices"]
    assert (found.ids, found.numbers) == (choice["token_ids"], choice["token_logprobs"])
    assert found.ids == [*ids, END][: len(found.ids)]
    assert whole["usage"]["completion_tokens"] == len(found.ids)
    if not parsed:
        # The text of all but what was cut off: what the ids spell.
        said = client.tokenizer.decode_bytes([i for i in found.ids if i != END]).decode("utf-8", "replace")
        assert said.startswith(found.text.rstrip("\ufffd"))
    return found.chunks


@pytest.mark.rounds(100)
@pytest.mark.parametrize("parsed", [False, True], ids=["text", "parsed"])
def test_case_82_every_prefix_of_a_stream_agrees(
    scripted: Client, reasoning: Client, rounds: int, parsed: bool
) -> None:
    client = reasoning if parsed else scripted
    assert sum(check_one(client, seed, parsed=parsed) for seed in range(rounds)) > rounds


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_case_82_what_a_stop_string_holds_back_waits_with_its_ids(scripted: Client, path: str) -> None:
    scripted.say("one STOX two")
    body: Json = {"return_token_ids": True, "stop": "STOP"}
    body |= {"logprobs": True} if path == CHAT else {"logprobs": 0, "prompt": "Hello", "max_tokens": 50}
    chunks = [event["choices"][0] for event in scripted.events(path, **body)]
    held = [choice for choice in chunks if choice["finish_reason"] is None and "token_ids" in choice]
    assert len(held) > 3
    for choice in held:
        assert scripted.tokenizer.decode_bytes(choice["token_ids"]).decode() == text_of(choice)
        assert choice["token_logprobs"] == [number for _, number in numbers_of(choice)]


def numbers_of(choice: Json) -> list[tuple[str, float]]:
    lists = choice["logprobs"]
    if "tokens" in lists:
        return list(zip(lists["tokens"], lists["token_logprobs"], strict=True))
    return [(entry["token"], entry["logprob"]) for entry in lists["content"]]
