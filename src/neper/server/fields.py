"""The fields of a reply: the values in its JSON, the tokens that spell each, and the other values that it could have.

A token spells a value if one of its bytes is among the value's. Tokens at the two ends often hold bytes around it too:

    tokens    {"      sure   ":      ␣true   ,"    why   ":"   because   "}
    /sure                            ─────
    /why                                              ──────────────────

Other values are put into the place of the value in these tokens: the bytes around it stay. So ` true` becomes ` false`,
and `":"because"}` would become `":"since"}`. Their tokens are the tokenizer's own for that text.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate

import msgspec
import numpy as np

from neper.server.entries.score_texts import difference, read_scores, running_sums
from neper.server.schemas.fields import FieldChoice, FieldLogprobs, WeakestToken
from neper.text.continuation import encode_continuations
from neper.text.detokenizer import TextToken
from neper.text.json_schema import JsonSchema
from neper.text.json_values import JsonValue, json_values
from neper.text.schema_choices import Plain, SchemaChoices
from neper.text.tokenizer import Tokenizer
from neper.types import Float32Array, PackedRows, Request

MAX_SCORED = 1024
"""The most choices of a reply that are scored. Fields after those have none."""

BATCH = 16
"""The most fields whose choices are scored at once."""


@dataclass
class _Field:
    """A value of the reply, and the places of its tokens among the content's."""

    value: JsonValue
    start: int
    end: int
    weakest: int
    choices: list[FieldChoice] | None = None


@dataclass(frozen=True)
class FieldRequest:
    """A request that scores the choices of a field, as candidates. Its id is the reply's, and must be made its own."""

    field: _Field
    values: Sequence[Plain]
    request: Request


class ReplyFields:
    """The fields of one choice. `take` is given its tokens as they come, `read` finds the fields once all are there.

    Args:
        choices: of the schema; None = no other values are scored.
        ids_as_text: tokens are shown as `token_id:N`.
    """

    def __init__(self, tokenizer: Tokenizer, choices: SchemaChoices | None, *, ids_as_text: bool) -> None:
        self._tokenizer = tokenizer
        self._choices = choices
        self._ids_as_text = ids_as_text
        self._token_ids: list[int] = []
        self._tokens: list[TextToken] = []
        self._rows: list[bytes] = []
        self._fields: list[_Field] = []
        self._numbers: list[bytes] = []
        self._starts: list[int] = []
        self._text = b""

    def take_ids(self, token_ids: Sequence[int]) -> None:
        """Take sampled ids, of which any may be in the content or not."""
        self._token_ids += token_ids

    def take(self, tokens: Sequence[TextToken], places: Sequence[int], rows: PackedRows) -> None:
        """Take tokens of the content, and the rows of scores in which theirs have these places."""
        shown = [(token, place) for token, place in zip(tokens, places, strict=True) if token.visible]
        self._tokens += [token for token, _ in shown]
        self._rows.append(rows.words[[place for _, place in shown], :3].tobytes())

    def read(self, *, whole: bool) -> None:
        """Find the fields. `whole`: the content was not cut off. It can take seconds for long ones."""
        tokens = self._tokens
        self._text = b"".join([token.data for token in tokens])
        self._numbers = [score.numbers[0] for score in read_scores(PackedRows(0, b"".join(self._rows)))]
        ends = list(accumulate(len(token.data) for token in tokens))
        self._starts = [0, *ends[:-1]]
        values = json_values(self._text, whole=whole)
        for value in values:
            start, end = bisect_right(ends, value.start), bisect_left(self._starts, value.end)
            self._fields.append(_Field(value, start, end, start))
        self._find_weakest()

    def requests(self, request: Request, max_model_len: int) -> Iterator[list[FieldRequest]]:
        """Requests that score the choices of fields, after the reply to `request`: some fields at a time."""
        count = 0
        batch: list[FieldRequest] = []
        for field, values in self._with_choices():
            count += len(values)
            if count > MAX_SCORED:
                break
            asked = self._spelled(field, values, request, max_model_len)
            if asked is not None:
                batch.append(FieldRequest(field, values, asked))
            if len(batch) == BATCH:
                yield batch
                batch = []
        if batch:
            yield batch

    def score(self, asked: FieldRequest, logprobs: Sequence[Float32Array]) -> None:
        """Take the logprobs of each choice's tokens."""
        rows = [read_scores(PackedRows.pack(np.zeros(len(values)), values)) for values in logprobs]
        sums = [running_sums(score.numbers[0] for score in scored) for scored in rows]
        totals = [difference(one[-1], one[0]) for one in sums]
        weights = [math.exp(total - max(totals)) for total in totals]
        whole = math.fsum(weights)
        asked.field.choices = [
            FieldChoice(value, total, weight / whole)
            for value, total, weight in zip(asked.values, totals, weights, strict=True)
        ]

    def json(self) -> bytes:
        """The JSON of all fields, by pointer."""
        sums = running_sums(self._numbers)
        return msgspec.json.encode({field.value.pointer: self._shown(field, sums) for field in self._fields})

    def _shown(self, field: _Field, sums: Sequence[Decimal]) -> FieldLogprobs:
        token = self._tokens[field.weakest]
        text = f"token_id:{self._token_ids[token.index]}" if self._ids_as_text else token.text
        return FieldLogprobs(
            logprob=difference(sums[field.end], sums[field.start]),
            start=field.start,
            end=field.end,
            weakest=WeakestToken(text, float(self._numbers[field.weakest]), field.weakest),
            complete=field.value.complete,
            choices=msgspec.UNSET if field.choices is None else field.choices,
        )

    def _spelled(self, field: _Field, values: Sequence[Plain], request: Request, max_model_len: int) -> Request | None:
        """A request for the values in the place of a field's; None where one of them has no tokens there."""
        own = self._text[field.value.start : field.value.end]
        chosen = json.loads(own.decode("utf-8", "replace"), strict=False)
        before, after = self._around(field)
        texts = [own if _same(value, chosen) else msgspec.json.encode(value) for value in values]
        first, last = self._tokens[field.start].index, self._tokens[field.end - 1].index
        next_ids: list[int] = []
        if not after and any(one != other and other.startswith(one) for one in texts for other in texts):
            next_ids = self._token_ids[last + 1 : last + 2]  # only this tells 1 from 10
        prefix = [*request.prompt_token_ids, *self._token_ids[:first]]
        try:
            found = encode_continuations(self._tokenizer, [(before + text + after).decode() for text in texts])
        except UnicodeDecodeError:
            return None  # a token at one of its ends has a part of a character too
        if found is None or len(prefix) + max(map(len, found)) + len(next_ids) > max_model_len:
            return None
        return Request(
            request_id=request.request_id,
            prompt_token_ids=prefix,
            candidates=tuple((*ids, *next_ids) for ids in found),
        )

    def _around(self, field: _Field) -> tuple[bytes, bytes]:
        """The bytes of a value's tokens that come before it and after it."""
        first, last = field.start, field.end - 1
        before = self._whole(first)[: self._cut(first) + field.value.start - self._starts[first]]
        after = self._whole(last)[self._cut(last) + field.value.end - self._starts[last] :]
        return before, after

    def _whole(self, place: int) -> bytes:
        """All bytes of a token, of which only some may be in the content."""
        return self._tokenizer.token_bytes(self._token_ids[self._tokens[place].index])

    def _cut(self, place: int) -> int:
        """The number of a token's bytes that stand before the content: a tag's end, or a space that is dropped."""
        whole, data = self._whole(place), self._tokens[place].data
        return max(0, whole.rfind(data)) if place == 0 else 0

    def _find_weakest(self) -> None:
        """The weakest tokens, from the inside out: those of a value inside another are looked at once."""
        numbers = list(map(float, self._numbers))

        def order(place: int) -> tuple[float, int]:
            return numbers[place], place

        inner: list[list[_Field]] = [[] for _ in self._fields]
        for place in range(len(self._fields) - 1, -1, -1):
            field = self._fields[place]
            at, candidates = field.start, []
            for one in reversed(inner[place]):
                candidates += [*range(at, one.start), one.weakest]
                at = max(at, one.end)
            field.weakest = min([*candidates, *range(at, field.end)], key=order)
            if field.value.parent >= 0:
                inner[field.value.parent].append(field)
            inner[place] = []

    def _with_choices(self) -> Iterator[tuple[_Field, list[Plain]]]:
        """The complete fields for which the schema has more than one choice, and those."""
        choices = self._choices
        if choices is None:
            return
        schemas: list[JsonSchema] = []
        for field in self._fields:
            parent = field.value.parent
            try:
                schemas.append(choices.root if parent < 0 else choices.inside(schemas[parent], field.value.key))
                values = choices.of(schemas[-1]) if field.value.complete else None
            except RecursionError:  # a long chain of references
                return
            if values is not None and len(values) > 1:
                yield field, values


def _same(value: Plain, other: Plain) -> bool:
    """True for values that are equal in JSON, where 1 is 1.0 and not true."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
