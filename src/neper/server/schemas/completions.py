"""Schemas of completions, and of the chunks of a stream."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from neper.server.schemas.common import Count, Logprob, PromptLogprobs, Schema, TokenId, Usage


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
