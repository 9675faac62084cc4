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
from itertools import accumulate, groupby

import msgspec

from neper.server.entries.score_texts import difference, read_scores, running_sums
from neper.server.schemas.fields import FieldChoice, FieldLogprobs, WeakestToken
from neper.text.continuation import encode_continuation
from neper.text.detokenizer import TextToken
from neper.text.json_schema import JsonSchema
from neper.text.json_values import JsonValue, json_values
from neper.text.schema_choices import Plain, SchemaChoices
from neper.text.tokenizer import Tokenizer
from neper.types import LogprobParams, PackedRows, Request, SamplingParams

MAX_SCORED = 1024
"""The most other values of a reply that are scored, each a request to the engine. Fields after those have none."""

BATCH = 64
"""The most of those that are asked for at once, unless one field has more."""


@dataclass
class _Field:
    """A value of the reply, and the places of its tokens among the content's."""

    value: JsonValue
    start: int
    end: int
    weakest: int
    choices: list[FieldChoice] | None = None


@dataclass(frozen=True)
class ChoiceRequest:
    """A request that scores a value in the place of a field's. Its id is the reply's, and must be made its own."""

    field: _Field
    value: Plain
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

    def requests(self, request: Request, max_model_len: int) -> Iterator[list[ChoiceRequest]]:
        """Requests that score the choices of fields, after the reply to `request`: some fields at a time."""
        count = 0
        batch: list[ChoiceRequest] = []
        for field, values in self._with_choices():
            asked = self._spelled(field, values, request, max_model_len)
            count += len(asked)
            if count > MAX_SCORED:
                break
            if batch and len(batch) + len(asked) > BATCH:
                yield batch
                batch = []
            batch += asked
        if batch:
            yield batch

    def score(self, batch: Sequence[ChoiceRequest], totals: Sequence[float]) -> None:
        """Take the total logprob of each value of a batch."""
        for _, group in groupby(zip(batch, totals, strict=True), key=lambda pair: id(pair[0].field)):
            pairs = list(group)
            best = max(total for _, total in pairs)
            weights = [math.exp(total - best) for _, total in pairs]
            whole = math.fsum(weights)
            pairs[0][0].field.choices = [
                FieldChoice(asked.value, total, weight / whole)
                for (asked, total), weight in zip(pairs, weights, strict=True)
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

    def _spelled(
        self, field: _Field, values: Sequence[Plain], request: Request, max_model_len: int
    ) -> list[ChoiceRequest]:
        """A request for each of the values in the place of a field's; none where one of them has no tokens there."""
        own = self._text[field.value.start : field.value.end]
        chosen = json.loads(own.decode("utf-8", "replace"), strict=False)
        before, after = self._around(field)
        texts = [own if _same(value, chosen) else msgspec.json.encode(value) for value in values]
        first, last = self._tokens[field.start].index, self._tokens[field.end - 1].index
        next_ids: list[int] = []
        if not after and any(one != other and other.startswith(one) for one in texts for other in texts):
            next_ids = self._token_ids[last + 1 : last + 2]  # only this tells 1 from 10
        prefix = [*request.prompt_token_ids, *self._token_ids[:first]]
        found: list[ChoiceRequest] = []
        for value, text in zip(values, texts, strict=True):
            try:
                ids = encode_continuation(self._tokenizer, (before + text + after).decode())
            except UnicodeDecodeError:
                return []  # a token at one of its ends has a part of a character too
            if ids is None or len(prefix) + len(ids) + len(next_ids) > max_model_len:
                return []
            scoring = Request(
                request_id=request.request_id,
                prompt_token_ids=[*prefix, *ids, *next_ids],
                sampling=SamplingParams(max_tokens=0),
                logprobs=LogprobParams(prompt_top_k=0, prompt_start=len(prefix)),
            )
            found.append(ChoiceRequest(field, value, scoring))
        return found

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
