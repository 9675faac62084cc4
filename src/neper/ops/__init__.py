"""The device math, usable alone: what is computed from logits. `backends` hands out the implementations."""

from neper.ops.buffers import LogprobBuffers
from neper.ops.common.order import greedy_tokens
from neper.ops.linear_logprobs import linear_logprobs
from neper.ops.logprobs.api import TokenLogprobs
from neper.ops.logprobs.partials import (
    PartialLogprobs,
    finish_partials,
    merge_partials,
    partial_logprobs,
    target_logits,
)
from neper.ops.logprobs.token_sets import TokenSets
from neper.ops.sampling.api import Bias, DrawInputs, Masks, Penalties
from neper.ops.sampling.reference import noise_keys, processed_logits, sample
from neper.ops.token_logprobs import token_logprobs, warm_up
from neper.ops.views import view_logprobs

__all__ = [
    "Bias",
    "DrawInputs",
    "LogprobBuffers",
    "Masks",
    "PartialLogprobs",
    "Penalties",
    "TokenLogprobs",
    "TokenSets",
    "finish_partials",
    "greedy_tokens",
    "linear_logprobs",
    "merge_partials",
    "noise_keys",
    "partial_logprobs",
    "processed_logits",
    "sample",
    "target_logits",
    "token_logprobs",
    "view_logprobs",
    "warm_up",
]
