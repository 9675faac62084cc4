"""Memory that exists from start to end: every allocation that can fail says what for, how much, and what to lower."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from neper import machine
from neper.errors import StartupError

T = TypeVar("T")


def allocate(
    what: str,
    setting: str,
    *shape: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    pinned: bool = False,
) -> Tensor:
    """A zeroed tensor; see `reserve`. `pinned`: on the host, where a device can copy it by itself."""
    nbytes = math.prod(shape) * dtype.itemsize
    return reserve(
        what,
        setting,
        nbytes,
        lambda: torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned),
        torch.device(device),
    )


def reserve(what: str, setting: str, nbytes: int, make: Callable[[], T], device: torch.device) -> T:
    """What `make` returns.

    Raises:
        StartupError: it found no memory; the message says how much of the `nbytes` for `what` is missing on the device,
            and that lowering `setting` helps.
    """
    try:
        return make()
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_memory(error):
            raise
        free = free_bytes(device)
        missing = (
            f"{machine.format_size(nbytes - free)} are missing"
            if nbytes > free
            else f"{machine.format_size(free)} are free"
        )
        raise StartupError(
            f"no memory for {what}: {machine.format_size(nbytes)} on {device} asked for, {missing}; lower {setting}"
        ) from None


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, what torch keeps at hand for itself included."""
    if device.type != "cuda":
        return machine.available_memory()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _is_memory(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "memory" in text or "alloc" in text
