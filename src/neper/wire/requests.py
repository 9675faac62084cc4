"""GEN lines from our requests, and our requests from GEN lines. ValueError where one cannot express the other."""

from __future__ import annotations

from neper.types import LISTED_WHOLE, LogprobParams, Request, SamplingParams, listed_places
from neper.wire.lines import SAMPLING_KEYS, Gen

_NEUTRAL = SamplingParams()


def gen_of(request: Request, tag: str | None, vocab_size: int) -> Gen:
    """The line that asks an engine for `request`, without neutral values. The caller handles stop ids and strings.

    Raises ValueError where `max_tokens` is None: only the caller knows the rest of the context.
    """
    sampling, top_k = request.sampling, request.logprobs.top_k
    if sampling.max_tokens is None:
        raise ValueError("max_tokens must be a number")
    return Gen(
        prompt_token_ids=request.prompt_token_ids,
        max_new=sampling.max_tokens,
        tag=tag,
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_k=sampling.top_k if sampling.top_k > 0 else None,
        seed=sampling.seed,
        penalty_last_n=-1 if sampling.penalized else None,
        logprobs=None if top_k is None else listed_places(top_k, vocab_size),
        allowed=list(sampling.allowed_token_ids),
        **{
            key: value
            for key, field in SAMPLING_KEYS.items()
            if (value := getattr(sampling, field)) != getattr(_NEUTRAL, field)
        },
    )


def request_of(
    gen: Gen,
    request_id: str,
    *,
    eos_token_ids: tuple[int, ...],
    max_model_len: int,
    max_logprobs: int,
) -> Request:
    """Our engine's request for `gen`.

    Args:
        max_model_len: the engine's context, in tokens.
        max_logprobs: most alternatives that a line may ask for; -1 = any. An allowed set is always listed whole.

    Raises:
        ValueError: our engine cannot do it. The engine itself checks ids and lengths.
    """
    given = {key: value for key in SAMPLING_KEYS if (value := getattr(gen, key)) is not None}
    for key, value in given.items():
        bounds = SamplingParams.bounds()[SAMPLING_KEYS[key]]
        if not bounds.hold(value):
            raise ValueError(f"{key} must be {bounds.text}")
    sampling = SamplingParams(
        max_tokens=gen.max_new,
        temperature=gen.temperature or 0.0,
        top_k=gen.top_k or 0,
        allowed_token_ids=tuple(gen.allowed),
        seed=_signed(gen.seed),
        **{SAMPLING_KEYS[key]: value for key, value in given.items()},
    )
    if sampling.penalized and gen.penalty_last_n is not None and 0 <= gen.penalty_last_n < max_model_len:
        raise ValueError(f"penalty_last_n must be -1, or the context of {max_model_len}: penalties are of all tokens")
    allowed = len(set(gen.allowed))
    top_k = gen.logprobs
    if allowed and top_k is not None:
        # Our engine always lists the whole of a small set, but only the best of a larger one.
        top_k = allowed if allowed > LISTED_WHOLE else 0
    elif top_k is not None and 0 <= max_logprobs < top_k:
        raise ValueError(f"{top_k} alternatives were asked for; 0 to {max_logprobs} can be listed")
    return Request(
        request_id=request_id,
        prompt_token_ids=gen.prompt_token_ids,
        sampling=sampling,
        logprobs=LogprobParams(top_k=top_k),
        eos_token_ids=eos_token_ids,
    )


def _signed(seed: int | None) -> int | None:
    """The same 64 bits with a sign: the line allows a seed without one."""
    return seed - 2**64 if seed is not None and seed >= 2**63 else seed
