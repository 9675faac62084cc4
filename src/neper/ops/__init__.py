"""The device math, usable alone: what is computed from logits. `backends` says by which implementation."""

from neper.ops.linear_logprobs import linear_logprobs
from neper.ops.logprobs import token_logprobs, warm_up
from neper.ops.order import greedy_tokens
from neper.ops.results import LogprobBuffers, TokenLogprobs
from neper.ops.sampling import Bias, DrawInputs, Penalties, noise_keys, sample
from neper.ops.token_sets import TokenSets

__all__ = [
    "Bias",
    "DrawInputs",
    "LogprobBuffers",
    "Penalties",
    "TokenLogprobs",
    "TokenSets",
    "greedy_tokens",
    "linear_logprobs",
    "noise_keys",
    "sample",
    "token_logprobs",
    "warm_up",
]
