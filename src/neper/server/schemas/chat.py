"""Schemas of chat completions, and of the chunks of a stream."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from neper.server.schemas.common import ChatEntry, Count, Logprob, PromptLogprobs, Schema, TokenId, Usage
from neper.server.schemas.fields import FieldLogprobs


class ChatLogprobs(Schema):
    """Entries by the text that they spell; `fields` by JSON Pointer, with `field_logprobs`."""

    content: list[ChatEntry]
    refusal: None
    reasoning_content: list[ChatEntry] | UnsetType = UNSET
    tool_calls: list[ChatEntry] | UnsetType = UNSET
    fields: dict[str, FieldLogprobs] | UnsetType = UNSET


class CalledFunction(Schema):
    name: str
    arguments: str


class CallMade(Schema):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Schema):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[CallMade] | UnsetType = UNSET


class ChatChoice(Schema):
    """`token_ids` and `token_logprobs` are of all sampled tokens, with `return_token_ids`."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[TokenId] | UnsetType = UNSET
    token_logprobs: list[Logprob] | UnsetType = UNSET


class ChatCompletion(Schema):
    id: str
    object: Literal["chat.completion"]
    created: Count
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[TokenId] | UnsetType = UNSET


class CalledFunctionDelta(Schema):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CallDelta(Schema, kw_only=True):
    index: Count
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunctionDelta


class ChatDelta(Schema):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(Schema):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "error"] | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[TokenId] | UnsetType = UNSET
    token_logprobs: list[Logprob] | UnsetType = UNSET


class ChatChunk(Schema):
    """An event of a streamed chat reply. The last one with `include_usage` has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: Count
    model: str
    system_fingerprint: None
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[TokenId] | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
