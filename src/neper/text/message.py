"""A message from its text: tokens of content, of reasoning, and of the names and arguments of calls.

    [reasoning tag] reasoning [tag] content [calls] content …

Newlines after a reasoning tag and before the closing one belong to the form, as does the space around calls. Text that
only looks like a call, and a tag in another place, are content. Reasoning holds no calls.
"""

from __future__ import annotations

from collections.abc import Iterable

from neper.text.detokenizer import TextToken
from neper.text.reader import SPACES, Reader, Reading
from neper.text.reasoning import ReasoningTags
from neper.text.token_text import FieldPiece
from neper.text.tools import CallReader, MadeCall, ToolFormat


class MessageParser:
    """One message's fields. `step` takes the tokens of a Detokenizer in order, invisible ones too.

    The pieces do not depend on the grouping of the tokens.

    The pieces of a field join to its text, and their bytes to its bytes. A token without a part in any field (tags,
    the JSON around names and arguments, the end) is in no piece. Arguments are the model's own text.

    Args:
        reasoning: the tags of a model that may reason; None where no reasoning comes.
        opened: the prompt has begun the reasoning.
        tools: the form in which the model writes calls; None where it has no tools.
        reads_calls: False where calls are content, with their tags, as all other text is.
        parallel: there may be more than one call. Otherwise the message ends after the arguments of the first one.

    Attributes:
        reasons: the message may have reasoning.
        end: the number of tokens up to that end of the message, once it is there. Later tokens are not taken.
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningTags | None = None,
        opened: bool = False,
        tools: ToolFormat | None = None,
        parallel: bool = True,
        reads_calls: bool = True,
    ) -> None:
        self.reasons = reasoning is not None
        self.end: int | None = None
        self._reader = Reader()
        self._calls = CallReader(self._reader, tools, single=not parallel) if tools and reads_calls else None
        # Invisible tokens that are no end but a tag, where they stand in a place for it.
        self._call_tags = frozenset(tag.encode() for tag in (tools.tags if tools else ()))
        self._tags = self._call_tags.union(tag.encode() for tag in reasoning or ())
        self._plain = False
        self._message = self._read(reasoning, opened)
        next(self._message)

    @property
    def settled(self) -> int:
        """Number of tokens that are final: all pieces of them were given."""
        return self._reader.settled

    @property
    def num_completed(self) -> int:
        """Calls whose arguments are complete."""
        return 0 if self._calls is None else self._calls.num_completed

    def made(self, call: int) -> MadeCall:
        """The facts about a call besides its name and arguments, once its name was given."""
        return MadeCall() if self._calls is None else self._calls.made[call]

    def step(self, tokens: Iterable[TextToken]) -> list[FieldPiece]:
        """Take the next tokens. Returns the pieces of those that are final now, in order."""
        reader = self._reader
        if self._plain and not reader.num_waiting:
            return self._content_alone(tokens)
        for token in tokens:
            if self.end is not None:
                break
            # In the middle of a character nothing is a tag.
            if not token.visible and not token.held and token.data in self._tags:
                token = token._replace(text=token.data.decode(), visible=True)
            reader.add(token)
            next(self._message)
            if self._calls is not None and self._calls.finished:
                self.end = reader.settled + reader.num_waiting
                reader.drop(reader.length)
        return reader.release(final=self.end is not None)

    def flush(self) -> list[FieldPiece]:
        """The pieces of the tokens that still wait, at the message's end. No call may follow."""
        self._reader.final = True
        if self.end is None:
            next(self._message, None)
        return self._reader.release(final=True)

    def _content_alone(self, tokens: Iterable[TextToken]) -> list[FieldPiece]:
        pieces = []
        for token in tokens:
            self._reader.settled += 1
            if token.visible:
                pieces.append(FieldPiece("content", -1, token))
        return pieces

    def _read(self, reasoning: ReasoningTags | None, opened: bool) -> Reading[None]:
        if reasoning is not None:
            yield from self._reasoning(reasoning, opened)
        self._tags = self._call_tags
        if self._calls is not None:
            yield from self._content(self._calls)
            return
        self._plain = not self._call_tags
        reader = self._reader
        while not reader.final:
            reader.decide("content", -1, reader.length)
            yield
        # One character more, for tokens at the end that spell nothing.
        reader.decide("content", -1, reader.length + 1)

    def _reasoning(self, tags: ReasoningTags, opened: bool) -> Reading[None]:
        reader = self._reader
        if not opened:
            yield from reader.skip()
            if not (yield from reader.literal(tags.open)):
                reader.at = reader.decided
                return
        self._tags = frozenset([tags.close.encode()])
        yield from reader.skip("\n")
        reader.drop(reader.at)
        if (yield from reader.until(tags.close, "reasoning", "\n")):
            yield from reader.literal(tags.close)
            yield from reader.skip("\n")
            reader.drop(reader.at)

    def _content(self, calls: CallReader) -> Reading[None]:
        reader = self._reader
        if calls.form.bare:
            yield from reader.skip()
            found = (yield from reader.peek()) == "{"
        else:
            found = False
        while found or (yield from reader.until(calls.form.opening, "content", SPACES)):
            found = False
            yield from calls.read()
            if reader.decided < reader.at:
                reader.decide("content", -1, reader.at)
            else:
                yield from reader.skip()
                reader.drop(reader.at)
