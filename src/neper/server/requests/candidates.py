"""From a body to the scoring of its candidates: ids of prompt and candidates, all limits checked, one request."""

from __future__ import annotations

from neper.errors import ContextLengthError, InvalidRequestError, UnsupportedError
from neper.server.bodies.candidates import CandidatesBody
from neper.server.choice import Prompt
from neper.server.generation import Generation
from neper.server.requests.chat import chat_prompt
from neper.server.requests.generation import encode_prompt
from neper.server.requests.sampling_fields import check_ids
from neper.server.scoring import Scoring
from neper.server.service import Service
from neper.text.boundary import Boundary, find_boundary
from neper.types import LogprobParams, Request, SamplingParams

# Characters of the prompt's end, which are encoded with each candidate.
END_CHARACTERS = 100


async def start_scoring(service: Service, body: CandidatesBody, reply_id: str) -> tuple[Generation, Scoring]:
    """The candidates of a body as the one choice of a generation, not started."""
    limit = service.config.max_candidates
    if len(body.candidates) > limit:
        raise InvalidRequestError(
            f"{len(body.candidates)} candidates are more than this server's {limit} (--max-candidates)",
            param="candidates",
        )
    for candidate in body.candidates:
        if not isinstance(candidate, str):
            check_ids(candidate, service.engine.capabilities.vocab_size, "candidates")
    special_tokens = True
    if body.prompt is not None:
        prompt = await encode_prompt(service, body.prompt)
    else:
        prompt = Prompt(await chat_prompt(service, body.conversation()))
        special_tokens = service.config.special_tokens_in_messages
    if not prompt.token_ids:
        raise InvalidRequestError("the chat template makes no prompt of these messages", param="messages")
    size = sum(END_CHARACTERS + len(candidate) for candidate in body.candidates if isinstance(candidate, str))
    boundary = await service.run(
        size,
        lambda: find_boundary(service.tokenizer, prompt.token_ids, body.candidates, special_tokens=special_tokens),
    )
    _check_lengths(service, boundary)
    request = _request(service, prompt, boundary, f"{reply_id}-0")
    scoring = Scoring(prompt, request, service.tokenizer, service.scores, boundary)
    generation = Generation(
        service.engine, service, service.metrics, [scoring], num_prompts=1, timeout=service.config.request_timeout
    )
    return generation, scoring


def _check_lengths(service: Service, boundary: Boundary) -> None:
    capabilities = service.engine.capabilities
    lengths = [len(token_ids) for token_ids in boundary.token_ids]
    longest = max(lengths)
    if (whole := boundary.position + longest) > capabilities.max_model_len:
        raise ContextLengthError(
            f"candidates[{lengths.index(longest)}] has {longest} tokens, which with the prompt's {boundary.position} "
            f"is {whole}: more than the model's context of {capabilities.max_model_len}",
            param="candidates",
        )
    if (total := sum(lengths)) > service.config.max_listed:
        raise InvalidRequestError(
            f"the candidates have {total} tokens in all, more than this server's {service.config.max_listed} "
            "(--max-listed)",
            param="candidates",
        )


def _request(service: Service, prompt: Prompt, boundary: Boundary, request_id: str) -> Request:
    shared = prompt.token_ids[: boundary.position]
    capabilities = service.engine.capabilities
    if capabilities.candidates:
        return Request(
            request_id=request_id,
            prompt_token_ids=shared,
            candidates=tuple(boundary.token_ids),
        )
    if "allowed_token_ids" not in capabilities.sampling_fields or capabilities.logprobs is False:
        raise UnsupportedError("candidates cannot be scored: this engine sends no logprobs", param="candidates")
    for place, token_ids in enumerate(boundary.token_ids):
        if len(token_ids) > 1:
            raise UnsupportedError(
                f"candidates[{place}] has {len(token_ids)} tokens: this engine scores candidates of one token alone",
                param="candidates",
            )
    return Request(
        request_id=request_id,
        prompt_token_ids=shared,
        sampling=SamplingParams(
            temperature=0.0,
            max_tokens=1,
            allowed_token_ids=tuple(dict.fromkeys(token_id for [token_id] in boundary.token_ids)),
        ),
        logprobs=LogprobParams(top_k=0),
        eos_token_ids=service.eos_token_ids,
    )
