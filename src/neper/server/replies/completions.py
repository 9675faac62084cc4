"""The completions endpoint's JSON: texts, echoes, and the legacy logprob arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from neper.server.bodies.completion import CompletionBody
from neper.server.choice import Choice, Delta, join_rows
from neper.server.entries.entries import LegacyArrays
from neper.server.generation import Generation
from neper.server.replies.choices import ChoicesReply, prompt_scores, read_prompt
from neper.server.replies.encoding import HOLE, encode, ready, template
from neper.server.schemas.completions import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
)
from neper.server.service import Service
from neper.types import JsonObject, PackedRows

_LOGPROBS = template(CompletionLogprobs(tokens=[HOLE], token_logprobs=[HOLE], top_logprobs=[HOLE], text_offset=[HOLE]))


@dataclass
class _State:
    """One choice: its place in the text, its prompt's pieces, and the parts of a full reply."""

    offset: int = 0
    echo: str | None = None
    echo_logprobs: LegacyArrays | None = None
    prompt_logprobs: bytes | None = None
    text: list[str] = field(default_factory=list)
    pieces: list[LegacyArrays] = field(default_factory=list)
    sampled: list[PackedRows | None] = field(default_factory=list)
    last: Delta | None = None


class CompletionReply(ChoicesReply[CompletionBody]):
    whole = Completion
    chunk = CompletionChunk
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, service: Service, body: CompletionBody, generation: Generation, reply_id: str) -> None:
        super().__init__(service, body, generation, reply_id)
        self._k = generation.choices[0].request.num_listed(service.engine.capabilities.vocab_size)
        self._n = body.n or 1
        self._states = [_State() for _ in generation.choices]

    def write_prompt(self, choice: Choice) -> None:
        self.write_prompt_text(choice)
        body, state, prompt = self.request, self._states[choice.index], choice.prompt
        if body.echo and body.logprobs is not None and choice.request.logprobs.prompt_top_k is not None:
            k = self.prompt_places(choice, body.logprobs)
            tokens, begin = read_prompt(prompt, self.service.tokenizer)
            state.echo_logprobs = self.service.entries.legacy(
                tokens,
                prompt.token_ids,
                prompt_scores(choice, k),
                k,
                offset=0,
                begin=begin,
                ids_as_text=self.ids_as_text,
            )
        state.prompt_logprobs = self.prompt_logprobs(choice)

    def write_prompt_text(self, choice: Choice) -> None:
        """Write what is shown of the text of a choice's prompt, and what offsets count of it."""
        state, prompt = self._states[choice.index], choice.prompt
        if self.request.echo or self._k is not None:
            # The spelling of its tokens, since a tokenizer may normalise the text of the request.
            text = self.service.tokenizer.decode_bytes(prompt.token_ids[prompt.added_bos :]).decode("utf-8", "replace")
            state.offset = len(text)
            if self.request.echo:
                state.echo = text

    def begin(self) -> bytes:
        return b""

    def event(self, delta: Delta) -> bytes:
        state = self._states[delta.index]
        events = []
        prompt_ids: JsonObject = {}
        if delta.first and self.request.return_token_ids:
            prompt_ids["prompt_token_ids"] = self.generation.choices[delta.index].prompt.token_ids
        if delta.first and state.echo is not None:
            scores = None if state.echo_logprobs is None else ready(legacy_json(state.echo_logprobs))
            events.append(self.told(CompletionChunkChoice(delta.index, state.echo, scores, None, **prompt_ids)))
            prompt_ids = {}
            state.echo_logprobs = None
        pieces = self._arrays(delta, state)
        sampled = delta.sampled if self.request.return_token_ids else None
        if delta.text or pieces is not None or delta.finish_reason is not None or sampled or prompt_ids:
            logprobs = b"null" if pieces is None else legacy_json(pieces)
            if delta.finish_reason is None and not self.request.return_token_ids:
                events.append(self.told_json(_text_choice(delta.index) % (encode(delta.text), logprobs)))
            else:
                fields = {**prompt_ids, **self.sampled_fields(delta.index, sampled)}
                reason: Any = delta.finish_reason
                choice = CompletionChunkChoice(
                    delta.index, delta.text, ready(logprobs), reason, delta.stop_reason, **fields
                )
                events.append(self.told(choice))
        return b"".join(events)

    def failure(self, index: int) -> bytes:
        return self.told(CompletionChunkChoice(index, "", None, "error"))

    def add(self, delta: Delta) -> None:
        state = self._states[delta.index]
        if delta.first:
            state.text += [state.echo] if state.echo is not None else []
        pieces = self._arrays(delta, state)
        state.text.append(delta.text)
        state.pieces += [pieces] if pieces is not None else []
        state.sampled.append(delta.sampled)
        state.last = delta

    def parts(self) -> Iterator[bytes]:
        return self.full(map(self._choice, range(len(self._states))))

    def _choice(self, index: int) -> CompletionChoice:
        state = self._states[index]
        assert state.last is not None
        # The first choice of a prompt had it scored, for all choices of that prompt.
        scored = self._states[index - index % self._n]
        pieces = [scored.echo_logprobs, *state.pieces] if scored.echo_logprobs is not None else state.pieces
        reason: Any = state.last.finish_reason
        choice = CompletionChoice(
            index,
            "".join(state.text),
            self.logprobs(index, pieces),
            reason,
            state.last.stop_reason,
            **self.sampled_fields(index, self.sampled(index)),
        )
        if scored.prompt_logprobs is not None:
            choice.prompt_logprobs = ready(b"[%b]" % scored.prompt_logprobs)
        if self.request.return_token_ids:
            choice.prompt_token_ids = self.generation.choices[index].prompt.token_ids
        state.pieces = []
        if index % self._n == self._n - 1:
            scored.echo_logprobs = scored.prompt_logprobs = None
        return choice

    def logprobs(self, index: int, pieces: list[LegacyArrays]) -> Any:
        """The `logprobs` of a choice of the full reply."""
        return ready(legacy_json(LegacyArrays.join(pieces))) if self.generation.choices[index].scored else None

    def sampled(self, index: int) -> PackedRows | None:
        """The rows of all sampled tokens of a choice."""
        return join_rows(self._states[index].sampled)

    def _arrays(self, delta: Delta, state: _State) -> LegacyArrays | None:
        if self._k is None or delta.scores is None:
            return None
        scored = delta.scores.read()
        pieces = self.service.entries.legacy(
            delta.tokens,
            [score.words[0] for score in scored],
            scored,
            self._k,
            offset=state.offset,
            begin=delta.begin,
            ids_as_text=self.ids_as_text,
        )
        state.offset += len(delta.text)
        return pieces


def legacy_json(arrays: LegacyArrays) -> bytes:
    return _LOGPROBS % arrays


@lru_cache(maxsize=1024)
def _text_choice(index: int) -> bytes:
    """The choice of a chunk in the middle of a text, as a format of that text and of its logprobs."""
    return template(CompletionChunkChoice(index, HOLE, HOLE, None, None))
