"""How kernels are launched: what a device is able to, which one launches go to, and many variants compiled at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Traits:
    """What of a launch depends on the device.

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


class Variants(NamedTuple):
    """Launches that between them compile what serving needs of some kernels.

    Attributes:
        kernels: all that are launched.
        launches: none depends on what another one does, so that they may run at once; those that take longest to
            compile come first.
    """

    kernels: tuple[Any, ...]
    launches: list[Callable[[], Any]]


@cache
def traits(device: torch.device) -> Traits:
    """What `device` is able to."""
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


def compile_all(families: Iterable[Variants], device: torch.device) -> None:
    """Compile all variants at once, in threads: most of a compilation runs outside the interpreter lock."""
    families = list(families)
    # Families take turns, so that what takes longest, the first of each, begins first.
    turns = zip_longest(*(family.launches for family in families))
    launches = [launch for turn in turns for launch in turn if launch is not None]
    if not launches:
        return
    device = torch.empty(0, device=device).device  # with its index
    if device.type == "cpu":
        for launch in launches:
            launch()
        return

    def run(launch: Callable[[], Any]) -> None:
        with on(device):  # which device is the current one is a thread's own affair
            launch()

    with on(device):
        for kernel in (kernel for family in families for kernel in family.kernels):
            # Threads that both find no table of a kernel's variants would each make one, and one of them be lost.
            kernel.device_caches[device.index]
    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(run, launch) for launch in launches]:
            done.result()
    torch.accelerator.synchronize(device)
