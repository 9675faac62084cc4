"""Incremental detokenization of one sequence: ids in, tokens with their text and bytes out, cut by stop strings.

The text is made from bytes: it equals `b"".join(bytes of visible tokens).decode("utf-8", "replace")`, for any grouping
of the ids into calls. A token is released once nothing can change it any more. So it waits while a character is
unfinished (a cut reply shows U+FFFD on its last token), and while the text's end could begin a stop string.

    bytes      "Hel"   "lo"   F0 9F   98 80     " ST"   "OP!"      stop = ["STOP"]
    released   "Hel"   "lo"   (wait)  "", "😀"   (wait)  " "        "OP!" is dropped, " ST" keeps its space
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from neper.text.stop_strings import StopMatcher
from neper.text.tokenizer import Tokenizer, split_text
from neper.types import SamplingParams


class TextToken(NamedTuple):
    """A token as the client sees it.

    Attributes:
        index: its place among the sequence's tokens, from 0.
        text: the text that the decoder released at this token: "" while a character is unfinished, the whole character
            on the token that completes it, the U+FFFD of an unfinished end on the last token.
        data: its own raw bytes, cut where a stop string cuts the text.
        held: bytes of an unfinished character before this token. Its alternatives are decoded after them.
        visible: False where its bytes are in no text (a skipped special token, the end token). Then `text` is "".
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    text: str
    data: bytes
    held: bytes
    visible: bool


@dataclass(slots=True)
class _Waiting:
    """A token that is not released yet.

    `start` is its place in the text. `settled` is the length of safe text at which nothing can change it: the end of
    its own text, or of the character that its last bytes begin.
    """

    index: int
    text: str
    data: bytes
    held: bytes
    visible: bool
    start: int
    settled: int

    def token(self) -> TextToken:
        return TextToken(self.index, self.text, self.data, self.held, self.visible)


class Detokenizer:
    """One sequence's text.

    Args:
        tokenizer: gives each id's bytes.
        stop: stop strings, none of them empty. If several are complete at the same token, the one that begins first
            counts, and of those the shortest.
        include_stop: the stop string, or the token that ended the request, stays in the text. (An end token that is
            special still falls under `skip_special_tokens`.)
        skip_special_tokens: special tokens are invisible.
        min_tokens: a stop string counts only if a token beyond these many completes it.
        begins_text: the tokens are a text of their own, not the continuation of a prompt. The space that a
            SentencePiece tokenizer puts before it is dropped from text and bytes.

    Attributes:
        stopped: the stop string that was found. `step` then takes no more tokens.
        num_tokens: tokens taken, up to and including the one that completed the stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        begins_text: bool = False,
    ) -> None:
        self.stopped: str | None = None
        self.num_tokens = 0
        self._pieces = tokenizer.pieces
        self._special = tokenizer.special_token_ids
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._matcher = StopMatcher(stop) if stop else None
        self._drop_space = begins_text and tokenizer.strips_leading_space
        self._strips_space = self._drop_space
        self._held = b""
        self._length = 0
        self._waiting: deque[_Waiting] = deque()

    @classmethod
    def for_reply(cls, tokenizer: Tokenizer, sampling: SamplingParams, *, begins_text: bool = False) -> Detokenizer:
        """The detokenizer of a reply that was asked for with `sampling`."""
        return cls(
            tokenizer,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
            begins_text=begins_text,
        )

    def step(self, token_ids: Sequence[int], *, ended: bool = False) -> list[TextToken]:
        """Take the next ids (Python ints). Returns the tokens that are settled now, in order.

        Args:
            ended: the last id is the token that ended the request, an end-of-sequence or stop token. As in vLLM, it is
                in no text unless `include_stop`.
        """
        released: list[TextToken] = []
        if self.stopped is not None:
            return released
        pieces, skipped, waiting = self._pieces, self._skipped, self._waiting
        end_place = len(token_ids) - 1 if ended and not self._include_stop else -1
        plain = self._matcher is None
        for place, token_id in enumerate(token_ids):
            data, text, rest = pieces[token_id]
            hidden = place == end_place or token_id in skipped
            if plain and not (hidden or rest or waiting or self._drop_space):
                released.append(TextToken(self.num_tokens, text, data, b"", True))
                self.num_tokens += 1
                continue
            if hidden:
                self._take_hidden(data)
            elif self._take(data, text, rest):
                released += self._release(self._length)
                break
            released += self._release(self._length - (0 if self._matcher is None else self._matcher.partial))
        return released

    def flush(self) -> list[TextToken]:
        """The tokens that still wait, at the sequence's end. No call may follow."""
        if self._held:
            tail = self._held.decode("utf-8", "replace")
            self._held = b""
            self._length += len(tail)
            last = next(token for token in reversed(self._waiting) if token.visible)
            last.text += tail
            self._search(tail)
        return self._release(self._length)

    def alternative_text(self, token_id: int, held: bytes = b"", *, begins_text: bool = False) -> str:
        """The text that another token would have released after the same `held` bytes; "" in mid-character.

        A special token shows its own text. `begins_text`: it is the first visible token of a text of its own.
        """
        piece = self._pieces[token_id]
        if token_id in self._special:
            return piece.text
        if begins_text and self._strips_space:
            return split_text(piece.data.removeprefix(b" "))[0]
        return split_text(held + piece.data)[0] if held else piece.text

    def _take_hidden(self, data: bytes) -> None:
        start = self._length
        self._waiting.append(_Waiting(self.num_tokens, "", data, self._held, False, start, start))
        self.num_tokens += 1

    def _take(self, data: bytes, text: str, rest: bytes) -> bool:
        """Take a visible token. True when it completes a stop string."""
        held, start = self._held, self._length
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
            text, rest = split_text(data)
        elif held:
            text, rest = split_text(held + data)
        self._held = rest
        self._length += len(text)
        settled = self._length + bool(rest)
        self._waiting.append(_Waiting(self.num_tokens, text, data, held, True, start, settled))
        self.num_tokens += 1
        return self._search(text)

    def _search(self, text: str) -> bool:
        """Look for a stop string that the newest `text` completes, and cut there. True when there was one."""
        match = None if self._matcher is None else self._matcher.feed(text)
        if match is None or self.num_tokens <= self._min_tokens:
            return False
        self.stopped = match.stop
        end = self._length - match.after
        self._cut(end if self._include_stop else end - len(match.stop))
        return True

    def _cut(self, end: int) -> None:
        """Drop the tokens that begin at or after `end`, and trim the one that stands across it.

        No released token reaches beyond, since text is safe only up to the possible beginning of a stop string. A token
        that adds nothing to the text stays if it was settled before the stop string began.
        """
        kept = [token for token in self._waiting if token.start < end]
        for token in kept:
            if token.visible and token.start + len(token.text) >= end:
                token.text = token.text[: end - token.start]
                token.data = _bytes_of(token.text, token.held, token.data)
            token.settled = min(token.settled, end)
        self._waiting = deque(kept)
        self._held = b""
        self._length = end

    def _release(self, safe: int) -> list[TextToken]:
        waiting = self._waiting
        count = 0
        while count < len(waiting) and waiting[count].settled <= safe:
            count += 1
        # A token that only broke off a character shows nothing by itself. It is released with the next that shows text.
        while 0 < count < len(waiting) and waiting[count - 1].visible and not waiting[count - 1].text:
            count -= 1
        return [waiting.popleft().token() for _ in range(count)]


def _bytes_of(text: str, held: bytes, data: bytes) -> bytes:
    """The beginning of `data` that, after `held`, spells `text`: all bytes of its last character, none of the next."""
    for length in range(len(data), -1, -1):
        if (held + data[:length]).decode("utf-8", "replace") == text:
            return data[:length]
    return b""
