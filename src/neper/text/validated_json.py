"""Validated JSON: a message whose content must be JSON, from an engine that cannot be held to a grammar.

Models put their JSON into a fence, or a sentence before it. Only the JSON becomes the content. The tokens that spell it
keep their places, and those at its two ends are cut to it.
"""

from __future__ import annotations

from collections.abc import Iterable

from neper.errors import EngineError
from neper.text.detokenizer import TextToken
from neper.text.json_form import JsonForm
from neper.text.message import MessageParser
from neper.text.token_text import FieldPiece, TokenText
from neper.text.tools import MadeCall


class JsonParser:
    """A parser with the interface of MessageParser, whose content becomes the JSON in it.

    Content is not known before its end, so it is held back until then, with everything after it. Reasoning before it is
    not held back. A reply with calls keeps its content.

    Attributes:
        problem: the reason why there is no such JSON, after `flush`. The content is then the model's own text.
    """

    def __init__(self, parser: MessageParser, form: JsonForm) -> None:
        self.problem: EngineError | None = None
        self._parser = parser
        self._form = form
        self._free = False
        self._held: list[FieldPiece] = []
        self._first: int | None = None  # the token in which the held content begins

    @property
    def reasons(self) -> bool:
        return self._parser.reasons

    @property
    def end(self) -> int | None:
        return self._parser.end

    @property
    def num_completed(self) -> int:
        return self._parser.num_completed

    @property
    def settled(self) -> int:
        return self._parser.settled if self._first is None else self._first

    def made(self, call: int) -> MadeCall:
        return self._parser.made(call)

    def keep(self) -> None:
        """Keep the content as it is, JSON or not, since it was cut off."""
        self._free = True

    def step(self, tokens: Iterable[TextToken]) -> list[FieldPiece]:
        return self._take(self._parser.step(tokens))

    def flush(self) -> list[FieldPiece]:
        """The last pieces, as MessageParser gives them. It may take a while: see JsonForm.find."""
        pieces = self._take(self._parser.flush())
        if not self._free:
            pieces += self._json()
            self._first = None
        return pieces

    def _take(self, pieces: list[FieldPiece]) -> list[FieldPiece]:
        """The pieces that can be given now."""
        if self._free or any(piece.call >= 0 for piece in pieces):
            self._free = True
            given, self._held, self._first = self._held + pieces, [], None
            return given
        if self._first is not None:
            self._held += pieces
            return []
        self._first = next((piece.token.index for piece in pieces if piece.field == "content"), None)
        if self._first is None:
            return pieces
        # A token that is content in part waits as a whole.
        self._held = [piece for piece in pieces if piece.token.index >= self._first]
        return pieces[: len(pieces) - len(self._held)]

    def _json(self) -> list[FieldPiece]:
        content = [piece.token for piece in self._held if piece.field == "content"]
        try:
            start, end = self._form.find("".join([token.text for token in content]))
        except EngineError as error:
            self.problem = error
            return self._held
        pieces = [piece for piece in self._held if piece.field != "content"]
        place = 0
        for token in content:
            first, place = place, place + len(token.text)
            if start <= first and place < end:
                pieces.append(FieldPiece("content", -1, token))
            elif first < end and place > start:
                pieces += _cut(token, start - first, end - first)
        return pieces


def _cut(token: TextToken, start: int, end: int) -> list[FieldPiece]:
    """The token's part in a stretch of its text, whose ends are ASCII characters."""
    held = token.held
    if held and not (held + token.data).decode("utf-8", "replace").startswith(token.text):
        held = b""  # the character that it completed was cut off before
    text = TokenText()
    text.add(token._replace(held=held))
    text.drop(start)
    text.decide("content", -1, end)
    return [piece._replace(token=piece.token._replace(held=token.held)) for piece in text.release(final=True)]
