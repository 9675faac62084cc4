"""The small model that drafts, or the model's own prediction layer: found, checked against the model, and loaded."""

from __future__ import annotations

from dataclasses import replace

from neper.engine import memory
from neper.engine.settings import EngineSettings
from neper.errors import ModelLoadError, StartupError
from neper.models import registry, source, weights
from neper.models.checkpoint import stored_names
from neper.models.decoder import Decoder
from neper.models.predictor import MultiTokenPredictor, predictor_names
from neper.models.source import ModelSource
from neper.text.tokenizer import Tokenizer
from neper.types import Progress


def find(name: str, target: ModelSource, progress: Progress | None) -> ModelSource:
    """The files of a small model, before the model's own weights are read.

    Raises:
        StartupError: they are not there, or its tokens are not the model's.
    """
    try:
        found = source.resolve(name, progress=progress)
        check_vocabulary(found, target)
    except ModelLoadError as error:
        raise StartupError(f"the draft model: {error.message}") from None
    return found


def load(found: ModelSource, chosen: EngineSettings, progress: Progress | None) -> Decoder:
    """The decoder of a small model for these settings of the model's engine.

    Raises:
        StartupError: it cannot be loaded.
    """
    try:
        with memory.needed("the draft model's weights", "free the device, or take a smaller one", chosen.device):
            decoder = registry.load(found, dtype=chosen.dtype, device=chosen.device, progress=progress)
    except ModelLoadError as error:
        raise StartupError(f"the draft model: {error.message}") from None
    decoder.prepare(min(chosen.max_model_len, found.config.max_position_embeddings))
    return decoder


def check_predictor(target: ModelSource) -> None:
    """Raise StartupError where a model's files show that it has no multi-token-prediction layer."""
    try:
        names = stored_names(target.path)
        if names is not None:
            predictor_names(target.config, names)
    except ModelLoadError as error:
        raise StartupError(error.message) from None


def load_predictor(target: Decoder, found: ModelSource, chosen: EngineSettings) -> MultiTokenPredictor:
    """The prediction layer of a model whose decoder is loaded, for these settings of its engine.

    Raises:
        StartupError: it cannot be loaded.
    """
    rows = settings(chosen, target).max_step_tokens
    try:
        with memory.needed("the prediction layer", "free the device, or take --speculative ngram", chosen.device):
            target.keep_residual(chosen.max_step_tokens + chosen.max_num_seqs * (1 + chosen.draft_tokens))
            predictor = weights.load_predictor(target, found.path, rows)
    except ModelLoadError as error:
        raise StartupError(error.message) from None
    predictor.prepare(chosen.max_model_len)
    return predictor


def settings(chosen: EngineSettings, decoder: Decoder) -> EngineSettings:
    """The settings of the engine's steps, for those of what drafts.

    A prediction layer may have the tokens of a step to read, and those that were accepted in the step before.
    """
    return replace(
        chosen,
        max_model_len=min(chosen.max_model_len, decoder.config.max_position_embeddings),
        max_num_batched_tokens=chosen.max_step_tokens + chosen.max_drafts,
        max_logprobs=0,
        scoring="device",
        speculative=None,
        draft_tokens=0,
    )


def check_vocabulary(draft: ModelSource, target: ModelSource) -> None:
    """Raise StartupError unless each id below both models' numbers of logits stands for the same bytes in both."""
    ids = range(min(draft.config.vocab_size, target.config.vocab_size))
    mine, theirs = (Tokenizer.from_directory(model.path) for model in (draft, target))
    different = next((i for i in ids if mine.token_bytes(i) != theirs.token_bytes(i)), None)
    if different is not None:
        raise StartupError(
            f"the draft model has other tokens than the model: {different} is {mine.token_text(different)!r} there and "
            f"{theirs.token_text(different)!r} here; take one of the same family"
        )
