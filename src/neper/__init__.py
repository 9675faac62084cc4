"""neper: an LLM inference server and library with exact, aligned, nearly free token log-probabilities."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neper.engine.candidates import ScoredCandidate
    from neper.engine.completion import Completion
    from neper.engine.llm import LLM, TextDelta
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
    from neper.score.dataset import score_dataset
    from neper.score.row import ScoredRow
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
    "ScoredCandidate",
    "ScoredRow",
    "StartupError",
    "TextDelta",
    "TokenLogprobs",
    "TokenSets",
    "__version__",
    "linear_logprobs",
    "score_dataset",
    "token_logprobs",
]

# Loaded when first used: torch takes a second to import, and `neper --help` or a client of the types need none of it.
_HOMES = {
    "neper.engine.candidates": ("ScoredCandidate",),
    "neper.engine.completion": ("Completion",),
    "neper.engine.llm": ("LLM", "TextDelta"),
    "neper.errors": (
        "ConfigError",
        "ContextLengthError",
        "EngineError",
        "InvalidLogitsError",
        "InvalidRequestError",
        "ModelLoadError",
        "NeperError",
        "StartupError",
    ),
    "neper.ops": ("LogprobBuffers", "TokenLogprobs", "TokenSets", "linear_logprobs", "token_logprobs"),
    "neper.score.dataset": ("score_dataset",),
    "neper.score.row": ("ScoredRow",),
    "neper.types": ("FinishReason", "LogprobParams", "PackedRows", "SamplingParams"),
}


if not TYPE_CHECKING:  # else any name would have a type

    def __getattr__(name: str) -> Any:
        for home, names in _HOMES.items():
            if name in names:
                return getattr(import_module(home), name)
        raise AttributeError(f"module 'neper' has no attribute {name!r}")
