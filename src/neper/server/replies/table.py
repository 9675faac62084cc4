"""The reply to a completion as an Arrow stream: a row per token of prompts and choices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from neper import arrow
from neper.server.bodies.completion import CompletionBody
from neper.server.choice import Choice
from neper.server.entries.entries import LegacyArrays
from neper.server.generation import Generation
from neper.server.replies.choices import prompt_rows
from neper.server.replies.completions import CompletionReply
from neper.server.service import Service
from neper.server.transport.accept import ARROW
from neper.types import PackedRows


class CompletionTable(CompletionReply):
    """The rest of the reply is in the schema's metadata, under `reply`: the JSON, in which `logprobs` are null."""

    content_type = ARROW

    def __init__(self, service: Service, body: CompletionBody, generation: Generation, reply_id: str) -> None:
        super().__init__(service, body, generation, reply_id)
        self._prompt_rows: dict[int, PackedRows | None] = {}

    def write_prompt(self, choice: Choice) -> None:
        self.write_prompt_text(choice)
        if choice.request.logprobs.prompt_top_k is not None:
            self._prompt_rows[choice.index] = prompt_rows(choice)

    def logprobs(self, index: int, pieces: list[LegacyArrays]) -> Any:
        return None

    def parts(self) -> Iterator[bytes]:
        yield from arrow.stream(arrow.TOKENS, self._batches(), {"reply": b"".join(super().parts())})

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for choice in self.generation.choices:
            number, place = divmod(choice.index, self.request.n or 1)
            token_ids = choice.prompt.token_ids
            if place == 0:  # this one had the prompt scored, for all choices of that prompt
                yield from arrow.prompt_batches(number, token_ids, self._prompt_rows.get(choice.index))
            sampled = self.sampled(choice.index)
            if sampled is not None:
                yield from arrow.token_batches(number, choice.index, len(token_ids), sampled)
