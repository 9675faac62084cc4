"""From validated bodies to a generation: prompts to ids, fields to engine requests, all limits checked.

Nothing is started here. Whatever the engine's capabilities do not cover is refused by the field's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from neper.engine.interface import Capabilities
from neper.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from neper.seeds import choice_seed
from neper.server.bodies.completion import CompletionBody, GenerationBody
from neper.server.bodies.structured import constraint_of
from neper.server.choice import Choice, Prompt
from neper.server.fields import ReplyFields
from neper.server.generation import Generation
from neper.server.requests.sampling_fields import check_ids, distinct_ids, sampling_params
from neper.server.service import Service
from neper.text.grammar import Constraint
from neper.text.json_form import JsonForm
from neper.text.message import MessageParser
from neper.text.validated_json import JsonParser
from neper.types import LogprobParams, LogprobsMode, Request

MAX_NAMED_IDS = 128
LONG_LIST = 128
DEFAULT_COMPLETION_TOKENS = 16


async def completion_generation(
    service: Service, body: CompletionBody, reply_id: str, *, as_text: bool = True
) -> Generation:
    """A completion, not started; `as_text`: its scores are read as text."""
    logprobs = logprob_params(service, body, body.logprobs, param="logprobs")
    if body.echo and body.logprobs is not None:
        _check_prompt_scores(service.engine.capabilities, body, "echo")
        longest = _longer(body.logprobs, body.prompt_logprobs)
        logprobs = msgspec.structs.replace(logprobs, prompt_top_k=longest)
    constraint = None
    if body.response_format is not None or body.structured_outputs is not None:  # in a thread: schemas can be large
        constraint = await asyncio.to_thread(constraint_of, body.response_format, body.structured_outputs)
    sources = _prompt_sources(service, body)
    prompts = []
    for source in sources:
        prompts.append(await encode_prompt(service, source))
        await asyncio.sleep(0)  # many short texts together would hold up all streams
    return await new_generation(
        service,
        body,
        reply_id,
        prompts,
        logprobs,
        body.max_tokens,
        default=DEFAULT_COMPLETION_TOKENS,
        begins_text=False,
        as_text=as_text,
        constraint=constraint,
    )


async def table_generation(service: Service, body: CompletionBody, reply_id: str) -> Generation:
    """A completion whose scores are read as arrays."""
    if body.stream:
        raise InvalidRequestError("an Arrow stream has the whole reply: stream must be false", param="stream")
    return await completion_generation(service, body, reply_id, as_text=False)


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


def logprob_params(service: Service, body: GenerationBody, top_k: int | None, *, param: str) -> LogprobParams:
    """The scores that a body asks for, with `top_k` alternatives of generated tokens (None = no scores); `param` is the
    field that says how many.
    """
    capabilities = service.engine.capabilities
    if top_k is not None and capabilities.logprobs is False:
        raise UnsupportedError("logprobs cannot be had: this engine sends no logprobs", param="logprobs")
    check_logprobs(capabilities, param, top_k)
    # The configuration's is one of them too.
    mode = cast("LogprobsMode", body.logprobs_mode or service.config.logprobs_mode)
    if mode not in capabilities.logprobs_modes:
        raise UnsupportedError(f"logprobs_mode {mode!r} is not supported by this engine", param="logprobs_mode")
    if body.prompt_logprobs is not None:
        check_logprobs(capabilities, "prompt_logprobs", body.prompt_logprobs)
        _check_prompt_scores(capabilities, body, "prompt_logprobs")
    token_ids: tuple[int, ...] = ()
    if body.logprob_token_ids is not None:
        token_ids = _named_ids(capabilities, body.logprob_token_ids, "logprob_token_ids")
        if top_k is None:
            raise InvalidRequestError("logprob_token_ids needs logprobs", param="logprob_token_ids")
    prompt_token_ids: tuple[int, ...] = ()
    if body.prompt_logprob_token_ids is not None:
        prompt_token_ids = _named_ids(capabilities, body.prompt_logprob_token_ids, "prompt_logprob_token_ids")
    return LogprobParams(
        top_k=top_k,
        mode=mode,
        token_ids=token_ids,
        prompt_top_k=body.prompt_logprobs,
        prompt_start=body.prompt_start,
        prompt_logprob_token_ids=prompt_token_ids,
    )


async def new_generation(
    service: Service,
    body: GenerationBody,
    reply_id: str,
    prompts: list[Prompt],
    logprobs: LogprobParams,
    max_tokens: int | None,
    *,
    default: int | None,
    begins_text: bool,
    as_text: bool = True,
    constraint: Constraint | None = None,
    parser: Callable[[], MessageParser | JsonParser] | None = None,
    fields: Callable[[], ReplyFields] | None = None,
    prediction: Sequence[int] = (),
) -> Generation:
    """The choices of all prompts, not started.

    Args:
        default: max_tokens where the body gives none; None = the rest of the context.
        begins_text: replies are texts of their own, not the continuation of a prompt's.
        as_text: scores of generated tokens are read as text.
        constraint: what the text must follow.
        parser: makes the parser of a choice's text; None = the text is all content.
        fields: makes what finds a choice's fields; None = they are not wanted.
        prediction: ids of what much of each reply may be.
    """
    capabilities = service.engine.capabilities
    n = body.n or 1
    _check_count(service, len(prompts) * n)
    sampling = await sampling_params(service, body)
    limits = [_max_tokens(capabilities, prompt, max_tokens, default) for prompt in prompts]
    shortest = min(len(prompt.token_ids) for prompt in prompts)
    if logprobs.prompt_start > shortest:
        raise InvalidRequestError(
            f"prompt_logprobs_start {logprobs.prompt_start} is beyond the {shortest} tokens of the prompt",
            param="prompt_logprobs_start",
        )
    if sampling.min_tokens > min(limits):
        raise InvalidRequestError(
            f"min_tokens {sampling.min_tokens} exceeds the {min(limits)} tokens that the reply may have",
            param="min_tokens",
        )
    if constraint is not None:
        grammar = await _grammar(service, body, constraint)
        sampling = msgspec.structs.replace(sampling, grammar=grammar)
    # The first choice of a prompt scores it for all of them, except in a stream, which shows each as it comes.
    others = logprobs
    if not body.stream:
        others = msgspec.structs.replace(logprobs, prompt_top_k=None, prompt_logprob_token_ids=())
    predicted = tuple(prediction)
    choices: list[Choice] = []
    listed = 0
    for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        for place in range(n):
            request = Request(
                request_id=f"{reply_id}-{len(choices)}",
                prompt_token_ids=prompt.token_ids,
                sampling=msgspec.structs.replace(
                    sampling, max_tokens=limit, seed=choice_seed(sampling.seed, number, place)
                ),
                logprobs=others if place else logprobs,
                eos_token_ids=service.eos_token_ids,
                prediction_token_ids=predicted,
            )
            listed += _num_listed(request, capabilities.vocab_size)
            choices.append(
                Choice(
                    len(choices),
                    prompt,
                    request,
                    service.tokenizer,
                    service.scores if as_text else None,
                    begins_text=begins_text,
                    parser=None if parser is None else parser(),
                    fields=None if fields is None else fields(),
                )
            )
    if listed > service.config.max_listed:
        raise InvalidRequestError(
            f"the reply may list {listed} alternatives in all, more than this server's {service.config.max_listed} "
            "(--max-listed): ask for fewer of them, fewer tokens or fewer choices",
            param="prompt_logprobs" if body.prompt_logprobs is not None or logprobs.top_k is None else "logprobs",
        )
    return Generation(
        service.engine,
        service,
        service.metrics,
        choices,
        num_prompts=len(prompts),
        timeout=service.config.request_timeout,
    )


def _num_listed(request: Request, vocab_size: int) -> int:
    """Places of a reply's lists: of all prompt tokens, and of the tokens that may come where the lists are long.

    How many tokens come is not known, and usually far fewer than may: short lists of those are not counted.
    """
    most = 0
    if (places := request.num_listed(vocab_size) or 0) > LONG_LIST:
        most += places * (request.sampling.max_tokens or 0)
    positions = len(request.prompt_token_ids) - request.logprobs.prompt_start + 1
    most += (request.num_prompt_listed(vocab_size) or 0) * positions
    return most


async def json_form(service: Service, body: GenerationBody, constraint: Constraint) -> JsonForm:
    """What a reply's JSON is checked against: what `response_format` says, which is the constraint too. Schemas that
    engines cannot be held to are not taken here either.
    """
    await _checked(service, body, constraint)
    schema = None if body.response_format is None else body.response_format.schema()
    assert schema is not None
    return JsonForm(schema)


async def _grammar(service: Service, body: GenerationBody, constraint: Constraint) -> str:
    """The constraint as engines take it, once it is known to compile."""
    param = body.constrained_by
    if "grammar" not in service.engine.capabilities.sampling_fields:
        raise UnsupportedError(f"{param}: this engine cannot constrain what it samples", param=param)
    return await _checked(service, body, constraint)


async def _checked(service: Service, body: GenerationBody, constraint: Constraint) -> str:
    param = body.constrained_by
    if body.ignore_eos:
        raise InvalidRequestError(
            f"ignore_eos excludes {param}: the reply ends where its form does", param="ignore_eos"
        )
    text = constraint.text()
    await service.trials.check(text, param)
    return text


async def encode_prompt(service: Service, source: str | list[int]) -> Prompt:
    """A prompt of a text or ids. Raises InvalidRequestError for one that is empty, too long or not of the model."""
    if isinstance(source, str):
        tokenizer = service.tokenizer
        token_ids = await service.encode(source, add_special_tokens=True)
        added_bos = tokenizer.adds_bos and token_ids[:1] == [tokenizer.bos_token_id]
        prompt = Prompt(token_ids, added_bos)
    else:
        _check_length(service.engine.capabilities, len(source))
        check_ids(source, service.engine.capabilities.vocab_size, "prompt")
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


def check_messages(service: Service, count: int) -> None:
    """Raises ContextLengthError for more messages than tokens fit, before anything is made of each."""
    limit = service.engine.capabilities.max_model_len
    if count > limit:
        raise ContextLengthError(
            f"the conversation has {count} messages, more than the model's context of {limit} tokens"
        )


def _check_length(capabilities: Capabilities, length: int) -> None:
    if length > capabilities.max_model_len:
        raise ContextLengthError(
            f"the prompt has {length} tokens, more than the model's context of {capabilities.max_model_len}"
        )


def _check_count(service: Service, count: int) -> None:
    limit = service.config.max_choices
    if count > limit:
        raise InvalidRequestError(f"{count} choices (prompts x n) are more than this server's {limit}", param="n")


def check_logprobs(capabilities: Capabilities, param: str, value: int | None) -> None:
    """Raises InvalidRequestError for more alternatives than are listed; -1 stands for all, where there is no cap."""
    limit = capabilities.max_logprobs
    if value is None:
        return
    if value < 0 <= limit:
        raise InvalidRequestError(
            f"{param} {value} (all ids) is more than this server's maximum of {limit}", param=param
        )
    if value > limit >= 0:
        raise InvalidRequestError(f"{param} {value} is more than this server's maximum of {limit}", param=param)
    if value > capabilities.vocab_size:
        raise InvalidRequestError(f"{param} {value} is more than the {capabilities.vocab_size} tokens", param=param)


def _check_prompt_scores(capabilities: Capabilities, body: GenerationBody, param: str) -> None:
    """Raises UnsupportedError where a prompt cannot be scored, or not in the view that the body names.

    A server's own view is of generated tokens: only a request can say that it means its prompt too.
    """
    if not capabilities.prompt_logprobs:
        raise UnsupportedError(f"{param}: this engine does not score prompts", param=param)
    if body.logprobs_mode not in (None, "raw_logprobs"):
        raise UnsupportedError(
            f"logprobs_mode {body.logprobs_mode!r} is not supported with {param}: scores of a prompt are always "
            "raw_logprobs, so ask for them in a request of their own",
            param="logprobs_mode",
        )


def _named_ids(capabilities: Capabilities, given: list[int], param: str) -> tuple[int, ...]:
    if not capabilities.logprob_token_ids:
        raise UnsupportedError(f"{param} is not supported by this engine", param=param)
    token_ids = distinct_ids(given, capabilities.vocab_size, param)
    if len(token_ids) > MAX_NAMED_IDS:
        raise InvalidRequestError(f"{param} may name {MAX_NAMED_IDS} ids, got {len(token_ids)}", param=param)
    return token_ids


def _longer(top_k: int, other: int | None) -> int:
    """The larger of two numbers of alternatives, of which -1 is the largest."""
    return -1 if -1 in (top_k, other) else max(top_k, other or 0)
