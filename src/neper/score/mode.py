"""Mode: a kind of scoring, from the columns that it needs to those that it adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from neper.config import ScoreConfig
from neper.errors import ConfigError, InvalidRequestError, NeperError
from neper.score.passages import Scores

if TYPE_CHECKING:
    from neper.engine.llm import LLM


class Field(NamedTuple):
    """The type of a column that scoring adds: `element` (int32, int64, float32, float64) in so many lists."""

    element: str
    depth: int = 0


class Mode(Protocol):
    """A kind of scoring, with a model."""

    def __init__(self, llm: LLM, config: ScoreConfig) -> None:
        """Raises a ConfigError where the model cannot do what the config says."""
        ...

    @staticmethod
    def columns(config: ScoreConfig) -> tuple[str, ...]:
        """The columns that it needs of a row."""
        ...

    @staticmethod
    def fields(config: ScoreConfig) -> dict[str, Field]:
        """The columns that it adds."""
        ...

    def prepare(self, values: Mapping[str, Any]) -> Any:
        """The input of `compute` for a row. It is called in another thread than `compute`.

        Raises:
            InvalidRequestError: the row cannot be scored.
        """
        ...

    def compute(self, prepared: list[Any]) -> list[dict[str, Any] | NeperError]:
        """The columns that are added to each row, or why there are none, in order."""
        ...


def text_of(values: Mapping[str, Any], column: str) -> str:
    """A text of a row; it may be empty.

    Raises:
        InvalidRequestError: there is none.
    """
    value = values.get(column)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{column} is {described(value)}, not a text")
    return value


def messages_of(values: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    """The messages of a row: a list of objects, or the JSON of one. A member that is null counts as absent.

    Raises:
        InvalidRequestError: there are none.
    """
    value = values.get(column)
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequestError(f"{column} is a text that is no JSON: {error}") from None
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value) or not value:
        raise InvalidRequestError(f"{column} is {described(value)}, not a list of messages")
    return [{key: member for key, member in message.items() if member is not None} for message in value]


def described(value: Any) -> str:
    """The kind of a value, in words."""
    return "missing" if value is None else f"of type {type(value).__name__}"


def rough_length(value: Any) -> int:
    """Characters or items of a value, those of nested lists and objects included, however deep they are."""
    length = 0
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, Mapping):
            left += item.values()
        elif isinstance(item, str):
            length += len(item)
        else:
            length += 1
            if isinstance(item, (list, tuple)):
                left += item
    return length


def list_fields(top: int) -> dict[str, Field]:
    """The columns of lists per token."""
    own = {"token_ids": Field("int32", 1), "token_logprobs": Field("float32", 1)}
    return own | ({"top_ids": Field("int32", 2), "top_logprobs": Field("float32", 2)} if top else {})


def lists(scores: Scores, top: int) -> dict[str, Any]:
    """The values of those columns."""
    own = {"token_ids": scores.token_ids, "token_logprobs": scores.logprobs}
    return own | ({"top_ids": scores.top_ids, "top_logprobs": scores.top_logprobs} if top else {})


def check_top(llm: LLM, top: int) -> None:
    """Raise a ConfigError where the engine lists fewer alternatives."""
    limit = llm.core.capabilities.max_logprobs
    if 0 <= limit < top:
        raise ConfigError(f"top is {top}, and this engine lists up to {limit} alternatives (max_logprobs)")
