"""Candidates of a prompt, scored by an engine in this process."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from neper.candidates import NORMALIZES, Normalize, compare
from neper.engine.arguments import plain
from neper.engine.core import EngineCore
from neper.engine.interface import failure
from neper.errors import InvalidRequestError
from neper.text.boundary import Boundary, find_boundary
from neper.text.tokenizer import Tokenizer
from neper.types import FinishReason, Float32Array, Request


@dataclass(frozen=True)
class ScoredCandidate:
    """What may follow a prompt, scored. `rank` and `probability` are among all candidates of the prompt.

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


def score_candidates(
    core: EngineCore,
    tokenizer: Tokenizer,
    request_id: str,
    prompt: list[int],
    candidates: object,
    normalize: Normalize,
    *,
    special_tokens: bool,
) -> list[ScoredCandidate]:
    """Score candidates with an engine that has nothing else to do.

    Args:
        candidates: checked here: a list of texts or lists of ids.
        special_tokens: control tokens spelled in candidates become tokens.
    """
    if normalize not in NORMALIZES:
        raise InvalidRequestError(f"normalize must be one of {', '.join(NORMALIZES)}", param="normalize")
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
    found = _scores(core, request)
    return [
        ScoredCandidate(
            text=text if isinstance(text, str) else tokenizer.spelled(text),
            token_ids=token_ids,
            logprobs=logprobs,
            **comparison._asdict(),
            boundary=boundary,
        )
        for text, token_ids, logprobs, comparison in zip(
            given, boundary.token_ids, found, compare(found, normalize), strict=True
        )
    ]


def _scores(core: EngineCore, request: Request) -> list[Float32Array]:
    """The logprobs of each candidate's tokens; whatever happens, nothing is left in the engine."""
    found: dict[int, Float32Array] = {}
    core.add(request)
    try:
        while core.has_work:
            for chunk in core.step():
                if chunk.finish_reason is FinishReason.ERROR:
                    raise failure(chunk)
                found |= {scores.place: scores.logprobs for scores in chunk.candidates}
    finally:
        core.abort(request.request_id)
    return [found[place] for place in range(len(request.candidates))]
