"""The views: of which distribution the scores are. Joins what sampling edits with the reduction that scores it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from neper.errors import InvalidRequestError
from neper.ops.logprobs.api import TokenLogprobs
from neper.ops.sampling.api import Bias, DrawInputs, Masks, Penalties
from neper.ops.sampling.reference import processed_logits
from neper.ops.token_logprobs import check_logits, token_logprobs
from neper.types import LOGPROBS_MODES, LogprobsMode


def view_logprobs(
    mode: LogprobsMode,
    logits: Tensor,
    token_ids: Tensor | None,
    top_k: int = 0,
    *,
    penalties: Penalties | None = None,
    bias: Bias | None = None,
    masks: Masks | None = None,
    draws: DrawInputs | None = None,
    temperature: Tensor | None = None,
    **options: Any,
) -> TokenLogprobs:
    """token_logprobs of logits [N, V] in the view `mode`.

    Args:
        penalties, bias, draws: what `sample` was given, by rows of `logits`. The processed view alone reads them.
        temperature: [R] float32, of the rows that are scored; below 1e-5 = greedy. The raw view does not read it.
        options: the other arguments of token_logprobs.

    Raises:
        InvalidRequestError: on an unknown mode, and as token_logprobs does.
    """
    modes = LOGPROBS_MODES
    if not isinstance(mode, str) or mode not in modes:
        raise InvalidRequestError(
            f"logprobs_mode must be {', '.join(modes[:-1])} or {modes[-1]}"
            + (f", got {mode!r}" if isinstance(mode, str) else ""),
            param="logprobs_mode",
        )
    if mode == "tempered_logprobs" and temperature is None:
        raise InvalidRequestError("tempered_logprobs needs a temperature per row", param="temperature")
    check_logits(logits)
    if mode == "processed_logprobs":
        logits = processed_logits(logits, penalties=penalties, bias=bias, masks=masks, draws=draws)
    return token_logprobs(
        logits, token_ids, top_k, temperature=None if mode == "raw_logprobs" else temperature, **options
    )
