"""The model and the device that a benchmark measures, chosen from its options."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neper.config import EngineConfig
from neper.engine import settings
from neper.errors import StartupError

DEFAULT_SHAPE = "qwen3-4b"


@dataclass(frozen=True)
class Subject:
    """A model on a device.

    Attributes:
        model: as `neper serve` takes it; None = the default model.
        shape: a real model's shape, with random weights; None = the model's own.
    """

    model: str | None
    shape: str | None
    device: torch.device
    dtype: torch.dtype

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def card(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.on_gpu else "CPU"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def describe(self, name: str) -> str:
        """The model under this name, for people."""
        return f"{name}{', random weights' if self.shape else ''}, {self.dtype_name}"


def choose(
    command: str,
    *,
    model: str | None = None,
    shape: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    default_shape: str = DEFAULT_SHAPE,
) -> Subject:
    """The subject of a command's options; `default_shape` where there is a GPU and no model was named.

    Raises:
        StartupError: options that do not go together, or that the machine cannot meet.
    """
    if model is not None and shape is not None:
        raise StartupError(f"{command}: give --model or --shape, not both")
    config = EngineConfig(device=device, dtype=dtype)
    target = settings.choose_device(config.device)
    kind = getattr(torch, config.dtype) if config.dtype else settings.choose_dtype(target)
    if model is None and shape is None and target.type == "cuda":
        shape = default_shape
    return Subject(model, shape, target, kind)
