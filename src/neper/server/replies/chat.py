"""The chat endpoint's JSON: messages, their deltas, and logprobs per token of each of their fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

from neper.server.bodies.chat import ChatBody
from neper.server.choice import Choice, Delta, Part, join_rows
from neper.server.generation import Generation
from neper.server.replies.choices import ChoicesReply
from neper.server.replies.encoding import HOLE, encode, ready, template
from neper.server.replies.message_entries import MessageEntries
from neper.server.schemas.chat import (
    CallDelta,
    CalledFunction,
    CalledFunctionDelta,
    CallMade,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from neper.server.service import Service
from neper.text.token_text import Field
from neper.text.tools import MadeCall
from neper.types import JsonObject, PackedRows

# Field → the list of a choice's logprobs with its entries. Those of a call's name and arguments follow each other.
_LISTS: dict[Field, str] = {
    "content": "content",
    "reasoning": "reasoning_content",
    "name": "tool_calls",
    "arguments": "tool_calls",
}


def _logprobs(name: str, entries: Any) -> ChatLogprobs:
    """A chunk's logprobs, with entries in only one of the lists."""
    lists: dict[str, Any] = {"content": [], name: entries}
    return ChatLogprobs(refusal=None, **lists)


_LOGPROBS = {field: template(_logprobs(name, [HOLE])) for field, name in _LISTS.items()}


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)

    def made(self) -> CallMade:
        return CallMade(self.id, "function", CalledFunction(self.name, "".join(self.arguments)))


@dataclass
class _Folded:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    entries: dict[str, list[bytes]] = field(default_factory=lambda: {"content": []})
    sampled: list[PackedRows | None] = field(default_factory=list)
    last: Delta | None = None


class ChatReply(ChoicesReply[ChatBody]):
    whole = ChatCompletion
    chunk = ChatChunk
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
        extra: JsonObject = {}
        if self.request.return_token_ids:
            extra["prompt_token_ids"] = self.generation.choices[0].prompt.token_ids
        delta = ChatDelta(role="assistant", content="")
        return b"".join(
            [self.told(ChatChunkChoice(choice.index, delta, None, None), **extra) for choice in self.generation.choices]
        )

    def event(self, delta: Delta) -> bytes:
        sampled = delta.sampled if self.request.return_token_ids else None
        shown: list[tuple[Field, int, str, bytes, int]] = []  # the last: the end of its tokens in the delta's
        if delta.parts is None:
            entries = self._entries.of_delta(delta)
            if delta.text or entries:
                shown.append(("content", -1, delta.text, entries, len(delta.tokens)))
        else:
            ends = _ends(delta.parts) if sampled else [0] * len(delta.parts)
            for part, end in zip(delta.parts, ends, strict=True):
                entries = self._entries.of_part(delta, part)
                if part.text or entries:
                    shown.append((part.field, part.call, part.text, entries, end))
        start = 0
        if sampled and delta.finish_reason is None and max((end for *_, end in shown), default=0) < len(sampled):
            shown.append(("content", -1, "", b"", len(sampled)))
        events = []
        for kind, call, text, entries, end in shown:
            logprobs = _LOGPROBS[kind] % entries if entries else b"null"
            fields: JsonObject = {}
            if sampled and end > start:
                rows = sampled if end - start == len(sampled) else sampled[start:end]
                fields = self.sampled_fields(delta.index, rows)
                start = end
            if fields or kind == "name":
                made = self._begun(delta.index, call, text) if kind == "name" else _text_delta(kind, call, text)
                events.append(self.told(ChatChunkChoice(delta.index, made, ready(logprobs), None, **fields)))
            else:
                events.append(self.told_json(_text_choice(delta.index, kind, call) % (encode(text), logprobs)))
        if delta.fields is not None:
            logprobs_of_fields = ChatLogprobs(content=[], refusal=None, fields=ready(delta.fields))
            events.append(self.told(ChatChunkChoice(delta.index, ChatDelta(), logprobs_of_fields, None)))
        if delta.finish_reason is not None:
            fields = self.sampled_fields(delta.index, sampled[start:] if sampled else None)
            reason: Any = delta.finish_reason
            choice = ChatChunkChoice(delta.index, ChatDelta(), None, reason, delta.stop_reason, **fields)
            events.append(self.told(choice))
        return b"".join(events)

    def _begun(self, index: int, call: int, name: str) -> ChatDelta:
        call_id, arguments = begun_call(self.service, self.generation.choices[index], call)
        function = CalledFunctionDelta(name=name, arguments=arguments)
        return ChatDelta(tool_calls=[CallDelta(index=call, id=call_id, type="function", function=function)])

    def failure(self, index: int) -> bytes:
        return self.told(ChatChunkChoice(index, ChatDelta(), None, "error"))

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
                call_id, arguments = begun_call(self.service, self.generation.choices[delta.index], part.call)
                folded.calls.append(_Call(call_id, part.text, [arguments]))
            else:
                folded.calls[part.call].arguments.append(part.text)
            if entries := self._entries.of_part(delta, part):
                folded.entries.setdefault(_LISTS[part.field], []).append(entries)

    def parts(self) -> Iterator[bytes]:
        extra: JsonObject = {}
        if self._prompt_logprobs is not None:
            extra["prompt_logprobs"] = ready(b"[%b]" % self._prompt_logprobs)
        if self.request.return_token_ids:
            extra["prompt_token_ids"] = self.generation.choices[0].prompt.token_ids
        return self.full(map(self._choice, range(len(self._folded))), **extra)

    def _choice(self, index: int) -> ChatChoice:
        folded, self._folded[index] = self._folded[index], _Folded()
        assert folded.last is not None
        message = ChatMessage("assistant", "".join(folded.content), None)
        parser = self.generation.choices[index].parser
        if parser is not None and parser.reasons:
            message.reasoning_content = "".join(folded.reasoning) or None
            folded.entries.setdefault("reasoning_content", [])
        if folded.calls:
            message.content = message.content or None
            message.tool_calls = [call.made() for call in folded.calls]
        reason: Any = folded.last.finish_reason
        return ChatChoice(
            index,
            message,
            _all_logprobs(folded) if self.generation.choices[index].scored else None,
            reason,
            folded.last.stop_reason,
            **self.sampled_fields(index, join_rows(folded.sampled)),
        )


def _ends(parts: Sequence[Part]) -> list[int]:
    """The end of the tokens of each part's chunk: those of its text, and those before it that are in no part.

    A token in two parts goes with the first. A name that came after its arguments is shown before them, so its tokens
    come with those of the arguments.
    """
    firsts = [*accumulate((part.places[0] for part in reversed(parts)), min)][::-1]
    lasts = accumulate((part.places[-1] for part in parts), max)
    following = [*firsts[1:], None][: len(parts)]
    return [last + 1 if first is None or last <= first else first for last, first in zip(lasts, following, strict=True)]


def _all_logprobs(folded: _Folded) -> ChatLogprobs:
    lists = {name: ready(b"[%b]" % b",".join(entries)) for name, entries in folded.entries.items()}
    if folded.last is not None and folded.last.fields is not None:
        lists["fields"] = ready(folded.last.fields)
    return ChatLogprobs(refusal=None, **lists)


@lru_cache(maxsize=1024)
def _text_choice(index: int, field: Field, call: int) -> bytes:
    """The choice of a chunk with a text of a field, as a format of that text and of its logprobs."""
    return template(ChatChunkChoice(index, _text_delta(field, call, HOLE), HOLE, None))


def _text_delta(field: Field, call: int, text: str) -> ChatDelta:
    if field == "content":
        return ChatDelta(content=text)
    if field == "reasoning":
        return ChatDelta(reasoning_content=text)
    return ChatDelta(tool_calls=[CallDelta(index=call, function=CalledFunctionDelta(arguments=text))])


def begun_call(service: Service, choice: Choice, call: int) -> tuple[str, str]:
    """The id of a call whose name has come, and its arguments if no token has them."""
    made = MadeCall() if choice.parser is None else choice.parser.made(call)
    return made.id or service.tokenizer.new_call_id(), "{}" if made.empty else ""
