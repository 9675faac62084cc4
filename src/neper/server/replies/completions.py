"""The completions endpoint's JSON: texts, echoes, and the legacy logprob arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import orjson

from neper.server.bodies.completion import CompletionBody
from neper.server.choice import Choice, Delta, join_rows
from neper.server.entries.entries import LegacyArrays
from neper.server.generation import Generation
from neper.server.replies.choices import ChoicesReply, prompt_scores, read_prompt
from neper.server.service import Service
from neper.types import JsonObject, PackedRows, listed_places


@dataclass
class _State:
    """One choice: its place in the text, its prompt's pieces, and what a full reply folds."""

    offset: int = 0
    echo: str | None = None
    echo_logprobs: LegacyArrays | None = None
    prompt_logprobs: bytes | None = None
    text: list[str] = field(default_factory=list)
    pieces: list[LegacyArrays] = field(default_factory=list)
    sampled: list[PackedRows | None] = field(default_factory=list)
    last: Delta | None = None


class CompletionReply(ChoicesReply[CompletionBody]):
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, service: Service, body: CompletionBody, generation: Generation, reply_id: str) -> None:
        super().__init__(service, body, generation, reply_id)
        vocab_size = service.engine.capabilities.vocab_size
        # Of a named set all of it is listed, but of a prompt always the top N.
        self._k = generation.choices[0].request.num_listed(vocab_size)
        self._prompt_k = None if body.logprobs is None else listed_places(body.logprobs, vocab_size)
        self._n = body.n or 1
        self._states = [_State() for _ in generation.choices]

    def write_prompt(self, choice: Choice) -> None:
        body, state, prompt = self.request, self._states[choice.index], choice.prompt
        tokenizer = self.service.tokenizer
        if body.echo or self._k is not None:
            # As its tokens spell it, also where a tokenizer normalises what was sent.
            text = tokenizer.decode_bytes(prompt.token_ids[prompt.added_bos :]).decode("utf-8", "replace")
            state.offset = len(text)
            if body.echo:
                state.echo = text
        if body.echo and self._prompt_k is not None and choice.request.logprobs.prompt_top_k is not None:
            tokens, begin = read_prompt(prompt, tokenizer)
            state.echo_logprobs = self.service.entries.legacy(
                tokens,
                prompt.token_ids,
                prompt_scores(choice, self._prompt_k),
                self._prompt_k,
                offset=0,
                begin=begin,
                ids_as_text=self.ids_as_text,
            )
        state.prompt_logprobs = self.prompt_logprobs(choice)

    def begin(self) -> bytes:
        return b""

    def event(self, delta: Delta) -> bytes:
        state = self._states[delta.index]
        events = []
        prompt_ids: JsonObject = {}
        if delta.first and self.request.return_token_ids:
            prompt_ids["prompt_token_ids"] = self.generation.choices[delta.index].prompt.token_ids
        if delta.first and state.echo is not None:
            choice = {
                "index": delta.index,
                "text": state.echo,
                "logprobs": _logprobs(state.echo_logprobs),
                "finish_reason": None,
                **prompt_ids,
            }
            prompt_ids = {}
            events.append(self.chunk(choice))
            state.echo_logprobs = None
        pieces = self._arrays(delta, state)
        sampled = delta.sampled if self.request.return_token_ids else None
        if delta.text or pieces is not None or delta.finish_reason is not None or sampled or prompt_ids:
            choice = {
                "index": delta.index,
                "text": delta.text,
                "logprobs": _logprobs(pieces),
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
                **prompt_ids,
                **self.sampled_fields(delta.index, sampled),
            }
            events.append(self.chunk(choice))
        return b"".join(events)

    def failure(self, index: int) -> bytes:
        return self.chunk({"index": index, "text": "", "logprobs": None, "finish_reason": "error"})

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

    def _choice(self, index: int) -> JsonObject:
        state = self._states[index]
        last = state.last
        # The first choice of a prompt had it scored, for all of them.
        scored = self._states[index - index % self._n]
        pieces = [scored.echo_logprobs, *state.pieces] if scored.echo_logprobs is not None else state.pieces
        scored_choice = self.generation.choices[index].scored
        logprobs = _logprobs(LegacyArrays.join(pieces)) if scored_choice else None
        choice: JsonObject = {
            "index": index,
            "text": "".join(state.text),
            "logprobs": logprobs,
            "finish_reason": last and last.finish_reason,
            "stop_reason": last and last.stop_reason,
            **self.sampled_fields(index, join_rows(state.sampled)),
        }
        if scored.prompt_logprobs is not None:
            choice["prompt_logprobs"] = orjson.Fragment(b"[%b]" % scored.prompt_logprobs)
        if self.request.return_token_ids:
            choice["prompt_token_ids"] = self.generation.choices[index].prompt.token_ids
        state.pieces = []
        if index % self._n == self._n - 1:
            scored.echo_logprobs = scored.prompt_logprobs = None
        return choice

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


def _logprobs(pieces: LegacyArrays | None) -> orjson.Fragment | None:
    return None if pieces is None else orjson.Fragment(pieces.json())
