"""The JSON of a response: output items with their text and its logprobs, and the named events that tell of them.

response.created · in_progress
  output_item.added · content_part.added · reasoning_text.delta … done · content_part.done · output_item.done
  output_item.added · content_part.added · output_text.delta … done · content_part.done · output_item.done
response.completed | incomplete | failed, and error
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from typing import Literal

import msgspec
import orjson

from neper.errors import NeperError
from neper.server.choice import Delta
from neper.server.generation import Generation
from neper.server.message_entries import MessageEntries
from neper.server.reply import Reply
from neper.server.responses_protocol import ResponsesBody
from neper.server.service import Service
from neper.types import JsonObject

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class _Item(ABC):
    """An item of the output, with one part of text."""

    prefix = ""
    text_kind = ""

    def __init__(self) -> None:
        self.id = f"{self.prefix}_{secrets.token_hex(12)}"
        self.status: Status = "in_progress"
        self._texts: list[str] = []
        self._entries: list[bytes] = []

    def add(self, text: str, entries: bytes) -> None:
        self._texts.append(text)
        if entries:
            self._entries.append(entries)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def logprobs(self) -> orjson.Fragment:
        return orjson.Fragment(b"[%b]" % b",".join(self._entries))

    @abstractmethod
    def part(self) -> JsonObject:
        """Its text as it stands."""

    @abstractmethod
    def json(self, content: list[JsonObject]) -> JsonObject:
        """The item with that content."""


class _Reasoning(_Item):
    prefix = "rs"
    text_kind = "reasoning_text"

    def part(self) -> JsonObject:
        return {"type": self.text_kind, "text": self.text}

    def json(self, content: list[JsonObject]) -> JsonObject:
        return {"id": self.id, "type": "reasoning", "status": self.status, "summary": [], "content": content}


class _Message(_Item):
    prefix = "msg"
    text_kind = "output_text"

    def part(self) -> JsonObject:
        return {"type": self.text_kind, "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def json(self, content: list[JsonObject]) -> JsonObject:
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}


class ResponsesReply(Reply[ResponsesBody]):
    """Takes deltas into items, and tells of it in events where they are wanted."""

    def __init__(self, service: Service, body: ResponsesBody, generation: Generation, reply_id: str) -> None:
        super().__init__(service, body, generation, reply_id)
        self._entries = MessageEntries(service.entries, ids_as_text=self.ids_as_text)
        self._id = reply_id.replace("-", "_")  # as clients know this endpoint's
        self._status: Status = "in_progress"
        self._items: list[_Item] = []
        self._error = ""
        self._num_reasoning_tokens = 0
        self._events: list[bytes] = []
        self._num_events = 0
        self._given = self._given_fields()

    def begin(self) -> bytes:
        self._tell("response.created", response=self._response())
        self._tell("response.in_progress", response=self._response())
        return self._told()

    def event(self, delta: Delta) -> bytes:
        self.add(delta)
        return self._told()

    def add(self, delta: Delta) -> None:
        if delta.parts is None:
            self._add(_Message, delta.text, self._entries.of_delta(delta))
        for part in delta.parts or ():
            if part.field == "reasoning":
                self._num_reasoning_tokens += len(part.tokens)
                self._add(_Reasoning, part.text, b"")
            else:
                self._add(_Message, part.text, self._entries.of_part(delta, part))
        if delta.finish_reason is not None:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            # Only a reply that was cut in its reasoning has no message.
            if not self._items or (self._status == "completed" and isinstance(self._items[-1], _Reasoning)):
                self._open(_Message)
            self._close(self._status)

    def end(self) -> bytes:
        self._tell(f"response.{self._status}", response=self._response())
        return self._told()

    def broken(self, error: NeperError, unfinished: list[int]) -> bytes:
        if unfinished:
            self._status, self._error = "failed", error.message
            for item in self._items[-1:]:
                item.status = "incomplete"
            self._tell("response.failed", response=self._response())
        # In `error` too, for clients that look there as in any stream.
        fields = {"type": error.type, "message": error.message, "param": error.param, "code": error.code}
        self._tell("error", code=error.code, message=error.message, param=error.param, error=fields)
        return self._told()

    def body(self) -> bytes:
        return orjson.dumps(self._response())

    def _add(self, kind: type[_Item], text: str, entries: bytes) -> None:
        if not text and not entries:
            return
        if not self._items or not isinstance(self._items[-1], kind):
            self._open(kind)
        item = self._items[-1]
        item.add(text, entries)
        logprobs = {"logprobs": orjson.Fragment(b"[%b]" % entries)} if isinstance(item, _Message) else {}
        self._tell_of_text("delta", delta=text, **logprobs)

    def _open(self, kind: type[_Item]) -> None:
        if self._items:
            self._close("completed")
        item = kind()
        self._items.append(item)
        self._tell("response.output_item.added", output_index=len(self._items) - 1, item=item.json([]))
        self._tell_of_part("added")

    def _close(self, status: Status) -> None:
        item = self._items[-1]
        item.status = status
        logprobs = {"logprobs": item.logprobs} if isinstance(item, _Message) else {}
        self._tell_of_text("done", text=item.text, **logprobs)
        self._tell_of_part("done")
        self._tell("response.output_item.done", output_index=len(self._items) - 1, item=item.json([item.part()]))

    def _tell_of_text(self, what: str, **fields: object) -> None:
        self._tell_of_content(f"response.{self._items[-1].text_kind}.{what}", **fields)

    def _tell_of_part(self, what: str) -> None:
        self._tell_of_content(f"response.content_part.{what}", part=self._items[-1].part())

    def _tell_of_content(self, kind: str, **fields: object) -> None:
        place = {"item_id": self._items[-1].id, "output_index": len(self._items) - 1, "content_index": 0}
        self._tell(kind, **place, **fields)

    def _tell(self, kind: str, **fields: object) -> None:
        if self.request.stream:
            data = orjson.dumps({"type": kind, "sequence_number": self._num_events, **fields})
            self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
            self._num_events += 1

    def _told(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events

    def _response(self) -> JsonObject:
        """The response as it stands."""
        error = {"code": "server_error", "message": self._error}
        ended = self._status in ("completed", "incomplete")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "error": error if self._status == "failed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            **self._given,
            "output": [item.json([item.part()]) for item in self._items],
            "usage": self._usage() if ended else None,
        }

    def _given_fields(self) -> JsonObject:
        """What the request said, and what goes without saying."""
        body, sampling = self.request, self.generation.choices[0].request.sampling
        format = None if body.text is None else body.text.format
        shown = {name: value for name, value in msgspec.to_builtins(format or {}).items() if value is not None}
        return {
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self.service.model_name,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": shown or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def _usage(self) -> JsonObject:
        usage = self.generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }
