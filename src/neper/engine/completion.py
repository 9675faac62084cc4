"""A completion: one finished reply of the library, with its scores, and how people are shown it."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import Any

from neper.html import plain_reply, shaded_reply
from neper.shown import ShownToken, shown_tokens
from neper.text.detokenizer import TextToken
from neper.text.tokenizer import Tokenizer, token_name
from neper.types import FinishReason, PackedRows


@dataclass(frozen=True)
class Completion:
    """One finished reply.

    Attributes:
        text: the reply, cut at a stop string.
        token_ids: all sampled tokens, a token that ended the reply included.
        logprobs: their scores, one row a token id; None when none were asked for.
        tokens: the tokens of the text with their bytes; `tokens[i].index` is the place in `token_ids`.
        prompt_token_ids: the prompt.
        prompt_logprobs: scores of prompt positions `prompt_start ..`; None when none were asked for.
        finish_reason: STOP or LENGTH.
        stop_reason: the stop string or the id of the token that ended the reply, if one did.

    A notebook shows it as its text, each token shaded by its probability.

    Args:
        tokenizer: names ids for people. It is no field, and is not pickled: without it they are `token N`.
    """

    text: str
    token_ids: list[int]
    logprobs: PackedRows | None
    tokens: list[TextToken]
    prompt_token_ids: list[int]
    prompt_logprobs: PackedRows | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    tokenizer: InitVar[Tokenizer | None] = None

    def __post_init__(self, tokenizer: Tokenizer | None) -> None:
        object.__setattr__(self, "_tokenizer", tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": None}

    def shown(self) -> list[ShownToken]:
        """The tokens of the text, each with its probability and alternatives.

        Raises:
            ValueError: no logprobs were asked for.
        """
        if self.logprobs is None:
            raise ValueError("this reply has no logprobs: ask for them with LogprobParams(top_k=5)")
        places = [token.index for token in self.tokens]
        rows = PackedRows(self.logprobs.top_k, self.logprobs.words[places].tobytes())
        return shown_tokens([token.text for token in self.tokens], rows, self._token_bytes)

    def shown_prompt(self) -> list[ShownToken]:
        """The scored tokens of the prompt; empty where none were asked for. Their texts are their names."""
        rows = self.prompt_logprobs
        if rows is None:
            return []
        return shown_tokens(
            [token_name(self._token_bytes(i)) for i in rows.token_ids.tolist()], rows, self._token_bytes
        )

    def _repr_html_(self) -> str:
        if self.logprobs is None:
            return plain_reply(self.text)
        return shaded_reply(self.shown(), self.finish_reason.value)

    def _token_bytes(self, token_id: int) -> bytes:
        tokenizer: Tokenizer | None = getattr(self, "_tokenizer", None)
        return f"token {token_id}".encode() if tokenizer is None else tokenizer.token_bytes(token_id)

    def to_arrow(self, prompt: int = 0) -> Any:
        """Prompt and reply as a pyarrow.Table with the columns of `neper.arrow.TOKENS`, a row per token.

        Args:
            prompt: the number in the columns `prompt` and `choice`, for tables that are joined.

        Raises:
            ImportError: pyarrow is not installed.
        """
        from neper import arrow  # loads pyarrow

        rows = PackedRows.pack(self.token_ids) if self.logprobs is None else self.logprobs
        return arrow.table(
            arrow.prompt_batches(prompt, self.prompt_token_ids, self.prompt_logprobs),
            arrow.token_batches(prompt, prompt, len(self.prompt_token_ids), rows),
        )
