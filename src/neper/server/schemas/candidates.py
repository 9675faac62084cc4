"""Schemas of scored candidates."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from neper.server.schemas.common import ChatEntry, Count, Schema, TokenId, Usage

Sum = Annotated[float, Meta(le=0.0, description="Natural log, of the numbers of tokens; -inf counts as -9999.0.")]


class Candidate(Schema):
    """A candidate, scored; `logprobs` are the entries of its tokens, where they were asked for."""

    text: str
    token_ids: list[TokenId]
    logprob: Sum
    mean_logprob: Sum
    rank: Annotated[int, Meta(ge=1)]
    probability: Annotated[float, Meta(ge=0.0, le=1.0)]
    logprobs: list[ChatEntry] | UnsetType = UNSET


class Boundary(Schema):
    """The cut between prompt and candidates: they begin at a position of the prompt, with the rest of its text."""

    kind: Literal["clean", "merged", "separate"]
    position: Count
    text: str


class Candidates(Schema):
    """`normalized_over`: what logprobs are shares of, the vocabulary or (of some engines) the candidates alone."""

    id: str
    object: Literal["candidates"]
    created: Count
    model: str
    candidates: list[Candidate]
    prompt_tokens: Count
    boundary: Boundary
    normalized_over: Literal["vocabulary", "candidates"]
    usage: Usage
