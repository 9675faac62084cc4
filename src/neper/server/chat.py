"""The chat endpoint's JSON: messages, their deltas, and logprobs per token of content."""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson

from neper.server.chat_protocol import ChatBody
from neper.server.generation import Choice, Delta, Generation, join_rows
from neper.server.reply import Reply, prompt_scores, read_prompt
from neper.server.service import Service
from neper.types import JsonObject, PackedRows


@dataclass
class _Folded:
    text: list[str] = field(default_factory=list)
    entries: list[bytes] = field(default_factory=list)
    sampled: list[PackedRows | None] = field(default_factory=list)
    last: Delta | None = None


class ChatReply(Reply[ChatBody]):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody, generation: Generation, reply_id: str) -> None:
        super().__init__(service, body, generation, reply_id)
        self._k = body.num_top_logprobs()
        self._folded = [_Folded() for _ in generation.choices]
        self._prompt_logprobs: bytes | None = None

    def write_prompt(self, choice: Choice) -> None:
        k = self.request.prompt_logprobs
        if k is not None and self._prompt_logprobs is None:
            tokens, begin = read_prompt(choice.prompt, self.service.tokenizer)
            self._prompt_logprobs = self.service.entries.prompt(tokens, prompt_scores(choice, k), k, begin=begin)

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
        entries = self._entries(delta)
        sampled = self.sampled_fields(delta.sampled) if self.request.return_token_ids else {}
        events = []
        if delta.text or entries or (sampled and delta.finish_reason is None):
            events.append(
                b'%b{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}]%b'
                % (
                    self.head,
                    delta.index,
                    orjson.dumps(delta.text),
                    b'{"content":[%b],"refusal":null}' % entries if entries else b"null",
                    b"," + orjson.dumps(sampled)[1:-1] if sampled else b"",
                    self.tail,
                )
            )
            sampled = {}
        if delta.finish_reason is not None:
            choice = {
                "index": delta.index,
                "delta": {},
                "logprobs": None,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
                **sampled,
            }
            events.append(self.chunk(choice))
        return b"".join(events)

    def failure(self, index: int) -> bytes:
        return self.chunk({"index": index, "delta": {}, "logprobs": None, "finish_reason": "error"})

    def add(self, delta: Delta) -> None:
        folded = self._folded[delta.index]
        folded.text.append(delta.text)
        if entries := self._entries(delta):
            folded.entries.append(entries)
        folded.sampled.append(delta.sampled)
        folded.last = delta

    def body(self) -> bytes:
        extra: JsonObject = {}
        if self._prompt_logprobs is not None:
            extra["prompt_logprobs"] = orjson.Fragment(b"[%b]" % self._prompt_logprobs)
        if self.request.return_token_ids:
            extra["prompt_token_ids"] = self.generation.choices[0].prompt.token_ids
        return self.full([self._choice(index, folded) for index, folded in enumerate(self._folded)], **extra)

    def _choice(self, index: int, folded: _Folded) -> JsonObject:
        last = folded.last
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(folded.text), "refusal": None},
            "logprobs": None if self._k is None else self._logprobs(b",".join(folded.entries)),
            "finish_reason": last and last.finish_reason,
            "stop_reason": last and last.stop_reason,
            **self.sampled_fields(join_rows(folded.sampled)),
        }

    def _entries(self, delta: Delta) -> bytes:
        if self._k is None or delta.scores is None:
            return b""
        return self.service.entries.chat(
            delta.tokens, delta.scores.read(), self._k, begin=delta.begin, ids_as_text=self.ids_as_text
        )

    @staticmethod
    def _logprobs(entries: bytes) -> orjson.Fragment:
        return orjson.Fragment(b'{"content":[%b],"refusal":null}' % entries)
