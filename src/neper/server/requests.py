"""From validated bodies to a generation: prompts to ids, fields to engine requests, all limits checked.

Nothing is started here. Whatever the engine's capabilities do not cover is refused by the field's name.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from neper.engine.interface import Capabilities
from neper.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from neper.server.generation import Choice, Generation, Prompt
from neper.server.protocol import CompletionBody, GenerationBody
from neper.server.service import Service
from neper.types import LogprobParams, Request, SamplingParams

MAX_STOP_STRINGS = 16  # OpenAI's own limit is 4
MAX_STOP_LENGTH = 1000  # characters; each choice builds a matcher of that size
DEFAULT_COMPLETION_TOKENS = 16

# Fields of SamplingParams that engines must honour to be asked for them, as requests name them too. The rest is ours
# (stop strings, texts) or every engine's (max_tokens).
_ENGINE_FIELDS = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
)


async def completion_generation(service: Service, body: CompletionBody, reply_id: str) -> Generation:
    check_logprobs(service.engine.capabilities, "logprobs", body.logprobs)
    prompt_top_k = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_top_k = max(body.logprobs, prompt_top_k or 0)
        _check_prompt_logprobs(service.engine.capabilities, "echo")
    logprobs = LogprobParams(top_k=body.logprobs, prompt_top_k=prompt_top_k)
    sources = _prompt_sources(service, body)
    prompts = []
    for source in sources:
        prompts.append(await _prompt(service, source))
        await asyncio.sleep(0)  # many short texts together would hold up all streams
    return new_generation(
        service,
        body,
        reply_id,
        prompts,
        logprobs,
        body.max_tokens,
        default=DEFAULT_COMPLETION_TOKENS,
        begins_text=False,
    )


def _prompt_sources(service: Service, body: CompletionBody) -> list[str | list[int]]:
    """The prompts of `str | [str] | [int] | [[int]]`, each a text or a list of ids.

    Lengths come first: a body can hold millions of ids, and to look at each would hold up all streams.
    """
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt is empty", param="prompt")
    kind = type(prompt[0])
    if kind is int:
        _check_length(service.engine.capabilities, len(prompt))
    else:
        _check_count(service, len(prompt) * (body.n or 1))
    if any(type(item) is not kind for item in prompt):
        raise InvalidRequestError("prompt mixes texts, ids and lists", param="prompt")
    return [prompt] if kind is int else prompt


def sampling_params(service: Service, body: GenerationBody) -> SamplingParams:
    """The sampling fields of a body, without max_tokens."""
    capabilities = service.engine.capabilities
    values: dict[str, Any] = {name: getattr(body, name) for name in _ENGINE_FIELDS if getattr(body, name) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if body.logit_bias:
        values["logit_bias"] = _logit_bias(body.logit_bias, capabilities.vocab_size)
    if body.stop_token_ids:
        _check_ids(body.stop_token_ids, capabilities.vocab_size, "stop_token_ids")
        values["stop_token_ids"] = tuple(dict.fromkeys(body.stop_token_ids))
    neutral = SamplingParams()
    for name, value in values.items():
        if name not in capabilities.sampling_fields and value != getattr(neutral, name):
            raise UnsupportedError(f"{name} is not supported by this engine", param=name)
    return SamplingParams(
        **values,
        stop=_stop_strings(body.stop),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def new_generation(
    service: Service,
    body: GenerationBody,
    reply_id: str,
    prompts: list[Prompt],
    logprobs: LogprobParams,
    max_tokens: int | None,
    *,
    default: int | None,
    begins_text: bool,
) -> Generation:
    capabilities = service.engine.capabilities
    check_logprobs(capabilities, "prompt_logprobs", body.prompt_logprobs)
    if body.prompt_logprobs is not None:
        _check_prompt_logprobs(capabilities, "prompt_logprobs")
    _check_mode(capabilities, body.logprobs_mode)
    n = body.n or 1
    _check_count(service, len(prompts) * n)
    sampling = sampling_params(service, body)
    choices: list[Choice] = []
    for prompt in prompts:
        limit = _max_tokens(capabilities, prompt, max_tokens, default)
        if sampling.min_tokens > limit:
            raise InvalidRequestError(
                f"min_tokens {sampling.min_tokens} exceeds the {limit} tokens that the reply may have",
                param="min_tokens",
            )
        for place in range(n):
            request = Request(
                request_id=f"{reply_id}-{len(choices)}",
                prompt_token_ids=prompt.token_ids,
                sampling=_with(sampling, limit, place),
                logprobs=logprobs,
                eos_token_ids=service.eos_token_ids,
            )
            choice = Choice(len(choices), prompt, request, service.tokenizer, service.scores, begins_text=begins_text)
            choices.append(choice)
    return Generation(service, choices, num_prompts=len(prompts))


def _with(sampling: SamplingParams, max_tokens: int, place: int) -> SamplingParams:
    """The parameters of a prompt's choice number `place`: each draws from a seed of its own."""
    seed = sampling.seed
    if seed is not None and place:
        seed = (seed + place + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(sampling, max_tokens=max_tokens, seed=seed)


async def _prompt(service: Service, source: str | list[int]) -> Prompt:
    if isinstance(source, str):
        tokenizer = service.tokenizer
        token_ids = await service.encode(source, add_special_tokens=True)
        added_bos = tokenizer.adds_bos and token_ids[:1] == [tokenizer.bos_token_id]
        prompt = Prompt(token_ids, added_bos)
    else:
        _check_length(service.engine.capabilities, len(source))
        _check_ids(source, service.engine.capabilities.vocab_size, "prompt")
        prompt = Prompt(source)
    if not prompt.token_ids:
        raise InvalidRequestError("prompt is empty", param="prompt")
    return prompt


def _max_tokens(capabilities: Capabilities, prompt: Prompt, max_tokens: int | None, default: int | None) -> int:
    limit, length = capabilities.max_model_len, len(prompt.token_ids)
    if max_tokens is not None:
        if length + max_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {length} tokens, which with max_tokens {max_tokens} is {length + max_tokens}: "
                f"more than the model's context of {limit}"
            )
        return max_tokens
    if length >= limit:
        raise ContextLengthError(
            f"the prompt has {length} tokens, which leaves no room in the model's context of {limit}"
        )
    return limit - length if default is None else min(default, limit - length)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(strings)}", param="stop")
    if "" in strings:
        raise InvalidRequestError("a stop string must not be empty", param="stop")
    if max(map(len, strings), default=0) > MAX_STOP_LENGTH:
        raise InvalidRequestError(f"a stop string may have {MAX_STOP_LENGTH} characters", param="stop")
    return strings


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    if len(given) > vocab_size:  # before each is looked at: a body can hold a million
        raise InvalidRequestError(
            f"logit_bias has {len(given)} entries, more than the {vocab_size} tokens", param="logit_bias"
        )
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 20) or (key[0] == "0" and key != "0"):
            raise InvalidRequestError(f"logit_bias: {key!r} is not a token id", param="logit_bias")
    bias = {int(key): value for key, value in given.items()}
    _check_ids(list(bias), vocab_size, "logit_bias")
    return bias


def _check_length(capabilities: Capabilities, length: int) -> None:
    if length > capabilities.max_model_len:
        raise ContextLengthError(
            f"the prompt has {length} tokens, more than the model's context of {capabilities.max_model_len}"
        )


def _check_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(f"{param}: token id {wrong} is not in 0..{vocab_size - 1}", param=param)


def _check_count(service: Service, count: int) -> None:
    limit = service.config.max_choices
    if count > limit:
        raise InvalidRequestError(f"{count} choices (prompts x n) are more than this server's {limit}", param="n")


def check_logprobs(capabilities: Capabilities, param: str, value: int | None) -> None:
    limit = capabilities.max_logprobs
    if value is not None and value > limit >= 0:
        raise InvalidRequestError(f"{param} {value} is more than this server's maximum of {limit}", param=param)


def _check_prompt_logprobs(capabilities: Capabilities, param: str) -> None:
    if not capabilities.prompt_logprobs:
        raise UnsupportedError(f"{param}: this engine does not score prompts", param=param)


def _check_mode(capabilities: Capabilities, mode: str | None) -> None:
    if mode is None or mode == "raw_logprobs":
        return
    if mode not in ("tempered_logprobs", "processed_logprobs"):
        raise InvalidRequestError(f"logprobs_mode {mode!r} is unknown", param="logprobs_mode")
    raise UnsupportedError(f"logprobs_mode {mode!r} is not supported by this server", param="logprobs_mode")
