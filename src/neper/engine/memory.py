"""Memory that exists from start to end: every allocation that can fail says what for, how much, and what to lower."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    free = free_bytes(device)
    try:
        if nbytes > free and device.type == "cpu":
            raise MemoryError  # the system would grant it, and end some process when it is used
        return make()
    except (MemoryError, RuntimeError) as error:
        if not _is_memory(error):
            raise
        missing = (
            f"{machine.format_size(nbytes - free)} are missing"
            if nbytes > free
            else f"{machine.format_size(free)} are free"
        )
        raise StartupError(
            f"no memory for {what}: {machine.format_size(nbytes)} on {device} asked for, {missing}; lower {setting}"
        ) from error


@contextmanager
def needed(what: str, remedy: str, device: torch.device) -> Iterator[None]:
    """What is done inside takes memory that nobody has counted.

    Raises:
        StartupError: there was not enough; the message names `what`, and the `remedy`.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_memory(error):
            raise
        free = machine.format_size(free_bytes(device))
        raise StartupError(f"not enough memory for {what}: {free} are free on {device}; {remedy}") from error


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, what torch keeps at hand for itself included."""
    if device.type != "cuda":
        return machine.available_memory()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _is_memory(error: MemoryError | RuntimeError) -> bool:
    """Whether it is memory that was lacking. What torch raises for pinned memory and on a CPU says so in words only."""
    words = ("out of memory", "can't allocate", "cannot allocate", "not enough memory", "failed to allocate")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(w in str(error).lower() for w in words)


def step_failure(error: Exception) -> str:
    """Words for clients about a step that failed. The log has the error in full; sizes of this machine stay there."""
    if isinstance(error, (MemoryError, RuntimeError)) and _is_memory(error):
        return "the engine ran out of memory in a step; fewer or shorter requests at a time may fit"
    return "the engine failed in a step; its log says why"
