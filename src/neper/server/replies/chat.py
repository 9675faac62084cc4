"""The chat endpoint's JSON: messages, their deltas, and logprobs per token of each of their fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import orjson

from neper.server.bodies.chat import ChatBody
from neper.server.choice import Choice, Delta, Part, join_rows
from neper.server.generation import Generation
from neper.server.replies.choices import ChoicesReply
from neper.server.replies.message_entries import MessageEntries
from neper.server.service import Service
from neper.text.token_text import Field
from neper.text.tools import MadeCall
from neper.types import JsonObject, PackedRows

# Which list of a choice's logprobs has the entries of a field. Those of a call's name and arguments follow each other.
_LISTS: dict[Field, str] = {
    "content": "content",
    "reasoning": "reasoning_content",
    "name": "tool_calls",
    "arguments": "tool_calls",
}


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def json(self) -> JsonObject:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass
class _Folded:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    entries: dict[str, list[bytes]] = field(default_factory=lambda: {"content": []})
    sampled: list[PackedRows | None] = field(default_factory=list)
    last: Delta | None = None


class ChatReply(ChoicesReply[ChatBody]):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody, generation: Generation, reply_id: str) -> None:
        super().__init__(service, body, generation, reply_id)
        self._entries = MessageEntries(service.entries, ids_as_text=self.ids_as_text)
        self._folded = [_Folded() for _ in generation.choices]
        self._prompt_logprobs: bytes | None = None

    def write_prompt(self, choice: Choice) -> None:
        entries = self.prompt_logprobs(choice)
        if entries is not None:
            self._prompt_logprobs = entries

    def begin(self) -> bytes:
        extra = b""
        if self.request.return_token_ids:
            extra = b',"prompt_token_ids":' + orjson.dumps(self.generation.choices[0].prompt.token_ids)
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            [
                self.chunk({"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}, extra)
                for choice in self.generation.choices
            ]
        )

    def event(self, delta: Delta) -> bytes:
        sampled = delta.sampled if self.request.return_token_ids else None
        shown = []  # each with the place among the delta's tokens where it ends
        if delta.parts is None:
            entries = self._entries.of_delta(delta)
            if delta.text or entries:
                text = b'{"content":%b}' % orjson.dumps(delta.text)
                shown.append((text, _logprobs("content", entries), len(delta.tokens)))
        else:
            ends = _ends(delta.parts) if sampled else [0] * len(delta.parts)
            for part, end in zip(delta.parts, ends, strict=True):
                entries = self._entries.of_part(delta, part)
                if part.text or entries:
                    fields = self._part_delta(delta.index, part)
                    shown.append((fields, _logprobs(_LISTS[part.field], entries), end))
        start, last = 0, max((end for *_, end in shown), default=0)
        if sampled and last < len(sampled) and delta.finish_reason is None:
            shown.append((b'{"content":""}', b"null", len(sampled)))
        events = []
        for fields, logprobs, end in shown:
            extra = b""
            if sampled and end > start:
                rows = sampled if end - start == len(sampled) else sampled[start:end]
                extra = b"," + orjson.dumps(self.sampled_fields(delta.index, rows))[1:-1]
                start = end
            events.append(
                b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}]%b'
                % (self.head, delta.index, fields, logprobs, extra, self.tail)
            )
        if delta.finish_reason is not None:
            choice = {
                "index": delta.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
                **self.sampled_fields(delta.index, sampled[start:] if sampled else None),
            }
            events.append(self.chunk(choice))
        return b"".join(events)

    def _part_delta(self, index: int, part: Part) -> bytes:
        if part.field == "content":
            return b'{"content":%b}' % orjson.dumps(part.text)
        if part.field == "reasoning":
            return b'{"reasoning_content":%b}' % orjson.dumps(part.text)
        if part.field == "arguments":
            text = orjson.dumps(part.text)
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (part.call, text)
        call_id, arguments = begun_call(self.service, self.generation.choices[index], part)
        return orjson.dumps({"tool_calls": [{"index": part.call, **_Call(call_id, part.text, [arguments]).json()}]})

    def failure(self, index: int) -> bytes:
        return self.chunk({"index": index, "delta": {}, "logprobs": None, "finish_reason": "error"})

    def add(self, delta: Delta) -> None:
        folded = self._folded[delta.index]
        folded.sampled.append(delta.sampled)
        folded.last = delta
        if delta.parts is None:
            folded.content.append(delta.text)
            if entries := self._entries.of_delta(delta):
                folded.entries["content"].append(entries)
            return
        for part in delta.parts:
            if part.field == "content":
                folded.content.append(part.text)
            elif part.field == "reasoning":
                folded.reasoning.append(part.text)
            elif part.field == "name":
                call_id, arguments = begun_call(self.service, self.generation.choices[delta.index], part)
                folded.calls.append(_Call(call_id, part.text, [arguments]))
            else:
                folded.calls[part.call].arguments.append(part.text)
            if entries := self._entries.of_part(delta, part):
                folded.entries.setdefault(_LISTS[part.field], []).append(entries)

    def parts(self) -> Iterator[bytes]:
        extra: JsonObject = {}
        if self._prompt_logprobs is not None:
            extra["prompt_logprobs"] = orjson.Fragment(b"[%b]" % self._prompt_logprobs)
        if self.request.return_token_ids:
            extra["prompt_token_ids"] = self.generation.choices[0].prompt.token_ids
        return self.full(map(self._choice, range(len(self._folded))), **extra)

    def _choice(self, index: int) -> JsonObject:
        folded, self._folded[index] = self._folded[index], _Folded()
        last = folded.last
        content = "".join(folded.content)
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
        parser = self.generation.choices[index].parser
        if parser is not None and parser.reasons:
            message["reasoning_content"] = "".join(folded.reasoning) or None
            folded.entries.setdefault("reasoning_content", [])
        if folded.calls:
            message["content"] = content or None
            message["tool_calls"] = [call.json() for call in folded.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": _all_logprobs(folded) if self.generation.choices[index].scored else None,
            "finish_reason": last and last.finish_reason,
            "stop_reason": last and last.stop_reason,
            **self.sampled_fields(index, join_rows(folded.sampled)),
        }


def _ends(parts: Sequence[Part]) -> list[int]:
    """Where the tokens end of which each part's chunk tells: those of its text, and those before it that are in none.

    A token in two parts goes with the first. A name that came after its arguments is shown before them, so its tokens
    come with theirs.
    """
    firsts = [*accumulate((part.places[0] for part in reversed(parts)), min)][::-1]
    lasts = accumulate((part.places[-1] for part in parts), max)
    following = [*firsts[1:], None][: len(parts)]
    return [last + 1 if first is None or last <= first else first for last, first in zip(lasts, following, strict=True)]


def _all_logprobs(folded: _Folded) -> JsonObject:
    lists = {name: orjson.Fragment(b"[%b]" % b",".join(entries)) for name, entries in folded.entries.items()}
    return {"content": lists.pop("content"), "refusal": None, **lists}


def _logprobs(name: str, entries: bytes) -> bytes:
    """A chunk's logprobs, with entries in one of the lists alone."""
    if not entries:
        return b"null"
    if name == "content":
        return b'{"content":[%b],"refusal":null}' % entries
    return b'{"content":[],"refusal":null,"%b":[%b]}' % (name.encode(), entries)


def begun_call(service: Service, choice: Choice, part: Part) -> tuple[str, str]:
    """The id and the arguments without tokens of the call whose name this part is."""
    made = MadeCall() if choice.parser is None else choice.parser.made(part.call)
    return made.id or service.tokenizer.new_call_id(), "{}" if made.empty else ""
