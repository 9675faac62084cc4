"""Input items of a response: messages, reasoning, calls and their results."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from neper.errors import UnsupportedError
from neper.server.bodies.completion import TextPart
from neper.server.bodies.strict import Refused, Strict
from neper.server.bodies.typed import decode_object, one_of, type_of

Status = Literal["in_progress", "completed", "incomplete"]


class InputPart(TextPart):
    # Parts of earlier responses have them.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    # Hints: they cannot change the answer.
    prompt_cache_breakpoint: Any = None
    cache_control: Any = None
    image_url: Refused = None
    file_id: Refused = None
    file_url: Refused = None
    file_data: Refused = None
    filename: Refused = None
    detail: Refused = None
    input_audio: Refused = None


class InputItem(Strict):
    """An item of the conversation; also one of an earlier response, as it came."""

    id: str | None = None
    status: Status | None = None
    cache_control: Any = None  # a hint

    def check(self, where: str) -> None:
        """Refuse known fields that are not implemented, and fields that contradict each other."""
        self.check_unsupported("input")


class InputMessage(InputItem, kw_only=True):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]
    phase: Refused = None

    @property
    def text(self) -> str:
        return _joined(self.content)

    def check(self, where: str) -> None:
        super().check(where)
        refusal = ("refusal",) if self.role == "assistant" else ()
        _check_parts(self.content, where, ("input_text", "output_text", *refusal))


class InputReasoning(InputItem, kw_only=True):
    """The reasoning before a message or a call."""

    type: Literal["reasoning"]
    content: list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: Refused = None

    @property
    def text(self) -> str:
        """All of its text, or the summary if there is none."""
        return _joined(self.content or self.summary or [])

    def check(self, where: str) -> None:
        super().check(where)
        _check_parts(self.content, where, ("reasoning_text",))
        _check_parts(self.summary, where, ("summary_text",))


class InputCall(InputItem, kw_only=True):
    """A call that the model made: `arguments` is the JSON text that it wrote."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: Refused = None
    caller: Refused = None


class InputCallOutput(InputItem, kw_only=True):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]
    name: str | None = None
    namespace: Refused = None
    caller: Refused = None

    @property
    def text(self) -> str:
        return _joined(self.output)

    def check(self, where: str) -> None:
        super().check(where)
        _check_parts(self.output, where, ("input_text", "output_text"))


class InputReference(InputItem, kw_only=True):
    """An item of a recent response, by its id."""

    type: Literal["item_reference"]
    id: str


ITEMS: dict[str, type[InputItem]] = {
    "message": InputMessage,
    "reasoning": InputReasoning,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
    "item_reference": InputReference,
}

RawItem = Annotated[msgspec.Raw, Meta(extra_json_schema=one_of(*ITEMS.values()))]


def read_item(raw: msgspec.Raw, where: str) -> InputItem:
    kind = type_of(raw, where, "input") or "message"
    if kind not in ITEMS:
        raise UnsupportedError(
            f"{where}: items of type {kind!r} are not supported, only {', '.join(map(repr, ITEMS))}", param="input"
        )
    return decode_object(raw, ITEMS[kind], where, "input")


def _joined(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join([part.told or "" for part in content])


def _check_parts(content: str | list[InputPart] | None, where: str, types: tuple[str, ...]) -> None:
    for part in content if isinstance(content, list) else ():
        part.check(where, "input", types)
