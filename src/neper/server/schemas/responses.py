"""Schemas of responses, and of the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from msgspec import UNSET, Meta, UnsetType

from neper.server.bodies.response_tools import CHOICES, Word
from neper.server.bodies.typed import one_of
from neper.server.schemas.common import ChatEntry, Count, Schema
from neper.server.schemas.fields import FieldLogprobs
from neper.server.transport.asgi import Error


class ReasoningPart(Schema, tag_field="type", tag="reasoning_text"):
    text: str


class OutputText(Schema, tag_field="type", tag="output_text"):
    """Text of a response; `logprobs` are the entries of its tokens, none unless they are included.

    `field_logprobs` are by JSON Pointer, where they were asked for, once the text is complete.
    """

    text: str
    annotations: Annotated[list[None], Meta(max_length=0)]
    logprobs: list[ChatEntry]
    field_logprobs: dict[str, FieldLogprobs] | UnsetType = UNSET


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ReasoningItem(Schema, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: Annotated[list[None], Meta(max_length=0)]
    content: list[ReasoningPart]


class MessageItem(Schema, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class CallItem(Schema, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


Item = ReasoningItem | MessageItem | CallItem


class ResponseTool(Schema, tag_field="type", tag="function", kw_only=True):
    """A function as it was given; `strict` as it counts here."""

    name: str
    description: str | UnsetType = UNSET
    parameters: dict[str, Any] | None
    strict: bool


class ResponseError(Schema):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(Schema):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(Schema):
    effort: str | None
    summary: Literal["auto", "concise", "detailed"] | None


class ResponseTextFormat(Schema):
    """The form of the text, as it was asked for."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | UnsetType = UNSET
    schema: dict[str, Any] | UnsetType = UNSET
    strict: bool | UnsetType = UNSET
    description: str | UnsetType = UNSET


class ResponseText(Schema):
    format: ResponseTextFormat
    verbosity: Literal["low", "medium", "high"] | UnsetType = UNSET


class ResponseInputDetails(Schema):
    cached_tokens: Count
    cache_write_tokens: Count


class ResponseOutputDetails(Schema):
    """The counts of drafted tokens are chat's. OpenAI's usage has none."""

    reasoning_tokens: Count
    accepted_prediction_tokens: Count | UnsetType = UNSET
    rejected_prediction_tokens: Count | UnsetType = UNSET


class ResponseUsage(Schema):
    input_tokens: Count
    input_tokens_details: ResponseInputDetails
    output_tokens: Count
    output_tokens_details: ResponseOutputDetails
    total_tokens: Count


class Response(Schema):
    id: str
    object: Literal["response"]
    created_at: Count
    completed_at: Count | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: Count | None
    max_tool_calls: Count | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: ResponseText
    tool_choice: Annotated[Any, Meta(extra_json_schema=one_of(*CHOICES.values(), words=get_args(Word)))]
    tools: list[ResponseTool]
    top_logprobs: Count
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    output: list[Item]
    usage: ResponseUsage | None


class ResponseEvent(Schema):
    """An event of a streamed response. Which fields there are goes with the type."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ]
    sequence_number: Count
    response: Response | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: Count | UnsetType = UNSET
    content_index: Count | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    part: ReasoningPart | OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ChatEntry] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
    error: Error | UnsetType = UNSET
