"""Requests that an engine cannot compute."""

from __future__ import annotations

from neper.engine.interface import Capabilities
from neper.types import LISTED_WHOLE, LOGPROBS_MODES, MAX_CANDIDATES, Request


def request_problem(request: Request, capabilities: Capabilities) -> str | None:
    """The reason why an engine cannot compute a request, or None."""
    vocab, length = capabilities.vocab_size, len(request.prompt_token_ids)
    sampling, logprobs = request.sampling, request.logprobs
    if length == 0:
        return "the prompt is empty"
    if length > capabilities.max_model_len:
        return f"the prompt has {length} tokens, the context {capabilities.max_model_len}"
    if (wrong := _candidates_problem(request, capabilities.max_model_len)) is not None:
        return wrong
    words = [token_id for word in sampling.bad_words for token_id in word]
    if request.prediction_token_ids and not capabilities.speculative:
        return "a prediction needs an engine that drafts: --speculative"
    listed = logprobs.token_ids, logprobs.prompt_logprob_token_ids
    sets = sampling.allowed_token_ids, *listed
    given = request.prompt_token_ids, request.prediction_token_ids, *request.candidates
    for ids in (*given, sampling.logit_bias, sampling.stop_token_ids, words, *sets):
        if ids and not (min(ids) >= 0 and max(ids) < vocab):
            return f"a token id is outside the vocabulary of {vocab}"
    if not all(sampling.bad_words):
        return "a bad word has no tokens"
    if sampling.allowed_token_ids and logprobs.token_ids:
        return "allowed_token_ids and logprob_token_ids exclude each other"
    if any(len(set(ids)) > LISTED_WHOLE for ids in listed):
        return f"up to {LISTED_WHOLE} ids can be named to be listed"
    if logprobs.prompt_logprob_token_ids and logprobs.prompt_top_k is None:
        return "prompt_logprob_token_ids needs prompt_top_k"
    limit = capabilities.max_logprobs
    for top_k in (logprobs.top_k, logprobs.prompt_top_k):
        if top_k is not None and limit >= 0 and not 0 <= top_k <= limit:
            return f"{top_k} alternatives were asked for; 0 to {limit} can be listed"
        if top_k is not None and top_k < -1:
            return f"{top_k} alternatives were asked for; -1 means all"
    if logprobs.mode not in LOGPROBS_MODES:
        return f"mode must be one of {', '.join(LOGPROBS_MODES)}, got {logprobs.mode!r}"
    if logprobs.prompt_start < 1:
        return f"prompt_start must be at least 1, got {logprobs.prompt_start}"
    return sampling.problem()


def _candidates_problem(request: Request, max_model_len: int) -> str | None:
    """The reason why the candidates of a request cannot be scored, ids aside; None where they can."""
    if len(request.candidates) > MAX_CANDIDATES:
        return f"{len(request.candidates)} candidates are more than {MAX_CANDIDATES}"
    for place, candidate in enumerate(request.candidates):
        if not candidate:
            return f"candidate {place} has no tokens"
        if (length := len(request.prompt_token_ids) + len(candidate)) > max_model_len:
            return f"the prompt and candidate {place} have {length} tokens, the context {max_model_len}"
    return None
