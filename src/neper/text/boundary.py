"""Where a prompt ends and a continuation of it begins, in tokens as the model would have written the whole text.

A text is not its parts' tokens one after the other: "is " and "Paris" are together "is" and " Paris". So the end of the
prompt is encoded once more with each continuation. Where that changes the prompt's own last tokens, all continuations
begin at the first token that changes for one of them: only then can they be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from neper.errors import InvalidRequestError
from neper.text.tokenizer import Tokenizer

Kind = Literal["clean", "merged", "separate"]

# Tokens of a prompt that are encoded once more, and how many places are tried for the first of them.
_ENDS = (16, 64, 256)
_TRIES = 16
# A text that continuations are encoded after where the prompt's own end cannot be: a tokenizer may put a space before
# a text, which is none of the continuation's.
_NEUTRAL = "\n"


class Boundary(NamedTuple):
    """The cut between a prompt and its continuations.

    Attributes:
        kind: "clean": the continuations follow the prompt's own tokens. "merged": some change its last ones, so all
            begin with `text`, the prompt's end. "separate": the prompt's ids are not what its text is encoded as, so
            texts are encoded alone.
        position: of the continuations' first token.
        text: the prompt's text from `position` on.
        token_ids: of each continuation, from `position` on.
    """

    kind: Kind
    position: int
    text: str
    token_ids: list[tuple[int, ...]]


def find_boundary(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    continuations: Sequence[str | Sequence[int]],
    *,
    special_tokens: bool = True,
) -> Boundary:
    """Cut a prompt and its continuations; those that are ids follow the prompt as they are.

    Args:
        prompt: one token or more.
        special_tokens: control tokens spelled in continuations become tokens; otherwise they are text.

    Raises:
        InvalidRequestError: a continuation has no tokens, is no text, or merges with the whole prompt.
    """
    texts = [text for text in continuations if isinstance(text, str)]
    start = _readable_end(tokenizer, prompt) if texts else None
    position = len(prompt)
    if start is None:
        alone = tokenizer.encode_after(_NEUTRAL, texts, special_tokens=special_tokens)
        neutral = tokenizer.encode(_NEUTRAL, add_special_tokens=False)
        encoded = iter([ids[_common(neutral, ids) :] for ids in alone])
        kind: Kind = "separate" if texts else "clean"
    else:
        end = list(prompt[start:])
        joint = tokenizer.encode_after(_text(tokenizer, end), texts, special_tokens=special_tokens)
        position = start + min(_common(end, ids) for ids in joint)
        encoded = iter([ids[position - start :] for ids in joint])
        kind = "clean" if position == len(prompt) else "merged"
    if position == 0:
        raise InvalidRequestError(
            "a candidate merges with the whole prompt into other tokens, so nothing is left to score it after",
            param="candidates",
        )
    tail = tuple(prompt[position:])
    found = [tuple(next(encoded)) if isinstance(given, str) else (*tail, *given) for given in continuations]
    for place, (given, ids) in enumerate(zip(continuations, found, strict=True)):
        if not given or not ids:
            raise InvalidRequestError(f"candidates[{place}] has no tokens", param="candidates")
    return Boundary(kind, position, tokenizer.spelled(tail), found)


def _readable_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> int | None:
    """A place shortly before the prompt's end from which on its ids are what their text is encoded as."""
    for length in _ENDS:
        first = max(0, len(prompt) - length)
        for start in range(first, min(first + _TRIES, len(prompt))):
            ids = list(prompt[start:])
            try:
                text = _text(tokenizer, ids)
            except UnicodeDecodeError:
                continue
            if tokenizer.encode(text, add_special_tokens=False) == ids:
                return start
        if first == 0:
            break
    return None


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode_bytes(ids).decode()


def _common(ids: Sequence[int], others: Sequence[int]) -> int:
    """The number of ids that two sequences have in common before they differ."""
    return next((place for place, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1]),
                min(len(ids), len(others)))  # fmt: skip
