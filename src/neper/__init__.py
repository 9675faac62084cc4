"""neper: an LLM inference server and library with exact, aligned, nearly free token log-probabilities."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neper.engine.llm import LLM, Completion, TextDelta
    from neper.errors import (
        ConfigError,
        ContextLengthError,
        EngineError,
        InvalidLogitsError,
        InvalidRequestError,
        ModelLoadError,
        NeperError,
        StartupError,
    )
    from neper.ops import LogprobBuffers, TokenLogprobs, TokenSets, linear_logprobs, token_logprobs
    from neper.types import FinishReason, LogprobParams, PackedRows, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "ConfigError",
    "ContextLengthError",
    "EngineError",
    "FinishReason",
    "InvalidLogitsError",
    "InvalidRequestError",
    "LogprobBuffers",
    "LogprobParams",
    "ModelLoadError",
    "NeperError",
    "PackedRows",
    "SamplingParams",
    "StartupError",
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
    "ConfigError": "neper.errors",
    "ContextLengthError": "neper.errors",
    "EngineError": "neper.errors",
    "FinishReason": "neper.types",
    "InvalidLogitsError": "neper.errors",
    "InvalidRequestError": "neper.errors",
    "LogprobBuffers": "neper.ops",
    "LogprobParams": "neper.types",
    "ModelLoadError": "neper.errors",
    "NeperError": "neper.errors",
    "PackedRows": "neper.types",
    "SamplingParams": "neper.types",
    "StartupError": "neper.errors",
    "TextDelta": "neper.engine.llm",
    "TokenLogprobs": "neper.ops",
    "TokenSets": "neper.ops",
    "linear_logprobs": "neper.ops",
    "token_logprobs": "neper.ops",
}


if not TYPE_CHECKING:  # else any name would have a type

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'neper' has no attribute {name!r}")
