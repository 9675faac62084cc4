"""Launching kernels: the abilities of a device, and the device that launches go to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class Traits:
    """The parts of a launch that depend on the device.

    Attributes:
        processors: its multiprocessors; the interpreter's CPU counts as a few.
        roomy: a multiprocessor has the shared memory of the data-centre kind (A100, H100 and later).
        pdl: programmatic dependent launch: each kernel starts while the one before it still runs, and waits inside.
        nvidia: options that only this compiler knows can be given.
    """

    processors: int
    roomy: bool = False
    pdl: bool = False
    nvidia: bool = False


@cache
def traits(device: torch.device) -> Traits:
    """The abilities of `device`."""
    if device.type == "cpu":
        return Traits(4)
    if device.type == "xpu":
        return Traits(torch.xpu.get_device_properties(device).max_compute_units // 8)
    nvidia = torch.version.hip is None
    found = torch.cuda.get_device_properties(device)
    return Traits(
        processors=found.multi_processor_count,
        roomy=nvidia and getattr(found, "shared_memory_per_block_optin", 0) > 160_000,
        pdl=nvidia and (found.major, found.minor) >= (9, 0),
        nvidia=nvidia,
    )


def launch_options(device: torch.device, registers: int | None = None) -> dict[str, Any]:
    """PDL, and the options of a launch that depend on the device.

    Args:
        registers: of a thread at most, so that several programs fit a multiprocessor.
    """
    able = traits(device)
    options: dict[str, Any] = {"PDL": able.pdl}
    if able.pdl:
        options["launch_pdl"] = True
    if registers is not None and able.nvidia:
        options["maxnreg"] = registers
    return options


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launch on `device`: Triton launches on the current one, wherever its arguments are."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
