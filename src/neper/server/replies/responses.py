"""The JSON of a response: output items with their text and its logprobs, and the named events that tell of them.

response.created · in_progress
  output_item.added · content_part.added · reasoning_text.delta … done · content_part.done · output_item.done
  output_item.added · content_part.added · output_text.delta … done · content_part.done · output_item.done
  output_item.added · function_call_arguments.delta … done · output_item.done
response.completed | incomplete | failed, and error
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal

from msgspec import UNSET

from neper.errors import NeperError
from neper.server.bodies.response_items import InputCall, InputItem, InputMessage, InputPart, InputReasoning
from neper.server.bodies.response_tools import FunctionTool
from neper.server.bodies.responses import ReasoningConfig, ResponsesBody, TextConfig, TextFormat
from neper.server.choice import Delta
from neper.server.generation import Generation
from neper.server.replies.chat import begun_call
from neper.server.replies.encoding import HOLE, encode, ready, template
from neper.server.replies.message_entries import MessageEntries
from neper.server.replies.reply import Reply
from neper.server.schemas import responses as schemas
from neper.server.service import Service


class _Item(ABC):
    """An item of the output, with events of its own kind."""

    prefix = ""

    def __init__(self) -> None:
        self.id = f"{self.prefix}_{secrets.token_hex(12)}"
        self.status: schemas.ItemStatus = "in_progress"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def shown(self, *, begun: bool = False) -> schemas.Item:
        """The item so far; `begun`: the item before its first text."""

    @abstractmethod
    def input(self) -> InputItem:
        """The item in the form in which a later request may send it back."""


class _TextItem(_Item):
    """An item with one part of text."""

    text_kind = ""

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[bytes] = []

    def add(self, text: str, entries: bytes) -> None:
        self._texts.append(text)
        if entries:
            self._entries.append(entries)

    @property
    def logprobs(self) -> Any:
        return ready(b"[%b]" % b",".join(self._entries))

    @abstractmethod
    def part(self) -> schemas.ReasoningPart | schemas.OutputText:
        """Its text so far."""


class _Reasoning(_TextItem):
    prefix = "rs"
    text_kind = "reasoning_text"

    def part(self) -> schemas.ReasoningPart:
        return schemas.ReasoningPart(self.text)

    def shown(self, *, begun: bool = False) -> schemas.Item:
        return schemas.ReasoningItem(self.id, self.status, [], [] if begun else [self.part()])

    def input(self) -> InputItem:
        return InputReasoning(type="reasoning", content=[InputPart(type=self.text_kind, text=self.text)])


class _Message(_TextItem):
    prefix = "msg"
    text_kind = "output_text"
    fields: bytes | None = None
    """The JSON of its fields' logprobs."""

    def part(self) -> schemas.OutputText:
        fields = UNSET if self.fields is None else ready(self.fields)
        return schemas.OutputText(self.text, [], self.logprobs, fields)

    def shown(self, *, begun: bool = False) -> schemas.Item:
        return schemas.MessageItem(self.id, self.status, "assistant", [] if begun else [self.part()])

    def input(self) -> InputItem:
        return InputMessage(role="assistant", content=self.text)


class _Call(_Item):
    """A call of a function, whose arguments are the model's own text."""

    prefix = "fc"

    def __init__(self, name: str, call_id: str) -> None:
        super().__init__()
        self._call_id = call_id
        self._name = name

    def add(self, arguments: str) -> None:
        self._texts.append(arguments)

    def shown(self, *, begun: bool = False) -> schemas.Item:
        return schemas.CallItem(self.id, self.status, self._call_id, self._name, "" if begun else self.text)

    def input(self) -> InputItem:
        return InputCall(type="function_call", call_id=self._call_id, name=self._name, arguments=self.text)


class ResponsesReply(Reply[ResponsesBody]):
    """Puts deltas into items, and makes events of them for a stream."""

    def __init__(self, service: Service, body: ResponsesBody, generation: Generation, reply_id: str) -> None:
        super().__init__(service, body, generation, reply_id)
        self._entries = MessageEntries(service.entries, ids_as_text=self.ids_as_text)
        self._response = self._begun_response(reply_id.replace("-", "_"))  # the form of this endpoint's ids
        self._items: list[_Item] = []
        self._num_reasoning_tokens = 0
        self._events: list[bytes] = []
        self._num_events = 0

    def begin(self) -> bytes:
        self._tell("response.created", response=self._response)
        self._tell("response.in_progress", response=self._response)
        return self._told()

    def event(self, delta: Delta) -> bytes:
        self.add(delta)
        return self._told()

    def add(self, delta: Delta) -> None:
        if delta.parts is None:
            self._add_text(_Message, delta.text, self._entries.of_delta(delta))
        for part in delta.parts or ():
            if part.field == "reasoning":
                self._num_reasoning_tokens += len(part.tokens)
                self._add_text(_Reasoning, part.text, b"")
            elif part.field == "content":
                self._add_text(_Message, part.text, self._entries.of_part(delta, part))
            elif part.field == "name":
                call_id, arguments = begun_call(self.service, self.generation.choices[0], part.call)
                self._open(_Call(part.text, call_id))
                if arguments:
                    self._add_arguments(arguments)
            else:
                self._add_arguments(part.text)
        if delta.fields is not None:
            for item in self._items[-1:]:
                if isinstance(item, _Message):
                    item.fields = delta.fields
        if delta.finish_reason is not None:
            self._finish("incomplete" if delta.finish_reason == "length" else "completed")

    def end(self) -> bytes:
        self._tell(f"response.{self._response.status}", response=self._ended_response())
        return self._told()

    def broken(self, error: NeperError, unfinished: list[int]) -> bytes:
        if unfinished:
            self._response.status = "failed"
            self._response.error = schemas.ResponseError("server_error", error.message)
            for item in self._items[-1:]:
                item.status = "incomplete"
            self._tell("response.failed", response=self._ended_response())
        # `error` has them too, since clients look there in all streams.
        fields = {"type": error.type, "message": error.message, "param": error.param, "code": error.code}
        self._tell("error", code=error.code, message=error.message, param=error.param, error=fields)
        return self._told()

    def parts(self) -> Iterator[bytes]:
        yield encode(self._ended_response())

    def _add_text(self, kind: type[_TextItem], text: str, entries: bytes) -> None:
        if not text and not entries:
            return
        if not self._items or not isinstance(self._items[-1], kind):
            self._open(kind())
        item = self._items[-1]
        assert isinstance(item, _TextItem)
        item.add(text, entries)
        if self.request.stream:
            event = _text_event(item.text_kind, item.id, len(self._items) - 1)
            scores = (entries,) if kind is _Message else ()
            self._send(f"response.{item.text_kind}.delta", event % (b"%d" % self._num_events, encode(text), *scores))

    def _add_arguments(self, text: str) -> None:
        call = self._items[-1]
        assert isinstance(call, _Call)
        call.add(text)
        self._tell_of_item("function_call_arguments.delta", delta=text)

    def _finish(self, status: Literal["completed", "incomplete"]) -> None:
        self._response.status = status
        if status == "completed":
            self._response.completed_at = int(time.time())
        else:
            self._response.incomplete_details = schemas.IncompleteDetails("max_output_tokens")
        # Only replies that were cut in their reasoning, or have calls, have no message.
        if not self._items or (status == "completed" and isinstance(self._items[-1], _Reasoning)):
            self._open(_Message())
        parser = self.generation.choices[0].parser
        num_calls = sum(isinstance(item, _Call) for item in self._items)
        if isinstance(self._items[-1], _Call) and parser is not None and parser.num_completed == num_calls:
            status = "completed"  # it was cut after its arguments
        self._close(status)
        if self.request.store is not False:
            for item in self._items:
                self.service.kept_items.keep(item.id, item.input(), item.text)

    def _open(self, item: _Item) -> None:
        if self._items:
            self._close("completed")
        self._items.append(item)
        self._tell("response.output_item.added", output_index=len(self._items) - 1, item=item.shown(begun=True))
        if isinstance(item, _TextItem):
            self._tell_of_content("content_part.added", part=item.part())

    def _close(self, status: schemas.ItemStatus) -> None:
        item = self._items[-1]
        item.status = status
        if isinstance(item, _TextItem):
            logprobs = {"logprobs": item.logprobs} if isinstance(item, _Message) else {}
            self._tell_of_content(f"{item.text_kind}.done", text=item.text, **logprobs)
            self._tell_of_content("content_part.done", part=item.part())
        else:
            self._tell_of_item("function_call_arguments.done", arguments=item.text)
        self._tell("response.output_item.done", output_index=len(self._items) - 1, item=item.shown())

    def _tell_of_content(self, what: str, **fields: Any) -> None:
        self._tell_of_item(what, content_index=0, **fields)

    def _tell_of_item(self, what: str, **fields: Any) -> None:
        self._tell(f"response.{what}", item_id=self._items[-1].id, output_index=len(self._items) - 1, **fields)

    def _tell(self, kind: Any, **fields: Any) -> None:
        if self.request.stream:
            self._send(kind, encode(schemas.ResponseEvent(kind, self._num_events, **fields)))

    def _send(self, kind: str, data: bytes) -> None:
        self._events.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
        self._num_events += 1

    def _told(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events

    def _begun_response(self, response_id: str) -> schemas.Response:
        """The response without output: the fields that the request gave, with defaults for the others."""
        body, sampling = self.request, self.generation.choices[0].request.sampling
        text, reasoning = body.text or TextConfig(), body.reasoning or ReasoningConfig()
        return schemas.Response(
            id=response_id,
            object="response",
            created_at=self._created,
            completed_at=None,
            status="in_progress",
            error=None,
            incomplete_details=None,
            background=False,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            model=self.service.model_name,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=None,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=schemas.ResponseReasoning(reasoning.effort, reasoning.summary or reasoning.generate_summary),
            safety_identifier=body.safety_identifier,
            service_tier="default",
            store=False,
            temperature=sampling.temperature,
            text=schemas.ResponseText(_shown_format(text.format or TextFormat(type="text")), _given(text.verbosity)),
            tool_choice=body.choice,
            tools=[_shown_tool(function) for function in body.functions],
            top_logprobs=body.top_logprobs or 0,
            top_p=sampling.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
            output=[],
            usage=None,
        )

    def _ended_response(self) -> schemas.Response:
        self._response.output = [item.shown() for item in self._items]
        if self._response.status != "failed":
            self._response.usage = self._usage()
        return self._response

    def _usage(self) -> schemas.ResponseUsage:
        usage = self.generation.usage()
        return schemas.ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=schemas.ResponseInputDetails(usage.cached_tokens, cache_write_tokens=0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=schemas.ResponseOutputDetails(self._num_reasoning_tokens, **self.drafted()),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )


@lru_cache(maxsize=1024)
def _text_event(text_kind: str, item_id: str, output_index: int) -> bytes:
    """An event with a text of an item, as a format of its number, that text, and the entries of a message."""
    kind: Any = f"response.{text_kind}.delta"
    event = schemas.ResponseEvent(kind, HOLE, item_id=item_id, output_index=output_index, content_index=0, delta=HOLE)
    if text_kind == _Message.text_kind:
        event.logprobs = [HOLE]
    return template(event)


def _given(value: Any) -> Any:
    """A value of a field that is left out where it is null."""
    return UNSET if value is None else value


def _shown_format(asked: TextFormat) -> schemas.ResponseTextFormat:
    others = (asked.name, asked.schema, asked.strict, asked.description)
    return schemas.ResponseTextFormat(asked.type, *map(_given, others))


def _shown_tool(function: FunctionTool) -> schemas.ResponseTool:
    """The function with `strict` as it counts here: false unless it says true."""
    return schemas.ResponseTool(
        name=function.name,
        description=_given(function.description),
        parameters=function.parameters,
        strict=bool(function.strict),
    )
