"""Mode reply: the logprobs of a reply's tokens, after the messages that it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from neper.config import ScoreConfig
from neper.errors import ConfigError, ContextLengthError, InvalidRequestError, NeperError
from neper.score.mode import Field, described, list_fields, lists, messages_of
from neper.score.passages import Passage, score_passages

if TYPE_CHECKING:
    from neper.engine.llm import LLM


class ReplyMode:
    """Scores the tokens of a reply as if the model had just written it.

    The ids are those of the messages in the form of the chat template, up to where a reply begins, and those of the
    reply's text, encoded alone. A reply may be a list of ids as well. With `config.score_end` the token with which the
    template ends a reply follows.
    """

    def __init__(self, llm: LLM, config: ScoreConfig) -> None:
        if llm.tokenizer.chat_template is None:
            raise ConfigError("the model has no chat template, which mode reply needs")
        self._llm = llm
        self._messages, self._reply = self.columns(config)
        self._context = llm.core.capabilities.max_model_len
        self._top = config.top or 0
        self._end: list[int] = []
        if config.score_end:
            end = llm.tokenizer.chat_end()
            if end is None:
                raise ConfigError("score_end: the model's chat template ends a reply with no token of its own")
            self._end = [end]

    @staticmethod
    def columns(config: ScoreConfig) -> tuple[str, ...]:
        return config.messages_column, config.reply_column

    @staticmethod
    def fields(config: ScoreConfig) -> dict[str, Field]:
        return {"logprob": Field("float64"), "num_tokens": Field("int64"), **list_fields(config.top or 0)}

    def prepare(self, values: Mapping[str, Any]) -> Passage:
        messages = messages_of(values, self._messages)
        prompt = self._llm.tokenizer.apply_chat_template(messages, progress=self._check_length)
        reply = values.get(self._reply)
        if isinstance(reply, str):
            ids = self._llm.tokenizer.encode(reply, add_special_tokens=False, progress=self._check_length)
        elif isinstance(reply, list) and all(type(token_id) is int for token_id in reply):
            ids = reply
        else:
            raise InvalidRequestError(f"{self._reply} is {described(reply)}, not a text or a list of token ids")
        ids = ids + self._end
        if not ids:
            raise InvalidRequestError(f"{self._reply} is empty")
        self._check_length(len(prompt) + len(ids))
        return Passage(prompt + ids, len(prompt))

    def compute(self, prepared: list[Passage]) -> list[dict[str, Any] | NeperError]:
        return [
            scores
            if isinstance(scores, NeperError)
            else {"logprob": scores.total, "num_tokens": len(scores.logprobs), **lists(scores, self._top)}
            for scores in score_passages(self._llm, prepared, top=self._top)
        ]

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self._context:
            raise ContextLengthError(
                f"messages and reply have {num_tokens} tokens or more, the model's context {self._context}"
            )
