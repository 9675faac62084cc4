"""The LP line: the scores of one token. One comes per token, so all its numbers are read in one pass."""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import msgspec
import numpy as np
import orjson

from neper.wire.words import LAST_ID, NUMBER, ending, integer

ROUNDING = 1e-3
"""The most that rounding may put a logprob above 0. It then counts as 0."""

_FLOAT32_END = -(2.0**128 - 2.0**103)
"""From here down, float32 rounds to -inf."""

_PAST_THE_END = b":-1e300"


class Logprobs(msgspec.Struct, frozen=True):
    """LP: the scores of one token. All ids are distinct, and no logprob is above 0.

    Attributes:
        logprob: that of the token; finite.
        ids, logprobs: all alternatives that the engine sent, in its order.
        index, token_id: the token's place in the reply and its id, only in the raw-v1 form.
    """

    logprob: float
    ids: list[int] = []
    logprobs: list[float] = []
    tag: str | None = None
    index: int | None = None
    token_id: int | None = None

    def row(self, token_id: int, places: int | None = None) -> bytes:
        """A row of PackedRows with `places` alternatives (default: all): best first, and equal ones as they came.

        A longer list is cut, a shorter one padded. The rank counts listed values. For a token below all of them it is
        the least possible rank. A token that is listed is ranked by its listed value, since the two may be rounded
        differently.
        """
        ids, logprobs = self.ids, sorted(self.logprobs, reverse=True)
        if logprobs != self.logprobs:
            ids = [ids[place] for place in sorted(range(len(ids)), key=self.logprobs.__getitem__, reverse=True)]
        own = logprobs[ids.index(token_id)] if token_id in ids else self.logprob
        rank = 1
        for logprob in logprobs:
            if logprob <= own:
                break
            rank += 1
        if places is not None and places != len(ids):
            unused = places - len(ids)
            ids, logprobs = ids[:places] + [-1] * unused, logprobs[:places] + [-math.inf] * unused
        return _row_layout(len(ids)).pack(token_id, rank, self.logprob, *ids, *logprobs)

    @staticmethod
    def of_row(row: bytes, tag: str | None = None) -> Logprobs:
        """The scores in a row of PackedRows that has them, without its unused places."""
        places = (len(row) // 4 - 3) // 2
        _token_id, _rank, logprob, *listed = _row_layout(places).unpack(row)
        ids, logprobs = listed[:places], listed[places:]
        if places and ids[-1] < 0:
            used = ids.index(-1)
            ids, logprobs = ids[:used], logprobs[:used]
        return Logprobs(logprob, ids, logprobs, tag)


def parse_logprobs(words: list[bytes], tag: str | None) -> Logprobs:
    """`LP <logprob> [<id>:<logprob> …]`, or the raw-v1 form. Raises ValueError that names the defect."""
    index = token_id = None
    numbers = words[1:]
    if len(words) > 2 and words[2] == b"raw":
        if len(words) < 6:
            raise ValueError("LP needs index, raw, id, logprob and count")
        index, token_id = integer(words[1], "the index"), integer(words[3], "the id", high=LAST_ID)
        numbers = [words[4], *words[6:]]
        if integer(words[5], "the count") != len(numbers) - 1:
            raise ValueError("the count is not that of the alternatives")
    if not numbers:
        raise ValueError("LP needs a logprob")
    listed = len(numbers) - 1
    # The separators are checked here. A strict reader takes all numbers at once, in half the time of a call for each.
    text = b",".join(numbers)
    if b"inf" in text:
        text = text.replace(b":-inf", _PAST_THE_END)
    if text.translate(None, NUMBER) != b",:" * listed:
        raise ValueError("LP is not a finite logprob and pairs of id:logprob")
    try:
        values = orjson.loads(b"[%b]" % text.replace(b":", b","))
    except orjson.JSONDecodeError:
        raise ValueError("LP has a malformed number") from None
    logprob, ids, logprobs = values[0], values[1::2], values[2::2]
    if logprob <= _FLOAT32_END:
        raise ValueError("the logprob is not finite")
    if logprob > 0:
        logprob = _rounded(logprob)
    if listed:
        if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > LAST_ID:
            raise ValueError(f"an alternative's id is not a whole number from 0 to {LAST_ID}")
        if len(set(ids)) != listed:
            raise ValueError("an id is listed twice")
        if min(logprobs) <= _FLOAT32_END:
            logprobs = [value if value > _FLOAT32_END else -math.inf for value in logprobs]
        if max(logprobs) > 0:
            logprobs = [_rounded(value) for value in logprobs]
    return Logprobs(logprob, ids, logprobs, tag, index, token_id)


def format_logprobs(line: Logprobs) -> bytes:
    """The line with its line feed, numbers in the shortest form that float32 needs; raw-v1 where there is an index.

    Raises ValueError for NaN and +inf.
    """
    values = np.array([line.logprob, *line.logprobs], np.float32)
    text = orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
    if b"null" in text:
        if not math.isfinite(line.logprob) or any(value != -math.inf for value in values[~np.isfinite(values)]):
            raise ValueError("a logprob is not a number")
        text = text.replace(b"null", b"-inf")
    numbers = text.split(b",")
    pairs = b"".join([b" %d:%b" % pair for pair in zip(line.ids, numbers[1:], strict=True)])
    if line.index is None or line.token_id is None:
        return b"LP %b%b%b" % (numbers[0], pairs, ending(line.tag))
    head = (line.index, line.token_id, numbers[0], len(line.ids))
    return b"LP %d raw %d %b %d%b%b" % (*head, pairs, ending(line.tag))


def _rounded(logprob: float) -> float:
    if logprob > ROUNDING:
        raise ValueError("a logprob is above 0")
    return min(logprob, 0.0)


@lru_cache(maxsize=256)
def _row_layout(places: int) -> struct.Struct:
    return struct.Struct(f"=iif{places}i{places}f")
