"""Schemas of the logprobs of a reply's fields: the values in its JSON."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from neper.server.schemas.common import Count, Logprob, Schema

TotalLogprob = Annotated[float, Meta(le=0.0, description="Natural log: a sum over tokens.")]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]


class WeakestToken(Schema):
    """The least likely token of a value, the first of those; `index` is its place in the entries of the content."""

    token: str
    logprob: Logprob
    index: Count


class FieldChoice(Schema):
    """A value that the schema allows; `probability` is its share of all that it allows there."""

    value: str | float | int | bool | None
    logprob: TotalLogprob
    probability: Probability


class FieldLogprobs(Schema):
    """A value: the sum over the tokens that spell it, entries `start` to before `end` of the content."""

    logprob: TotalLogprob
    start: Count
    end: Count
    weakest: WeakestToken
    complete: bool
    choices: list[FieldChoice] | UnsetType = UNSET
