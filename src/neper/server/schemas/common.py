"""Schemas that replies share: numbers, entries of a token, usage. A field that may be left out is UNSET, never null."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

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
    """A prompt token, or another id in its place. The rank of an id that was named to be listed is null."""

    logprob: Logprob
    rank: Annotated[int, Meta(ge=1)] | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptEntry] | None]
