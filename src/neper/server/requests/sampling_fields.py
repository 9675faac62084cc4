"""The sampling fields of a body as SamplingParams: words and ids checked, and whether anything is left to sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from neper.errors import InvalidRequestError, UnsupportedError
from neper.server.bodies.completion import GenerationBody
from neper.server.service import Service
from neper.text.tokenizer import Tokenizer
from neper.types import SamplingParams

MAX_STOP_STRINGS = 16  # OpenAI's own limit is 4
MAX_STOP_LENGTH = 1000  # characters; each choice builds a matcher of that size
ENCODE_CALL = 20  # characters whose encoding takes as long as a call does

# Fields of SamplingParams that requests spell as it does: those with bounds, and these. max_tokens has other names too.
_PLAIN_FIELDS = (*(name for name in SamplingParams.bounds() if name != "max_tokens"), "ignore_eos")


async def sampling_params(service: Service, body: GenerationBody) -> SamplingParams:
    """The sampling fields of a body, without max_tokens and grammar."""
    capabilities = service.engine.capabilities
    vocab_size = capabilities.vocab_size
    # What engines must honour to be asked for it. The rest is ours (stop strings) or every engine's (max_tokens).
    values: dict[str, Any] = {name: getattr(body, name) for name in _PLAIN_FIELDS if getattr(body, name) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if body.logit_bias:
        values["logit_bias"] = _logit_bias(body.logit_bias, vocab_size)
    if body.stop_token_ids:
        values["stop_token_ids"] = distinct_ids(body.stop_token_ids, vocab_size, "stop_token_ids")
    if body.allowed_token_ids:
        values["allowed_token_ids"] = distinct_ids(body.allowed_token_ids, vocab_size, "allowed_token_ids")
    if body.bad_words:
        words = body.bad_words
        size = 2 * sum(len(word) + ENCODE_CALL for word in words)
        values["bad_words"] = await service.run(size, lambda: _bad_words(words, service.tokenizer, vocab_size))
    neutral = SamplingParams()
    for name, value in values.items():
        if name not in capabilities.sampling_fields and value != getattr(neutral, name):
            raise UnsupportedError(f"{name} is not supported by this engine", param=name)
    sampling = SamplingParams(
        **values,
        stop=_stop_strings(body.stop),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    _check_what_is_left(sampling, service.eos_token_ids, vocab_size)
    return sampling


def distinct_ids(token_ids: list[int], vocab_size: int, param: str) -> tuple[int, ...]:
    """The ids, each once. Raises InvalidRequestError for one that the logits do not have."""
    if len(token_ids) > vocab_size:  # before each is looked at: a body can hold millions
        raise InvalidRequestError(
            f"{param} has {len(token_ids)} entries, more than the {vocab_size} tokens", param=param
        )
    check_ids(token_ids, vocab_size, param)
    return tuple(dict.fromkeys(token_ids))


def check_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            f"{param}: token id {wrong} is outside the model's {vocab_size} ids, 0 to {vocab_size - 1}", param=param
        )


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    if len(given) > vocab_size:  # before each is looked at: a body can hold a million
        raise InvalidRequestError(
            f"logit_bias has {len(given)} entries, more than the {vocab_size} tokens", param="logit_bias"
        )
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 20) or (key[0] == "0" and key != "0"):
            raise InvalidRequestError(f"logit_bias: {key!r} is not a token id", param="logit_bias")
    bias = {int(key): value for key, value in given.items()}
    check_ids(list(bias), vocab_size, "logit_bias")
    return bias


def _bad_words(words: list[str], tokenizer: Tokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The ids of each word, as it begins a text and as it follows a space: two ways to the same letters."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not tokenizer.encode(word, add_special_tokens=False):
            raise InvalidRequestError(f"bad_words: {word!r} is no token of this model", param="bad_words")
        for text in (word, " " + word):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    # A tokenizer can have ids that the logits have not: what cannot come needs no ban.
    return tuple(token_ids for token_ids in found if max(token_ids) < vocab_size)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(strings)}", param="stop")
    if "" in strings:
        raise InvalidRequestError("a stop string must not be empty", param="stop")
    if max(map(len, strings), default=0) > MAX_STOP_LENGTH:
        raise InvalidRequestError(f"a stop string may have {MAX_STOP_LENGTH} characters", param="stop")
    return strings


def _check_what_is_left(sampling: SamplingParams, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Bans of single ids must leave one. What sequences and grammars leave, the engine alone can tell."""
    banned = {words[0] for words in sampling.bad_words if len(words) == 1}
    if sampling.min_tokens > 0:
        banned.update(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            banned.update(eos_token_ids)
    if not banned:
        return
    if sampling.allowed_token_ids:
        param, empty = "allowed_token_ids", banned.issuperset(sampling.allowed_token_ids)
    else:
        param = "bad_words" if sampling.bad_words else "stop_token_ids"
        empty = sum(token_id < vocab_size for token_id in banned) == vocab_size
    if empty:
        raise InvalidRequestError(
            f"{param}: no token is left to sample once those of bad_words are taken out, and before min_tokens those "
            "that end the reply",
            param=param,
        )
