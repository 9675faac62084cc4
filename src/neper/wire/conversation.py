"""An engine's lines about one request, as TokenChunks: tokens with their scores, the cause of its end, and errors."""

from __future__ import annotations

import math
import struct

from neper.types import FinishReason, PackedRows, Request, TokenChunk
from neper.wire.lines import Done, Failed, Logprobs, Token

_UNSCORED = struct.Struct("=ii")


class Conversation:
    """One request of an engine that speaks lines. `take_…` its lines, then ask for a `chunk`.

    A token is given out with its scores. So it waits for the line after it where scores were asked for. If the first
    token has none, no others come: all rows are without scores.

    Args:
        vocab_size: ids must be below it.

    Attributes:
        ended: it has ended, was ended here, or failed. At most one more chunk comes.
        done: the engine has ended it too. Before that, more lines may come.
        num_tokens: the number of tokens that were taken.
        num_unscored_ends: end tokens that came without the scores that were asked for. They are not tokens of the
            reply, since all of its rows have scores or none has.
        scored: True where the scores that were asked for came with its tokens; None = not known.
    """

    def __init__(self, request: Request, vocab_size: int) -> None:
        self.request = request
        self.done = False
        self.num_tokens = 0
        self.num_unscored_ends = 0
        self._vocab_size = vocab_size
        self._places = request.num_listed(vocab_size)
        self._scored: bool | None = None if self._places is not None else False
        allowed = request.sampling.allowed_token_ids
        self._allowed = frozenset(allowed) if allowed else None
        self._ends = frozenset(request.eos_token_ids)
        self._stops = frozenset(request.sampling.stop_token_ids)
        self._waiting: int | None = None
        self._last: int | None = None
        self._rows = bytearray()
        self._finish_reason: FinishReason | None = None
        self._error: str | None = None
        self._num_cached_tokens = 0
        self._num_drafts = self._num_accepted = 0
        self._told = False

    @property
    def ended(self) -> bool:
        return self._finish_reason is not None

    @property
    def scored(self) -> bool | None:
        return None if self._places is None else self._scored

    def take_token(self, line: Token) -> None:
        self._settle()
        if self.ended or not self._fits(line.token_id):
            return
        if self._scored is False:
            self._add(line.token_id, _UNSCORED.pack(line.token_id, 1))
        else:
            self._waiting = line.token_id

    def take_logprobs(self, line: Logprobs) -> None:
        token_id, self._waiting = self._waiting, None
        if self.ended or self._scored is False:
            return
        if line.index is not None:
            # A line of this form stands for its token, which may also have come before it.
            if line.index != self.num_tokens:
                self.fail(f"the engine scored token {line.index} of the reply where {self.num_tokens} was due")
                return
            if token_id not in (None, line.token_id):
                self.fail(f"the engine scored the token {line.token_id} where it had sent {token_id}")
                return
            if token_id is None and not self._fits(line.token_id or 0):
                return
            token_id = line.token_id
        if token_id is None:
            self.fail("the engine sent the scores of a token that it did not send")
        elif self._allowed is not None and frozenset(line.ids) != self._allowed:
            self.fail(f"the engine listed other ids than the {len(self._allowed)} that are allowed")
        elif line.ids and max(line.ids) >= self._vocab_size:
            self.fail(f"the engine listed the token {max(line.ids)}, but there are only {self._vocab_size}")
        elif self._allowed is None and -math.inf in line.logprobs:
            self.fail("the engine listed an id without any probability")
        else:
            self._scored = True
            self._add(token_id, line.row(token_id, self._places))

    def take_done(self, line: Done) -> None:
        self._settle()
        self.done = True
        self._num_cached_tokens = line.reused
        self._num_drafts, self._num_accepted = line.offered, line.accepted
        if self.ended:
            return
        if self._last in self._ends:
            self._finish_reason = FinishReason.STOP
        elif line.finish == "length" or self._is_full:
            self._finish_reason = FinishReason.LENGTH
        elif line.finish == "cancel":
            self.fail("the engine cancelled this request")
        else:
            self._finish_reason = FinishReason.STOP

    def take_failed(self, line: Failed) -> None:
        self.done = True
        self.fail(f"the engine failed this request: {line.message}")

    def fail(self, reason: str) -> None:
        """End it with an error, unless it has ended."""
        if not self.ended:
            self._finish_reason, self._error = FinishReason.ERROR, reason

    def abandon(self) -> None:
        """End it for a caller that has left."""
        self._finish_reason, self._told = self._finish_reason or FinishReason.ABORT, True

    def chunk(self) -> TokenChunk | None:
        """The new and certain results since the last one; None when there are none."""
        if self._told:
            return None
        # An end token is in no text, but only the next line shows that a token is one.
        if not self.ended and (not self._rows or self._last in self._ends):
            return None
        tokens = None
        if self._rows:
            tokens = PackedRows(self._places if self._scored else None, bytes(self._rows))
            self._rows.clear()
        self._told = self.ended
        stop = None
        if self._finish_reason is FinishReason.STOP and (self._last in self._ends or self._last in self._stops):
            stop = self._last
        return TokenChunk(
            request_id=self.request.request_id,
            tokens=tokens,
            finish_reason=self._finish_reason,
            stop_token_id=stop,
            error=self._error,
            num_cached_tokens=self._num_cached_tokens,
            num_drafts=self._num_drafts,
            num_accepted=self._num_accepted,
        )

    @property
    def _is_full(self) -> bool:
        limit = self.request.sampling.max_tokens
        return limit is not None and self.num_tokens >= limit

    def _fits(self, token_id: int) -> bool:
        """True where a token may come here. Otherwise the request is ended."""
        if self._is_full:
            self._finish_reason = FinishReason.LENGTH
        elif token_id >= self._vocab_size:
            self.fail(f"the engine sent the token {token_id}, but there are only {self._vocab_size}")
        elif self._allowed is not None and token_id not in self._allowed:
            self.fail(f"the engine sent the token {token_id}, which is not among those that are allowed")
        return not self.ended

    def _settle(self) -> None:
        """Settle a token whose scores were due where another line came."""
        token_id, self._waiting = self._waiting, None
        if token_id is None or self.ended:
            return
        if token_id in self._ends:
            self.num_unscored_ends += 1
            self._finish_reason = FinishReason.STOP
        elif self._scored:
            self.fail(f"the engine sent no scores of token {self.num_tokens} of the reply")
        else:
            self._scored = False
            self._add(token_id, _UNSCORED.pack(token_id, 1))

    def _add(self, token_id: int, row: bytes) -> None:
        self._rows += row
        self._last = token_id
        self.num_tokens += 1
        if token_id in self._stops:
            self._finish_reason = FinishReason.STOP
