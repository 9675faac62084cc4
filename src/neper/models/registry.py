"""Which class computes which model, and how one is loaded."""

from __future__ import annotations

import torch

from neper.models.decoder import Decoder
from neper.models.source import ModelSource
from neper.models.weights import load_weights
from neper.types import Progress

DECODERS: dict[str, type[Decoder]] = {
    "llama": Decoder,
    "mistral": Decoder,
    "qwen2": Decoder,
    "qwen3": Decoder,
}
"""model_type → the class that computes it."""


def load(source: ModelSource, *, dtype: torch.dtype, device: torch.device, progress: Progress | None = None) -> Decoder:
    """A decoder with the source's weights in `dtype` on `device`; ModelLoadError where they do not fit its config."""
    decoder = DECODERS[source.config.model_type](source.config, dtype=dtype, device=device)
    load_weights(decoder, source.path, progress)
    return decoder
