"""Kernels compiled before they are needed: which variants, and all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from neper.ops.common.launching import on


class Variants(NamedTuple):
    """Launches that between them compile what serving needs of some kernels.

    Attributes:
        kernels: all that are launched.
        launches: none depends on what another one does, so that they may run at once; those that take longest to
            compile come first.
    """

    kernels: tuple[Any, ...]
    launches: list[Callable[[], Any]]


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
