"""What the replies of chat and completions share: a list of choices in an envelope, whole or a chunk for each."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from neper.errors import EngineError, NeperError
from neper.server.choice import Choice, Delta, Prompt, join_rows
from neper.server.entries.score_texts import ScoreText, read_scores
from neper.server.generation import Generation
from neper.server.replies.encoding import HOLE, around, encode, ready
from neper.server.replies.reply import Body, Reply
from neper.server.schemas.chat import ChatChunk, ChatCompletion
from neper.server.schemas.common import CachedTokens, DraftedTokens, Usage
from neper.server.schemas.completions import Completion, CompletionChunk
from neper.server.service import Service
from neper.server.transport.asgi import error_json
from neper.text.detokenizer import Detokenizer, TextToken
from neper.text.tokenizer import Tokenizer
from neper.types import JsonObject, PackedRows, listed_places

# Scored prompts of so many entries are written in a thread: at 3 us each they would hold up all streams.
INLINE_PROMPT_ENTRIES = 1000


class ChoicesReply(Reply[Body]):
    """A reply of choices. `whole` and `chunk` are what it is and what an event of its stream has."""

    whole: type[ChatCompletion | Completion]
    chunk: type[ChatChunk | CompletionChunk]
    kind = ""
    chunk_kind = ""
    done = b"data: [DONE]\n\n"

    def __init__(self, service: Service, body: Body, generation: Generation, reply_id: str) -> None:
        super().__init__(service, body, generation, reply_id)
        self._continuous_usage = body.continuous_usage
        self._around_choice = around(self._chunk([HOLE]))

    async def open(self, delta: Delta) -> None:
        choice = self.generation.choices[delta.index]
        listed = choice.request.num_prompt_listed(self.service.engine.capabilities.vocab_size)
        if listed is None or len(choice.prompt.token_ids) * (listed + 1) < INLINE_PROMPT_ENTRIES:
            self.write_prompt(choice)
        else:
            await asyncio.to_thread(self.write_prompt, choice)

    @abstractmethod
    def write_prompt(self, choice: Choice) -> None:
        """Write a choice's prompt entries, if any are wanted. May run in a thread."""

    @abstractmethod
    def failure(self, index: int) -> bytes:
        """The event that ends a choice that failed."""

    def end(self) -> bytes:
        if not self.request.include_usage:
            return b""
        return _event(encode(self._chunk([], usage=self._usage())))

    def broken(self, error: NeperError, unfinished: list[int]) -> bytes:
        return b"".join([*map(self.failure, unfinished), _event(error_json(error))])

    def told(self, choice: Struct, **extra: Any) -> bytes:
        """A stream event with one choice; `extra` are other fields of the chunk."""
        return _event(encode(self._chunk([choice], **extra))) if extra else self.told_json(encode(choice))

    def told_json(self, choice: bytes) -> bytes:
        """A stream event with one choice, which is JSON already."""
        before, after = around(self._chunk([HOLE])) if self._continuous_usage else self._around_choice
        return b"data: %b%b%b\n\n" % (before, choice, after)

    def full(self, choices: Iterable[Struct], **extra: Any) -> Iterator[bytes]:
        fields = {**self._envelope(self.kind), "choices": [HOLE], "usage": self._usage()}
        yield around(self.whole(**fields))[0]
        for place, choice in enumerate(choices):
            if place:
                yield b","
            yield encode(choice)
        yield around(self.whole(**fields, **extra))[1]

    def sampled_fields(self, index: int, rows: PackedRows | None) -> JsonObject:
        """A choice's `token_ids`, and with logprobs `token_logprobs`, where the request wants them."""
        if not self.request.return_token_ids:
            return {}
        fields: JsonObject = {"token_ids": rows.token_ids.tolist() if rows else []}
        if self.generation.choices[index].scored:
            fields["token_logprobs"] = ready(b"[%b]" % _own_numbers(rows))
        return fields

    def prompt_logprobs(self, choice: Choice) -> bytes | None:
        """The elements of a choice's `prompt_logprobs`; None where they are not wanted, or another choice's are its."""
        if self.request.prompt_logprobs is None or choice.request.logprobs.prompt_top_k is None:
            return None
        k = self.prompt_places(choice, self.request.prompt_logprobs)
        tokens, begin = read_prompt(choice.prompt, self.service.tokenizer)
        named = bool(choice.request.logprobs.prompt_logprob_token_ids)
        return self.service.entries.prompt(tokens, prompt_scores(choice, k), k, begin=begin, named=named)

    def prompt_places(self, choice: Choice, top_k: int) -> int:
        """Alternatives to show of a prompt token where a field asks for `top_k`; named ids are shown all."""
        named = choice.request.logprobs.prompt_logprob_token_ids
        return len(named) if named else listed_places(top_k, self.service.engine.capabilities.vocab_size)

    def _chunk(self, choices: list[Any], **extra: Any) -> Struct:
        usage: Usage | UnsetType | None = UNSET
        if self.request.include_usage:
            usage = self._usage() if self._continuous_usage else None
        return self.chunk(**{**self._envelope(self.chunk_kind), "choices": choices, "usage": usage, **extra})

    def _usage(self) -> Usage:
        usage, drafted = self.generation.usage(), self.drafted()
        return Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=CachedTokens(cached_tokens=usage.cached_tokens),
            completion_tokens_details=DraftedTokens(**drafted) if drafted else UNSET,
        )

    def _envelope(self, kind: str) -> JsonObject:
        return {
            "id": self._reply_id,
            "object": kind,
            "created": self._created,
            "model": self.service.model_name,
            "system_fingerprint": None,
        }


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def read_prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[list[TextToken], int]:
    """The prompt's tokens as text, special ones spelled out, and the place of the one that begins the text.

    A BOS that the server added is in no text.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, begins_text=True)
    if not prompt.added_bos:
        return detokenizer.step(prompt.token_ids) + detokenizer.flush(), 0
    data = tokenizer.token_bytes(prompt.token_ids[0])
    tokens = detokenizer.step(prompt.token_ids[1:]) + detokenizer.flush()
    return [TextToken(0, "", data, b"", False), *tokens], 1


def prompt_scores(choice: Choice, k: int) -> list[ScoreText]:
    """Scores of the prompt from the first position asked for, with `k` alternatives each."""
    rows = prompt_rows(choice)
    return [] if rows is None else read_scores(rows, k)


def prompt_rows(choice: Choice) -> PackedRows | None:
    """The rows of the prompt from the first position asked for; None where there are none.

    Raises EngineError when the engine left some out.
    """
    rows, expected = join_rows(choice.prompt_rows), len(choice.prompt.token_ids) - choice.request.logprobs.prompt_start
    if (len(rows) if rows is not None else 0) != expected:
        raise EngineError("the engine did not score all of the prompt that it was asked to")
    return rows


def _own_numbers(rows: PackedRows | None) -> bytes:
    return b"" if rows is None else b",".join([score.numbers[0] for score in read_scores(rows, 0)])
