"""A choice: the text of one sequence so far, made of the engine's chunks, as deltas for whoever shapes the reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from neper.engine.interface import TokenStream, failure
from neper.errors import EngineError
from neper.server.entries.score_texts import PendingScores, ScoreBatch
from neper.server.fields import ReplyFields
from neper.text.detokenizer import Detokenizer, TextToken
from neper.text.message import MessageParser
from neper.text.token_text import Field, FieldPiece
from neper.text.tokenizer import Tokenizer
from neper.text.validated_json import JsonParser
from neper.types import FinishReason, PackedRows, Request, TokenChunk


@dataclass(frozen=True)
class Prompt:
    """A prompt as the engine gets it.

    Attributes:
        added_bos: the first id is a BOS that this server put there: it is in no text.
    """

    token_ids: list[int]
    added_bos: bool = False


class Part(NamedTuple):
    """Tokens next to each other in one field of a message.

    Attributes:
        call: number of the tool call, from 0; -1 where the field is not a call's.
        tokens: each cut to what it is in the field.
        places: of their rows in the delta's scores.
    """

    field: Field
    call: int
    tokens: list[TextToken]
    places: list[int]
    text: str


class Delta:
    """What one chunk brought for one choice.

    Attributes:
        index: of the choice.
        first: the first delta of this choice: its prompt scores are complete.
        tokens: tokens whose text is settled now, in order.
        parts: what they are in a message's fields, where a parser tells; else None.
        scores: of `tokens`, one each; None when there are none, or the engine sends none.
        sampled: rows of `tokens`, and on the last delta also those of tokens that are in no text, since a stop string
            cut them off; None when there are none.
        begin: place among `tokens` of the one that begins a text of its own; -1 where none does, or it makes no
            difference to this tokenizer.
        text: the visible text of `tokens`.
        finish_reason: "stop", "length" or "tool_calls", on the last delta alone.
        stop_reason: the stop string or the id among stop_token_ids that ended the choice.
        fields: the JSON of its fields' logprobs by pointer, on the last delta where they are wanted.
    """

    __slots__ = (
        "begin",
        "fields",
        "finish_reason",
        "first",
        "index",
        "parts",
        "sampled",
        "scores",
        "stop_reason",
        "text",
        "tokens",
    )

    def __init__(
        self,
        index: int,
        first: bool,
        tokens: list[TextToken],
        scores: PendingScores | None,
        sampled: PackedRows | None,
        begin: int,
        finish_reason: str | None,
        stop_reason: str | int | None,
        parts: list[Part] | None = None,
    ) -> None:
        self.index = index
        self.first = first
        self.tokens = tokens
        self.parts = parts
        self.scores = scores
        self.sampled = sampled
        self.begin = begin
        # An invisible token's text is empty.
        self.text = tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        self.fields: bytes | None = None


class Choice:
    """One choice: its request, and its text so far. `step` turns the engine's chunks into deltas.

    Args:
        scores: converts the scores of deltas to text, with those of others; None where nobody reads them as text.
        begins_text: the reply is a text of its own (a chat message), else it continues the prompt's.
        parser: tells the fields of the message; None where all text is one.
        fields: of the JSON in the message, where they are wanted.

    Attributes:
        stream: of the engine, once it was submitted.
        num_listed: places of the lists that its rows must have, known then too; None = no scores.
        may_be_unscored: scores that were asked for may not come, known then too.
        scored: its scores are asked for, and the engine has not shown that it sends none.
        validated: its content must be JSON, which may take long to check.
        num_accepted, num_rejected: drafted tokens that are in the reply, and that are not.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        request: Request,
        tokenizer: Tokenizer,
        scores: ScoreBatch | None,
        *,
        begins_text: bool = False,
        parser: MessageParser | JsonParser | None = None,
        fields: ReplyFields | None = None,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.request = request
        self.parser = parser
        self.fields = fields
        self.stream: TokenStream | None = None
        self.num_listed: int | None = None
        self.may_be_unscored = False
        self.scored = request.logprobs.top_k is not None
        self.validated = isinstance(parser, JsonParser)
        self.finished = False
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.num_accepted = self.num_rejected = 0
        self.prompt_rows: list[PackedRows] = []
        self._started = False
        self._pending: list[PackedRows] = []
        self._unsettled: list[TextToken] = []
        self._num_settled = 0
        self._scores = scores
        self._begins = begins_text and tokenizer.strips_leading_space
        self._detokenizer = Detokenizer.for_reply(tokenizer, request.sampling, begins_text=begins_text)

    def step(self, chunk: TokenChunk) -> Delta | None:
        """The delta of a chunk, or None when the chunk settles nothing.

        Raises EngineError when the engine failed, InvalidLogitsError when the model did, InvalidRequestError when the
        request cannot be followed.
        """
        end = chunk.finish_reason
        if end is FinishReason.ERROR or end is FinishReason.ABORT:
            raise failure(chunk)
        if chunk.num_cached_tokens:
            self.num_cached_tokens = chunk.num_cached_tokens
        if chunk.prompt is not None:
            self.prompt_rows.append(chunk.prompt)
        rows = sampled = chunk.tokens
        if sampled is None and end is None:
            return None
        if sampled is not None and sampled.top_k != self.num_listed:
            self._check_scores(sampled)
        finish_reason = None if end is None else end.value
        stop_reason: str | int | None = None
        detokenizer = self._detokenizer
        token_ids = [] if sampled is None else _token_ids(sampled)
        tokens = detokenizer.step(token_ids, ended=chunk.stop_token_id is not None)
        if end is not None and detokenizer.stopped is None:
            tokens += detokenizer.flush()
            if detokenizer.stopped is None and chunk.stop_token_id in self.request.sampling.stop_token_ids:
                stop_reason = chunk.stop_token_id
        if detokenizer.stopped is not None:
            finish_reason, stop_reason = "stop", detokenizer.stopped
        num_tokens = detokenizer.num_tokens
        parts = None
        if self.parser is not None:
            tokens, parts = self._parse(self.parser, tokens, finish_reason, stop_reason)
            if self.parser.end is not None:
                finish_reason, stop_reason = "tool_calls", None
                num_tokens = max(self.num_tokens, self.parser.end)
            elif finish_reason == "stop" and self.parser.num_completed:
                finish_reason = "tool_calls"
        num_cut = max(0, len(token_ids) - (num_tokens - self.num_tokens))
        if sampled is not None and num_cut:
            rows = sampled = sampled[: num_tokens - self.num_tokens]
        if chunk.num_drafts:
            # The last token of a chunk was not drafted.
            num_accepted = chunk.num_accepted - max(0, num_cut - 1)
            self.num_accepted += num_accepted
            self.num_rejected += chunk.num_drafts - num_accepted
        self.num_tokens = num_tokens
        if self._pending or len(tokens) != len(token_ids):
            rows = self._settled_rows(sampled, len(tokens))
        self.finished = finish_reason is not None
        sampled = join_rows([rows, *self._pending]) if self.finished and self._pending else rows
        if self.fields is not None:
            self.fields.take_ids(token_ids)
            if rows is not None and self.num_listed is not None:
                _take_content(self.fields, tokens, parts, rows)
        begin = -1
        if self._begins:
            begin = next((place for place, token in enumerate(tokens) if token.visible), -1)
            self._begins = begin < 0
        scores, batch = None, self._scores
        if self.validated and not (parts or self.finished):
            return None  # a stream does not begin before there is something to show
        if batch is not None and rows is not None and self.num_listed is not None:
            if self.validated:
                scores = PendingScores(batch, rows)  # not in the batch, which is the event loop's
            elif tokens:
                scores = batch.add(rows)
        first, self._started = not self._started, True
        return Delta(self.index, first, tokens, scores, sampled, begin, finish_reason, stop_reason, parts)

    def _check_scores(self, rows: PackedRows) -> None:
        """Rows that are not as they were asked for: an engine may have no scores, but then for none of a choice."""
        if rows.top_k is not None or self.num_tokens or not self.may_be_unscored:
            raise EngineError("the engine scored this request otherwise than it was asked")
        self.num_listed, self.scored = None, False

    def _parse(
        self,
        parser: MessageParser | JsonParser,
        tokens: list[TextToken],
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> tuple[list[TextToken], list[Part]]:
        """The tokens whose fields are settled now, and what they are in them."""
        before = self._num_settled
        pieces = parser.step(tokens)
        if finish_reason is not None:
            pieces += self._flush(parser, finish_reason, stop_reason)
        self._unsettled += tokens
        if self.validated and not pieces and finish_reason is None:
            return [], []  # nothing is shown of them, so they wait for those that are
        self._num_settled = parser.settled
        count = self._num_settled - before
        settled = self._unsettled[:count]
        del self._unsettled[:count]
        return settled, _parts(pieces, before)

    def _flush(
        self, parser: MessageParser | JsonParser, finish_reason: str, stop_reason: str | int | None
    ) -> list[FieldPiece]:
        if isinstance(parser, JsonParser):
            if finish_reason == "length":
                parser.keep()
            pieces = parser.flush()
            # What the client's own stop cut off may be JSON or not.
            if parser.problem is not None and stop_reason is None:
                raise parser.problem
            return pieces
        return parser.flush()

    def _settled_rows(self, sampled: PackedRows | None, count: int) -> PackedRows | None:
        """The rows of the next `count` tokens. Those of the others wait in pieces: a long wait joins them once."""
        if sampled is not None:
            self._pending.append(sampled)
        if count == 0:
            return None
        rows = join_rows(self._pending)
        self._pending = []
        if rows is not None and count < len(rows):
            rows, rest = rows[:count], rows[count:]
            self._pending = [rest]
        return rows


def _take_content(
    fields: ReplyFields, tokens: Sequence[TextToken], parts: Sequence[Part] | None, rows: PackedRows
) -> None:
    if parts is None:
        fields.take(tokens, range(len(tokens)), rows)
    for part in parts or ():
        if part.field == "content":
            fields.take(part.tokens, part.places, rows)


def _parts(pieces: Sequence[FieldPiece], first: int) -> list[Part]:
    """Pieces that are next to each other in one field as one part; `first` is the index of the first row's token."""
    parts = []
    for (field, call), group in groupby(pieces, key=lambda piece: (piece.field, piece.call)):
        tokens = [piece.token for piece in group]
        places = [token.index - first for token in tokens]
        parts.append(Part(field, call, tokens, places, "".join([token.text for token in tokens])))
    return parts


def _token_ids(rows: PackedRows) -> list[int]:
    """`rows.token_ids` as ints, without numpy: it is one row, usually, and made for every step."""
    return memoryview(rows.data).cast("i")[:: rows.width].tolist()


def join_rows(pieces: Sequence[PackedRows | None]) -> PackedRows | None:
    """Rows one after the other; None when there are none."""
    filled = [piece for piece in pieces if piece]
    if len(filled) < 2:
        return filled[0] if filled else None
    return PackedRows(filled[0].top_k, b"".join([piece.data for piece in filled]))
