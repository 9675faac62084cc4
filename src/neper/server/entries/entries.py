"""Logprob entries: ids and the texts of their scores become ready-made JSON, for every endpoint.

Each alternative costs only a slice of text: a table has each id's JSON up to its number, `score_texts` makes the
numbers, and one join interleaves them. Methods return elements joined by commas, without the brackets around them. So
the pieces of a stream join to a full reply.

Only an alternative after an unfinished character is decoded by itself, with the bytes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import orjson

from neper.server.entries.score_texts import ScoreText, listed_ids
from neper.text.detokenizer import Detokenizer, TextToken
from neper.text.tokenizer import Tokenizer, token_name


class FragmentTable(dict[int, bytes]):
    """Token id → the JSON text that precedes its number. Ids are added when they first occur."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> bytes:
        fragment = self[token_id] = self._make(token_id)
        return fragment


class LegacyArrays(NamedTuple):
    """Pieces of the four parallel arrays of the completions endpoint."""

    tokens: bytes
    token_logprobs: bytes
    top_logprobs: bytes
    text_offset: bytes

    @staticmethod
    def join(pieces: Sequence[LegacyArrays]) -> LegacyArrays:
        return LegacyArrays(*map(b",".join, zip(*pieces, strict=True))) if pieces else LegacyArrays(b"", b"", b"", b"")


class Entries:
    """Writes entries with one tokenizer's texts. One per server: its tables grow with the ids that occur.

    Methods take the released tokens and their scores (same length), and `k`, the alternatives to list per token. With
    `ids_as_text`, every token's text is `token_id:N`. `begin` is the place of the token that begins a text of its own;
    -1 where none does. Its alternatives drop the same leading space as it does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces
        self._reader = Detokenizer(tokenizer, begins_text=True)
        pieces = self._pieces
        self._chat = FragmentTable(lambda i: _chat_head(pieces[i].text, pieces[i].data))
        self._chat_ids = FragmentTable(lambda i: _chat_head(f"token_id:{i}", pieces[i].data))
        self._legacy = FragmentTable(lambda i: _legacy_key(pieces[i].text, pieces[i].data, b""))
        self._legacy_ids = FragmentTable(lambda i: b',"token_id:%d":' % i)
        self._prompt = FragmentTable(lambda i: _prompt_head(i, pieces[i].text))

    def chat(
        self,
        tokens: Sequence[TextToken],
        scored: Sequence[ScoreText],
        k: int,
        *,
        begin: int = -1,
        ids_as_text: bool = False,
    ) -> bytes:
        """`{token, bytes, logprob, top_logprobs}` of each visible token."""
        table = self._chat_ids if ids_as_text else self._chat
        entries = []
        for place, (token, (words, values)) in enumerate(zip(tokens, scored, strict=True)):
            if not token.visible:
                continue
            token_id, ids = words[0], listed_ids(words, k)
            if ids_as_text:
                head = _chat_head(f"token_id:{token_id}", token.data)
            elif self._is_plain(token_id, token):
                head = table[token_id]
            else:
                head = _chat_head(token.text, token.data)
            head = head[2:]
            if not ids:
                entries.append(b'%b%b,"top_logprobs":[]}' % (head, values[0]))
                continue
            if ids_as_text or not (token.held or place == begin):
                heads = [table[i] for i in ids]
            else:
                heads = [_chat_head(*self._alternative(i, token.held, place == begin)) for i in ids]
            entries.append(b'%b%b,"top_logprobs":[%b}]}' % (head, values[0], _interleave(heads, values[1:])[2:]))
        return b",".join(entries)

    def legacy(
        self,
        tokens: Sequence[TextToken],
        token_ids: Sequence[int],
        scored: Sequence[ScoreText],
        k: int,
        *,
        offset: int,
        begin: int = -1,
        ids_as_text: bool = False,
    ) -> LegacyArrays:
        """The parallel arrays of all tokens, invisible ones too; the first text begins at character `offset`.

        The dict of a token holds its `k` alternatives and itself. `scored` may be shorter than `tokens`: the tokens
        before the first score (the prompt's first token) have null scores.
        """
        table = self._legacy_ids if ids_as_text else self._legacy
        unscored = len(tokens) - len(scored)
        labels, offsets = [], []
        logprobs, tops = [b"null"] * unscored, [b"null"] * unscored
        for place, (token, token_id) in enumerate(zip(tokens, token_ids, strict=True)):
            label = table[token_id] if ids_as_text else self._key(token_id, token)
            labels.append(label[1:-1])
            offsets.append(b"%d" % offset)
            if token.visible:
                offset += len(token.text)
            if place < unscored:
                continue
            words, values = scored[place - unscored]
            logprobs.append(values[0])
            ids = listed_ids(words, k)
            if ids_as_text or not (token.held or place == begin):
                keys = [table[i] for i in ids]
            else:
                keys = [_legacy_key(*self._alternative(i, token.held, place == begin), token.held) for i in ids]
            if token_id in ids:
                # A stop string may have cut the token. Its key is still its text in `tokens`.
                keys[ids.index(token_id)] = label
                values = values[1:]
            else:
                values = [*values[1 : 1 + len(keys)], values[0]]
                keys.append(label)
            if len(set(keys)) != len(keys):
                # A top k comes best first, but a sampled token can be better than all of a set.
                best: dict[bytes, bytes] = {}
                for key, value in zip(keys, values, strict=False):
                    if key not in best or float(value) > float(best[key]):
                        best[key] = value
                keys, values = list(best), list(best.values())
            tops.append(b"{%b}" % _interleave(keys, values)[1:])
        return LegacyArrays(b",".join(labels), b",".join(logprobs), b",".join(tops), b",".join(offsets))

    def prompt(
        self,
        tokens: Sequence[TextToken],
        scored: Sequence[ScoreText],
        k: int,
        *,
        begin: int = -1,
        named: bool = False,
    ) -> bytes:
        """The `prompt_logprobs` list: null, then `{id: {decoded_token, logprob, rank}}`, the actual token first.

        The rank of an alternative is 1 + the number of strictly greater values before it. A top-k list holds all of
        those, and a list of `named` ids does not: theirs is null.
        """
        unscored = len(tokens) - len(scored)
        entries = [b"null"] * unscored
        for place, (token, (words, values)) in enumerate(zip(tokens[unscored:], scored, strict=True), unscored):
            token_id = words[0]
            head = self._prompt[token_id] if self._is_plain(token_id, token) else _prompt_head(token_id, token.text)
            parts = [b'%b%b,"rank":%d}' % (head, values[0], words[1])]
            rank, previous = 1, b""
            for position, (i, value) in enumerate(zip(listed_ids(words, k), values[1:], strict=False), 1):
                # Equal floats have equal text, and different floats different text.
                if value != previous:
                    rank, previous = position, value
                if i == token_id:
                    continue
                if token.held or place == begin:
                    head = _prompt_head(i, self._alternative(i, token.held, place == begin)[0])
                else:
                    head = self._prompt[i]
                parts.append(b'%b%b,"rank":%b}' % (head, value, b"null" if named else b"%d" % rank))
            entries.append(b"{%b}" % b",".join(parts))
        return b",".join(entries)

    def _is_plain(self, token_id: int, token: TextToken) -> bool:
        """True when a token has the text that it has alone: no held bytes, nothing dropped or cut off."""
        piece = self._pieces[token_id]
        return not token.held and token.text == piece.text and token.data == piece.data

    def _key(self, token_id: int, token: TextToken) -> bytes:
        """A sampled token's key, which is also its text in `tokens`."""
        if not token.visible or self._is_plain(token_id, token):
            return self._legacy[token_id]
        return _legacy_key(token.text, token.data, token.held)

    def _alternative(self, token_id: int, held: bytes, begins_text: bool) -> tuple[str, bytes]:
        text = self._reader.alternative_text(token_id, held, begins_text=begins_text)
        data = self._pieces[token_id].data
        if begins_text and self._tokenizer.strips_leading_space and token_id not in self._tokenizer.special_token_ids:
            data = data.removeprefix(b" ")
        return text, data


def _chat_head(text: str, data: bytes) -> bytes:
    """An entry up to its number. It begins with the end of the entry before it, so that one join makes all entries."""
    return b'},{"token":%b,"bytes":%b,"logprob":' % (orjson.dumps(text), orjson.dumps(list(data)))


def _legacy_key(text: str, data: bytes, held: bytes) -> bytes:
    """A token's text, or `bytes:\\xf0\\x9f` (its own bytes) when it leaves a character unfinished or broken.

    Where it only breaks off the character before it, the key is its own text.
    """
    try:
        (held + data).decode()
    except UnicodeDecodeError:
        text = token_name(data)
    return b",%b:" % orjson.dumps(text)


def _prompt_head(token_id: int, text: str) -> bytes:
    return b'"%d":{"decoded_token":%b,"logprob":' % (token_id, orjson.dumps(text))


def _interleave(heads: list[bytes], values: list[bytes]) -> bytes:
    parts = [b""] * (2 * len(heads))
    parts[0::2] = heads
    parts[1::2] = values[: len(heads)]
    return b"".join(parts)
