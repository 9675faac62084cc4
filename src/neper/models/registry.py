"""The class that computes each model, and the loading of a model."""

from __future__ import annotations

import torch

from neper.errors import ModelLoadError
from neper.models.decoder import Decoder
from neper.models.source import ModelSource
from neper.models.weights import load_gguf, load_weights
from neper.types import Progress

DECODERS: dict[str, type[Decoder]] = {
    "llama": Decoder,
    "mistral": Decoder,
    "qwen2": Decoder,
    "qwen3": Decoder,
}
"""model_type → the class that computes it."""


def load(source: ModelSource, *, dtype: torch.dtype, device: torch.device, progress: Progress | None = None) -> Decoder:
    """A decoder with the source's weights in `dtype` on `device`.

    In float32 a GGUF file's own values are read, since its conversion has them in bfloat16.

    Raises:
        ModelLoadError: the weights do not fit the config, or a file is damaged or gone.
    """

    def make() -> Decoder:
        return DECODERS[source.config.model_type](source.config, dtype=dtype, device=device)

    if source.gguf is not None and dtype == torch.float32:
        if not source.gguf.exists():
            raise ModelLoadError(
                f"{source.gguf} is gone, and float32 needs its own values: the conversion that is kept is bfloat16; "
                "use --dtype bfloat16, or bring the file back"
            )
        return load_gguf(make, source.gguf, progress)
    return load_weights(make, source.config, source.path, progress)
