"""The ends of a reply: every token that a model was trained to stop at, and the places that name it.

Files of a model seldom agree: a chat model's config.json may still name its base model's end, while its tokenizer names
the chat's. All of them count. The chat template's own end counts if it is a control token. A base model does not write
such a token in running text, so its completions stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from neper.text.tokenizer import Tokenizer


def reply_ends(tokenizer: Tokenizer, named: Mapping[str, Iterable[int]]) -> dict[int, list[str]]:
    """Ids that end a reply, in the order in which they are found, each with the places that name it.

    Args:
        named: place (a file of the model's) -> the ids that it names.
    """
    places: list[tuple[str, Iterable[int]]] = list(named.items())
    if tokenizer.eos_token_id is not None:
        places.append(("tokenizer", [tokenizer.eos_token_id]))
    end = tokenizer.chat_end()
    if end is not None:
        places.append(("chat template", [end]))
    ends: dict[int, list[str]] = {}
    for place, ids in places:
        for token_id in ids:
            found = ends.setdefault(token_id, [])
            if place not in found:
                found.append(place)
    return ends


def describe_ends(tokenizer: Tokenizer, ends: Mapping[int, Iterable[str]]) -> str:
    """One line for the log."""
    if not ends:
        return "no token ends a reply: the model names none, so replies end at their length"
    told = [
        f"{tokenizer.token_text(token_id) or 'no text'!r} ({token_id}, {', '.join(places)})"
        for token_id, places in ends.items()
    ]
    return f"a reply ends at {', '.join(told)}"
