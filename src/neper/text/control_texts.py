"""Control texts: the texts of control tokens, which stay text where a conversation's own words hold them.

A rendered conversation is one text, in which the template's `<|im_end|>` and one that a user typed look alike. So each
text of a control token in a request gets a mark inside it before the template renders. It is then broken in the result,
wherever the template puts it. The template's own control texts are whole, and become tokens.

The text is encoded as one, so that the text on both sides of a border is cut into tokens as usual. A second encoder
over the same model does it. It knows the control tokens by other names, too random to be typed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from neper.text.json_texts import map_texts, texts_of
from neper.text.pieces import PIECE, PieceEncoder, Progress

# Private-use characters: marks are one of the first, random names are made of the others.
_MARKS = range(0xE100, 0xF000)
_NAMES = 0xF0000
_NUMBERS = 0x100000


class ControlTexts:
    """The control tokens of a tokenizer.

    Args:
        backend: the tokenizer proper, which is not changed.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = {token_id: token for token_id, token in added.items() if token.special and token.content}
        self._pattern = re.compile(_any_of([token.content for token in self._special.values()]))
        # Control tokens that are looked for in normalised text are found in other spellings too.
        self._normalizes = backend.normalizer is not None and any(token.normalized for token in self._special.values())
        self._encoder: _Encoder | None = None

    def occur_in(self, value: Any) -> bool:
        """True where a string somewhere in the value holds the text of a control token."""
        if not self._special:
            return False
        for text in texts_of(value):
            if self._pattern.search(text):
                return True
            if self._normalizes and self._pattern.search(self._backend.normalizer.normalize_str(text)):
                return True
        return False

    def marked(self, value: Any) -> tuple[Any, str]:
        """The value with a mark inside every such text, and the mark: a character that the value does not hold."""
        everything = "\0".join(texts_of(value))
        taken = everything.lower()  # the escapes too
        mark = next(mark for mark in map(chr, _MARKS) if mark not in everything and _escaped(mark) not in taken)

        def broken(found: re.Match[str]) -> str:
            return found[0][0] + mark + found[0][1:]

        return map_texts(value, lambda text: self._pattern.sub(broken, text)), mark

    def encode(self, text: str, mark: str, progress: Progress | None = None) -> list[int]:
        """Ids of a text, in which texts with the mark are not control tokens, and the mark itself is dropped.

        Args:
            progress: called repeatedly for a long text with the least number of ids so far. An error from it ends this.
        """
        if self._encoder is None:
            self._encoder = _Encoder(self._backend, self._special)
        return self._encoder.encode(self._pattern, text, mark, progress)


class _Encoder:
    """Encodes control tokens by other names, so that their own names are text."""

    def __init__(self, backend: Backend, special: dict[int, AddedToken]) -> None:
        self._model = backend.model
        # The token for a character outside the vocabulary is special too, but its text is harmless.
        self._special_ids = frozenset(special) - {part.id for part in self._model.tokenize(chr(_NUMBERS))}
        self._backend = copy = Backend(backend.model)  # shares the vocabulary, which is large
        if backend.normalizer is not None:
            copy.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            copy.pre_tokenizer = backend.pre_tokenizer
        secret = "".join(chr(_NAMES + secrets.randbelow(0xFFF0)) for _ in range(8))
        self._names: dict[str, str] = {}
        added = sorted(backend.get_added_tokens_decoder().items())
        tokens = []
        for number, (token_id, token) in enumerate(added):
            name = token.content
            if token_id in special:
                name = self._names[token.content] = secret + chr(_NUMBERS + number)
            tokens.append(
                AddedToken(
                    name,
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized and token_id not in special,
                    special=token.special,
                )
            )
        copy.add_tokens(tokens)
        self._ids = {
            copy.token_to_id(token.content): token_id for token, (token_id, _) in zip(tokens, added, strict=True)
        }

    @cached_property
    def _pieces(self) -> PieceEncoder:
        # Names of bytes and of control tokens are at least as long as their texts.
        return PieceEncoder(self._backend, max(map(len, self._backend.get_vocab())))

    def encode(self, pattern: re.Pattern[str], text: str, mark: str, progress: Progress | None) -> list[int]:
        text = pattern.sub(lambda found: self._names[found[0]], text)
        # A template may have written the mark as an escape.
        text = text.replace(mark, "").replace(_escaped(mark), "")
        if progress is not None and len(text) > 2 * PIECE:
            found = self._pieces.encode(text, progress).tolist()
        else:
            found = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        ids: list[int] = []
        for token_id in found:
            if token_id in self._ids:
                ids.append(self._ids[token_id])
            elif token_id in self._special_ids:
                # The model itself has it among its pieces. Its characters alone are not control tokens.
                spelled = self._backend.id_to_token(token_id) or ""
                ids += [part.id for character in spelled for part in self._model.tokenize(character)]
            else:
                ids.append(token_id)
        return ids


def _escaped(mark: str) -> str:
    return f"\\u{ord(mark):04x}"


def _any_of(texts: Iterable[str]) -> str:
    """A pattern for the longest of these texts at a place.

    Texts with a common beginning share a branch, so that thousands of them cost as little as a few.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        branch = tree
        for character in text:
            branch = branch.setdefault(character, {})
        branch[""] = {}
    return _branches(tree) or r"(?!)"


def _branches(tree: dict[str, Any]) -> str:
    ends = "" in tree
    # A run without a choice is one branch: nesting follows the choices, not the characters.
    options = []
    for character, branch in tree.items():
        if character:
            run = re.escape(character)
            while len(branch) == 1 and "" not in branch:
                [(character, branch)] = branch.items()
                run += re.escape(character)
            options.append(run + _branches(branch))
    if not options:
        return ""
    return f"(?:{'|'.join(options)})" + ("?" if ends else "")
