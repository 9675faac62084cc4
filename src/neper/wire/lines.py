"""The lines of the T/LP protocol as structs, read from bytes and written as bytes. Nothing here has state.

ASCII white space separates words. A line may end in CR LF, LF or nothing. Numbers are in ASCII, without `_`, nan and
inf. The only infinity is a listed alternative of `-inf`, the logprob of a named id that is masked. A number below the
range of float32 means the same. In the tagged form every line of a request names it by any word without spaces.

Words that newer engines may add are skipped: keys of GEN, words of READY, and words after the last known one of PP and
DONE. Everything else that is not in the grammar is a LineError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec

from neper.types import SamplingParams
from neper.wire.logprobs import Logprobs as Logprobs
from neper.wire.logprobs import format_logprobs, parse_logprobs
from neper.wire.words import LAST_ID, comma_list, ending, id_list, integer, joined, pop_tag, real, spaced, utf8

SHOWN = 200
"""Characters of a malformed line that its error repeats."""


class LineError(ValueError):
    """A line that is not of the grammar.

    Attributes:
        reason: the defect.
        line: its beginning, as text.
        tag: the request that it names, if that could be read.
    """

    def __init__(self, reason: str, line: bytes, tag: str | None = None) -> None:
        text = line[: 4 * SHOWN].decode("utf-8", "replace").strip()
        self.reason = reason
        self.line = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
        self.tag = tag
        super().__init__(f"{reason}: {self.line!r}")


class Info(msgspec.Struct, frozen=True):
    """INFO: a fact about the engine."""

    text: str

    @property
    def fields(self) -> dict[str, str]:
        """Its `key=value` words. If a key comes twice, the last one counts."""
        return dict(word.split("=", 1) for word in self.text.split() if "=" in word)


class ReadyLine(msgspec.Struct, frozen=True):
    """READY: the engine takes requests from here on.

    Attributes:
        context: longest prompt + generation, in tokens.
        stop: the engine honours STOP while a request runs.
        slots: requests that it runs at a time; 0 where it does not tell.
    """

    context: int
    stop: bool = False
    slots: int = 0

    @property
    def tagged(self) -> bool:
        """True where requests have names from here on."""
        return self.slots >= 2


class Token(msgspec.Struct, frozen=True, gc=False):
    """T: one emitted token."""

    token_id: int
    tag: str | None = None


class Progress(msgspec.Struct, frozen=True):
    """PP: tokens of the prompt that were read, and their total."""

    read: int
    total: int
    tag: str | None = None


class Done(msgspec.Struct, frozen=True):
    """DONE: the request has ended. Counts that the engine does not send are 0.

    Attributes:
        generated, prompt: tokens.
        finish: "stop", "length", "cancel" or a word of the engine's own.
        accepted, offered: tokens that were drafted.
        reused: prompt tokens that were not computed again.
        hits, lookups: those of the engine's cache of weights.
    """

    generated: int
    prompt: int
    prompt_ms: float
    decode_ms: float
    finish: str
    accepted: int = 0
    offered: int = 0
    reused: int = 0
    hits: int = 0
    lookups: int = 0
    tag: str | None = None


class Failed(msgspec.Struct, frozen=True):
    """ERR: the request has failed; the engine lives."""

    message: str
    tag: str | None = None


class Notice(msgspec.Struct, frozen=True):
    """SLOT, WAIT: the state of the whole engine, for people."""

    kind: Literal["SLOT", "WAIT"]
    text: str


SAMPLING_KEYS = {
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_freq": "frequency_penalty",
    "penalty_present": "presence_penalty",
}
"""Keys of GEN that mean a field of SamplingParams, with the same neutral value."""


class Gen(msgspec.Struct, frozen=True, kw_only=True):
    """GEN: one request. A key that is None (`allowed`: empty) is not sent.

    Attributes:
        temperature: 0 or None is greedy.
        logprobs: alternatives to list per token; 0 = its own score alone, None = no scores.
        allowed: the only ids that may be sampled. The scores list exactly those.
    """

    prompt_token_ids: list[int]
    max_new: int
    tag: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    penalty_repeat: float | None = None
    penalty_freq: float | None = None
    penalty_present: float | None = None
    penalty_last_n: int | None = None
    logprobs: int | None = None
    allowed: list[int] = []


class Stop(msgspec.Struct, frozen=True):
    """STOP: end the request early; DONE still follows."""

    tag: str | None = None


class Quit(msgspec.Struct, frozen=True):
    """QUIT: free everything and exit."""


_OF_ENGINE = (b"INFO", b"READY", b"SLOT", b"WAIT")

AnswerLine = Info | ReadyLine | Token | Logprobs | Progress | Done | Failed | Notice
RequestLine = Gen | Stop | Quit


def parse_answer(line: bytes, *, tagged: bool) -> AnswerLine:
    """Read an engine's line. Raises LineError, and no other error for any bytes."""
    words = line.split()
    tag = None
    try:
        kind = words[0] if words else b""
        if kind in _OF_ENGINE:
            return _parse_of_engine(kind, words)
        if tagged:
            tag = pop_tag(words)
        return _parse_of_request(kind, words, tag)
    except ValueError as error:
        raise LineError(str(error), line, tag) from None


def parse_request(line: bytes, *, tagged: bool) -> RequestLine:
    """Read a line to an engine. Raises LineError, and no other error for any bytes."""
    words = line.split()
    tag = None
    try:
        kind = words[0] if words else b""
        if kind not in (b"GEN", b"STOP", b"QUIT"):
            raise ValueError("not GEN, STOP or QUIT")
        if tagged and kind != b"QUIT":
            if len(words) < 2:
                raise ValueError("it names no request")
            tag = utf8(words.pop(1), "the request's name")
        if kind == b"GEN":
            return _parse_gen(words, tag)
        if len(words) > 1:
            raise ValueError(f"more words than {kind.decode()} has")
        return Stop(tag) if kind == b"STOP" else Quit()
    except ValueError as error:
        raise LineError(str(error), line, tag) from None


def format_answer(line: AnswerLine) -> bytes:
    """The line with its line feed. White space in texts becomes single spaces; tags and words are taken as given."""
    match line:
        case Token(token_id=token_id):
            return b"T %d%b" % (token_id, ending(line.tag))
        case Logprobs():
            return format_logprobs(line)
        case Progress():
            return b"PP %d %d%b" % (line.read, line.total, ending(line.tag))
        case Done():
            first = f"{line.generated} {line.prompt} {line.prompt_ms} {line.decode_ms} {line.finish}"
            counts = f"{line.accepted} {line.offered} {line.reused} {line.hits} {line.lookups}"
            return f"DONE {first} {counts}".encode() + ending(line.tag)
        case Failed():
            return spaced("ERR " + line.message) + ending(line.tag)
        case ReadyLine():
            stop, slots = " stop" if line.stop else "", f" slots={line.slots}" if line.slots else ""
            return f"READY {line.context}{stop}{slots}\n".encode()
        case Info():
            return spaced("INFO " + line.text) + b"\n"
        case Notice():
            return spaced(f"{line.kind} {line.text}") + b"\n"


def format_request(line: RequestLine) -> bytes:
    """The line with its line feed; tags are taken as given."""
    if isinstance(line, Quit):
        return b"QUIT\n"
    name = "" if line.tag is None else f" {line.tag}"
    if isinstance(line, Stop):
        return f"STOP{name}\n".encode()
    keys = [f" {key}={value}" for key in _KEYS if key != "allowed" and (value := getattr(line, key)) is not None]
    if line.allowed:
        keys.append(f" allowed={comma_list(line.allowed)}")
    return f"GEN{name} {line.max_new}{''.join(keys)} {comma_list(line.prompt_token_ids)}\n".encode()


def _parse_of_engine(kind: bytes, words: list[bytes]) -> AnswerLine:
    if kind == b"INFO":
        return Info(joined(words))
    if kind != b"READY":
        return Notice("SLOT" if kind == b"SLOT" else "WAIT", joined(words))
    if len(words) < 2:
        raise ValueError("READY needs the context's length")
    slots = [word for word in words[2:] if word.startswith(b"slots=")]
    if len(slots) > 1:
        raise ValueError("slots= is there twice")
    return ReadyLine(
        integer(words[1], "the context's length", low=1),
        b"stop" in words[2:],
        integer(slots[0][6:], "slots") if slots else 0,
    )


def _parse_of_request(kind: bytes, words: list[bytes], tag: str | None) -> AnswerLine:
    if kind == b"T":
        if len(words) != 2:
            raise ValueError("T needs one id")
        return Token(integer(words[1], "the id", high=LAST_ID), tag)
    if kind == b"LP":
        return parse_logprobs(words, tag)
    if kind == b"PP":
        if len(words) < 3:
            raise ValueError("PP needs two counts")
        return Progress(integer(words[1], "the first count"), integer(words[2], "the second count"), tag)
    if kind == b"DONE":
        return _parse_done(words, tag)
    if kind == b"ERR":
        return Failed(joined(words), tag)
    raise ValueError("not a line that engines send")


def _parse_done(words: list[bytes], tag: str | None) -> Done:
    if len(words) < 6:
        raise ValueError("DONE needs two counts, two times and a word")
    counts = [integer(count, "a count after the word") for count in words[6:11]]
    if len(counts) not in (0, 3, 5):
        raise ValueError("DONE ends in 0, 3 or 5 counts")
    accepted, offered, reused, hits, lookups = counts + [0] * (5 - len(counts))
    return Done(
        integer(words[1], "the generated tokens"),
        integer(words[2], "the prompt's tokens"),
        real(words[3], "the prompt's time", low=0),
        real(words[4], "the decoding time", low=0),
        utf8(words[5], "the last word"),
        accepted,
        offered,
        reused,
        hits,
        lookups,
        tag,
    )


def _parse_gen(words: list[bytes], tag: str | None) -> Gen:
    if len(words) < 3:
        raise ValueError("GEN needs max_new and the prompt's ids")
    fields: dict[str, Any] = {}
    for word in words[2:-1]:
        name, equals, value = word.partition(b"=")
        if not equals:
            raise ValueError("a word between max_new and the ids is not key=value")
        key = name.decode("ascii", "replace")
        read = _KEYS.get(key)
        if read is None:
            continue
        if key in fields:
            raise ValueError(f"{key} is there twice")
        fields[key] = read(value, key)
    prompt = id_list(words[-1], "the prompt")
    return Gen(prompt_token_ids=prompt, max_new=integer(words[1], "max_new", high=LAST_ID), tag=tag, **fields)


def _real_of(field: str) -> Callable[[bytes, str], float]:
    """A reader of numbers in a field's range, ends included. An engine may take fewer."""
    own = SamplingParams.bounds()[field].own
    low = own.ge if own.gt is None else own.gt
    return partial(real, low=-math.inf if low is None else low, high=math.inf if own.le is None else own.le)


_KEYS: dict[str, Callable[[bytes, str], float | list[int]]] = {
    "temperature": _real_of("temperature"),
    "top_p": _real_of("top_p"),
    "top_k": partial(integer, low=-1, high=LAST_ID),
    "min_p": _real_of("min_p"),
    "seed": partial(integer, low=-(2**63), high=2**64 - 1),
    "penalty_repeat": _real_of("repetition_penalty"),
    "penalty_freq": _real_of("frequency_penalty"),
    "penalty_present": _real_of("presence_penalty"),
    "penalty_last_n": partial(integer, low=-1, high=LAST_ID),
    "logprobs": partial(integer, high=LAST_ID),
    "allowed": id_list,
}
