"""The candidates endpoint: what may follow a prompt, scored and compared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property

import msgspec
import numpy as np
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from neper.candidates import Comparison, compare
from neper.server.bodies.candidates import CandidatesBody
from neper.server.entries.score_texts import FLOOR, read_scores
from neper.server.generation import Usage
from neper.server.replies.encoding import HOLE, around, encode, ready
from neper.server.replies.reply import new_id
from neper.server.requests.candidates import start_scoring
from neper.server.schemas.candidates import Boundary, Candidate, Candidates
from neper.server.schemas.common import CachedTokens
from neper.server.schemas.common import Usage as UsageSchema
from neper.server.scoring import Scoring
from neper.server.service import Service
from neper.server.transport.accept import ARROW, JSON, takes_arrow
from neper.server.transport.asgi import send_parts, unless_left
from neper.server.transport.exchange import Exchange
from neper.text.detokenizer import Detokenizer
from neper.types import Float32Array, PackedRows

# Candidates that are written at a time.
PART = 64


async def candidates(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    service.check_room()
    as_arrow = await takes_arrow(scope)
    body = await service.read_json(scope, receive, CandidatesBody)
    service.check_model(body.model)
    reply_id = new_id("cand")
    exchange = Exchange.of(scope)
    scoring, usage = await unless_left(_score(service, body, exchange, reply_id), receive)
    reply = CandidatesReply(service, body, scoring, usage, reply_id)
    parts, form = (reply.arrow_parts(), ARROW) if as_arrow else (reply.parts(), JSON)
    exchange.reply_bytes += await send_parts(send, parts, form, in_thread=True)


async def _score(service: Service, body: CandidatesBody, exchange: Exchange, reply_id: str) -> tuple[Scoring, Usage]:
    generation, scoring = await start_scoring(service, body, reply_id)
    generation.start()
    try:
        await generation.next_deltas()
        exchange.first_results = time.monotonic()
        usage = generation.usage()._replace(
            prompt_tokens=scoring.boundary.position + sum(map(len, scoring.boundary.token_ids))
        )
        exchange.prompt_tokens = usage.prompt_tokens
        return scoring, usage
    finally:
        generation.close()


class CandidatesReply:
    """Scored candidates as JSON, or as an Arrow stream."""

    def __init__(self, service: Service, body: CandidatesBody, scoring: Scoring, usage: Usage, reply_id: str) -> None:
        self._service = service
        self._body = body
        self._scoring = scoring
        boundary = scoring.boundary
        self._reply = Candidates(
            id=reply_id,
            object="candidates",
            created=int(time.time()),
            model=service.model_name,
            candidates=[HOLE],
            prompt_tokens=len(scoring.prompt.token_ids),
            boundary=Boundary(boundary.kind, boundary.position, boundary.text),
            normalized_over="vocabulary" if scoring.request.candidates else "candidates",
            usage=UsageSchema(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=0,
                total_tokens=usage.prompt_tokens,
                prompt_tokens_details=CachedTokens(usage.cached_tokens),
            ),
        )

    def parts(self) -> Iterator[bytes]:
        """The reply, in parts that are made on demand and not kept."""
        before, after = around(self._reply)
        places = range(len(self._logprobs))
        for start in places[::PART]:
            written = [encode(self._candidate(place)) for place in places[start : start + PART]]
            yield b"%b%b" % (b"," if start else before, b",".join(written))
        yield after

    def arrow_parts(self) -> Iterator[bytes]:
        """The same as an Arrow stream: a row per candidate, and the rest of the JSON in the schema's metadata."""
        from neper import arrow  # loads pyarrow

        batches = arrow.candidate_batches(
            [self._text(place) for place in range(len(self._compared))],
            self._compared,
            self._scoring.boundary.token_ids,
            self._scoring.logprobs,
        )
        rest = encode(msgspec.structs.replace(self._reply, candidates=[]))
        yield from arrow.stream(arrow.CANDIDATES, batches, {"reply": rest})

    @cached_property
    def _logprobs(self) -> list[Float32Array]:
        """The logprobs of each candidate's tokens, as JSON has them: none is below its floor."""
        return [np.maximum(values, FLOOR) for values in self._scoring.logprobs]

    @cached_property
    def _compared(self) -> list[Comparison]:
        return compare(self._logprobs, self._body.normalize or "sum")

    def _text(self, place: int) -> str:
        given = self._body.candidates[place]
        return given if isinstance(given, str) else self._service.tokenizer.spelled(given)

    def _candidate(self, place: int) -> Candidate:
        token_ids, logprobs = self._scoring.boundary.token_ids[place], self._logprobs[place]
        return Candidate(
            text=self._text(place),
            token_ids=list(token_ids),
            **self._compared[place]._asdict(),
            logprobs=ready(b"[%b]" % self._entries(token_ids, logprobs)) if self._body.return_tokens else UNSET,
        )

    def _entries(self, token_ids: tuple[int, ...], logprobs: Float32Array) -> bytes:
        detokenizer = Detokenizer(self._service.tokenizer, skip_special_tokens=False)
        tokens = detokenizer.step(list(token_ids)) + detokenizer.flush()
        return self._service.entries.chat(tokens, read_scores(PackedRows.pack(token_ids, logprobs)), 0)
