"""Schemas of replies: what each endpoint answers.

Replies are encoded from these, but for the items and tools of a response: those have their id before their type, and
are only described here. A field that may be left out is UNSET, never null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from neper.server.transport.asgi import Error

Count = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0)]
Logprob = Annotated[float, Meta(ge=-9999.0, le=0.0, description="Natural log; -9999.0 stands for -inf.")]
Byte = Annotated[int, Meta(ge=0, le=255)]


class Schema(msgspec.Struct, forbid_unknown_fields=True):
    pass


class Alternative(Schema):
    token: str
    logprob: Logprob
    bytes: list[Byte]


class ChatEntry(Schema):
    """A token of a message: its text, its own bytes, its logprob, and the best alternatives in its place."""

    token: str
    logprob: Logprob
    bytes: list[Byte]
    top_logprobs: list[Alternative]


class ChatLogprobs(Schema):
    """Entries by the text that they spell."""

    content: list[ChatEntry]
    refusal: None
    reasoning_content: list[ChatEntry] | UnsetType = UNSET
    tool_calls: list[ChatEntry] | UnsetType = UNSET


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


class CachedTokens(Schema):
    cached_tokens: Count


class DraftedTokens(Schema):
    """Drafted tokens: those that are in the replies, and those that are not."""

    accepted_prediction_tokens: Count
    rejected_prediction_tokens: Count


class Usage(Schema):
    """`completion_tokens_details` comes from engines that draft tokens alone."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: DraftedTokens | UnsetType = UNSET


class PromptEntry(Schema):
    logprob: Logprob
    rank: Annotated[int, Meta(ge=1)]
    decoded_token: str


PromptLogprobs = list[dict[str, PromptEntry] | None]


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


class CompletionLogprobs(Schema):
    """Arrays of equal length, a place a token."""

    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None]
    text_offset: list[Count]


class CompletionChoice(Schema):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    token_ids: list[TokenId] | UnsetType = UNSET
    token_logprobs: list[Logprob] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[TokenId] | UnsetType = UNSET


class Completion(Schema):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Schema):
    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "error"] | None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_token_ids: list[TokenId] | UnsetType = UNSET
    token_ids: list[TokenId] | UnsetType = UNSET
    token_logprobs: list[Logprob] | UnsetType = UNSET


class CompletionChunk(Schema):
    """An event of a streamed completion. The last one with `include_usage` has no choices."""

    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    system_fingerprint: None
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ReasoningPart(Schema, tag_field="type", tag="reasoning_text"):
    text: str


class OutputText(Schema, tag_field="type", tag="output_text"):
    """Text of a response; `logprobs` are the entries of its tokens, none unless they are included."""

    text: str
    annotations: Annotated[list[None], Meta(max_length=0)]
    logprobs: list[ChatEntry]


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


class ResponseTool(Schema, tag_field="type", tag="function", kw_only=True):
    """A function as it was given; `strict` as it counts here."""

    name: str
    description: str | UnsetType = UNSET
    parameters: dict[str, Any] | None
    strict: bool


class ResponseFunctionChoice(Schema, tag_field="type", tag="function"):
    name: str


class ResponseAllowedTools(Schema, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[ResponseFunctionChoice]


class ResponseError(Schema):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(Schema):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(Schema):
    effort: str | None
    summary: Literal["auto", "concise", "detailed"] | None


class ResponseText(Schema):
    """The form of the text, as it was asked for."""

    format: dict[str, Any]
    verbosity: Literal["low", "medium", "high"] | UnsetType = UNSET


class ResponseInputDetails(Schema):
    cached_tokens: Count
    cache_write_tokens: Count


class ResponseOutputDetails(Schema):
    reasoning_tokens: Count


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
    tool_choice: Literal["auto", "none", "required"] | ResponseFunctionChoice | ResponseAllowedTools
    tools: list[ResponseTool]
    top_logprobs: Count
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    output: list[ReasoningItem | MessageItem | CallItem]
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
    item: ReasoningItem | MessageItem | CallItem | UnsetType = UNSET
    part: ReasoningPart | OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ChatEntry] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
    error: Error | UnsetType = UNSET


class Model(Schema):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count


class ModelList(Schema):
    object: Literal["list"]
    data: list[Model]


class Tokens(Schema, kw_only=True):
    """`token_strs`: the text of each token alone, where it was asked for."""

    tokens: list[TokenId]
    count: Count
    max_model_len: Count
    token_strs: list[str] | UnsetType = UNSET


class Text(Schema):
    prompt: str


class SpecialToken(Schema):
    id: TokenId
    token: str


class TokenizerInfo(Schema):
    """What the tokenizer is. `logits_size` may exceed `vocab_size`; `eos_token_ids` are all that end a reply."""

    kind: str
    vocab_size: Count
    logits_size: Count
    max_model_len: Count
    bos_token: str | None
    bos_token_id: TokenId | None
    eos_token: str | None
    eos_token_id: TokenId | None
    eos_token_ids: list[TokenId]
    pad_token: str | None
    pad_token_id: TokenId | None
    special_tokens: list[SpecialToken]
    adds_bos: bool
    chat_template: str | dict[str, str] | None


class Version(Schema):
    version: str


class Health(Schema):
    status: Literal["ok"]
