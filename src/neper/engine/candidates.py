"""Candidates of a prompt, scored by an engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from neper.candidates import NORMALIZES, Normalize, compare
from neper.engine.arguments import plain
from neper.engine.core import EngineCore
from neper.engine.interface import failure
from neper.errors import InvalidRequestError, NeperError
from neper.text.boundary import Boundary, find_boundary
from neper.text.tokenizer import Tokenizer
from neper.types import FinishReason, Float32Array, Request


@dataclass(frozen=True)
class ScoredCandidate:
    """A possible continuation of a prompt, scored. `rank` and `probability` are among all candidates of the prompt.

    Attributes:
        text: as it was given, or the text of its ids.
        token_ids: what was scored; where candidates merge with the prompt's end, they begin before it (`boundary`).
        logprobs: [n] float32, natural log, one a token.
        logprob, mean_logprob: their total, and their mean.
        rank: 1 + the number of candidates with a strictly greater score.
        probability: its share among the candidates; with "none" exp(logprob).
        boundary: the cut between the prompt and all candidates.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: Float32Array
    logprob: float
    mean_logprob: float
    rank: int
    probability: float
    boundary: Boundary


@dataclass(frozen=True)
class CandidatesRequest:
    """A prompt and candidates, cut into tokens.

    Attributes:
        given: the candidates, as texts or ids.
    """

    request: Request
    given: list[str | list[int]]
    boundary: Boundary


def cut_candidates(
    core: EngineCore,
    tokenizer: Tokenizer,
    request_id: str,
    prompt: list[int],
    candidates: object,
    *,
    special_tokens: bool,
) -> CandidatesRequest:
    """Cut a prompt and its candidates. Nothing is computed.

    Args:
        candidates: checked here: a list of texts or lists of ids.
        special_tokens: control tokens spelled in candidates become tokens.

    Raises:
        InvalidRequestError: they cannot be scored.
    """
    try:
        given = msgspec.convert(plain(candidates), list[str | list[int]])
    except (TypeError, msgspec.ValidationError) as error:
        raise InvalidRequestError(f"candidates must be texts or token ids: {error}", param="candidates") from None
    if not given:
        raise InvalidRequestError("there are no candidates", param="candidates")
    if not prompt:
        raise InvalidRequestError("the prompt is empty", param="prompt")
    boundary = find_boundary(tokenizer, prompt, given, special_tokens=special_tokens)
    request = Request(
        request_id=request_id,
        prompt_token_ids=prompt[: boundary.position],
        candidates=tuple(boundary.token_ids),
    )
    if (problem := core.problem(request)) is not None:
        raise InvalidRequestError(problem)
    return CandidatesRequest(request, given, boundary)


def score_candidates(
    core: EngineCore, tokenizer: Tokenizer, asked: Sequence[CandidatesRequest], normalize: Normalize
) -> list[list[ScoredCandidate] | NeperError]:
    """Score the candidates of each of these, together, with an engine that has nothing else to do.

    A request that fails has its error in place of scores.

    Raises:
        InvalidRequestError: `normalize` is not known.
    """
    if normalize not in NORMALIZES:
        raise InvalidRequestError(f"normalize must be one of {', '.join(NORMALIZES)}", param="normalize")
    found = _scores(core, [one.request for one in asked])
    return [
        scores if isinstance(scores, NeperError) else _compared(tokenizer, one, scores, normalize)
        for one, scores in zip(asked, found, strict=True)
    ]


def _compared(
    tokenizer: Tokenizer, asked: CandidatesRequest, scores: list[Float32Array], normalize: Normalize
) -> list[ScoredCandidate]:
    return [
        ScoredCandidate(
            text=text if isinstance(text, str) else tokenizer.spelled(text),
            token_ids=token_ids,
            logprobs=logprobs,
            **comparison._asdict(),
            boundary=asked.boundary,
        )
        for text, token_ids, logprobs, comparison in zip(
            asked.given, asked.boundary.token_ids, scores, compare(scores, normalize), strict=True
        )
    ]


def _scores(core: EngineCore, requests: list[Request]) -> list[list[Float32Array] | NeperError]:
    """The logprobs of each candidate's tokens, of each request; whatever happens, nothing is left in the engine."""
    found: dict[str, dict[int, Float32Array]] = {request.request_id: {} for request in requests}
    failed: dict[str, NeperError] = {}
    for request in requests:
        core.add(request)
    try:
        while core.has_work:
            for chunk in core.step():
                if chunk.finish_reason is FinishReason.ERROR:
                    failed[chunk.request_id] = failure(chunk)
                found[chunk.request_id] |= {scores.place: scores.logprobs for scores in chunk.candidates}
    finally:
        for request in requests:
            core.abort(request.request_id)
    return [
        failed.get(request.request_id) or [found[request.request_id][place] for place in range(len(request.candidates))]
        for request in requests
    ]
