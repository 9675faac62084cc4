"""The device math, usable alone: what is computed from logits, and by which implementation.

Every op has one public function here; the implementation is chosen by device in this file and nowhere else. Today the
plain-torch reference serves all devices.
"""

from neper.ops.reference import TokenLogprobs, greedy_tokens, token_logprobs
from neper.ops.sampling import Bias, DrawInputs, Penalties, noise_keys, sample

IMPLEMENTATIONS = {"attention": "reference", "scoring": "reference"}
"""Which implementation serves each op family, for `neper doctor` and the start-up log."""

__all__ = [
    "IMPLEMENTATIONS",
    "Bias",
    "DrawInputs",
    "Penalties",
    "TokenLogprobs",
    "greedy_tokens",
    "noise_keys",
    "sample",
    "token_logprobs",
]
