"""neper: an LLM inference server and library with exact, aligned, nearly free token log-probabilities."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neper.engine.llm import LLM, Completion, TextDelta
    from neper.ops import LogprobBuffers, TokenLogprobs, TokenSets, linear_logprobs, token_logprobs
    from neper.types import FinishReason, LogprobParams, PackedRows, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "FinishReason",
    "LogprobBuffers",
    "LogprobParams",
    "PackedRows",
    "SamplingParams",
    "TextDelta",
    "TokenLogprobs",
    "TokenSets",
    "__version__",
    "linear_logprobs",
    "token_logprobs",
]

# Loaded when first used: torch takes a second to import, and `neper --help` or a client of the types need none of it.
_HOMES = {
    "LLM": "neper.engine.llm",
    "Completion": "neper.engine.llm",
    "FinishReason": "neper.types",
    "LogprobBuffers": "neper.ops",
    "LogprobParams": "neper.types",
    "PackedRows": "neper.types",
    "SamplingParams": "neper.types",
    "TextDelta": "neper.engine.llm",
    "TokenLogprobs": "neper.ops",
    "TokenSets": "neper.ops",
    "linear_logprobs": "neper.ops",
    "token_logprobs": "neper.ops",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'neper' has no attribute {name!r}")
