"""The memory that a step's inputs travel in: one flat int32 buffer, laid out on the host and copied at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neper.engine import memory

Array = npt.NDArray[Any]
Place = tuple[int, tuple[int, ...]]

_FLOATS = frozenset({"temperature", "top_p", "min_p"})


@dataclass(frozen=True)
class Layout:
    """Where each field of a step lies, in words.

    The rows come first, so that their places depend on their number alone: what is captured for so many rows is
    replayed after steps of any number of tokens. What a decode step has comes before what only other steps have, so a
    captured forward finds its inputs whatever else is in the step.

    Attributes:
        rows: rows that get a next token. tokens: flat tokens. seqs: sequences. targets: scored prompt positions.
        tiles: tiles of longer chunks. width: blocks in the longest block table.
    """

    rows: int
    tokens: int
    seqs: int
    targets: int = 0
    tiles: int = 0
    width: int = 1

    def places(self) -> dict[str, Place]:
        """Name → first word and shape."""
        rows, tokens = (self.rows,), (self.tokens,)
        shapes: dict[str, tuple[int, ...]] = {
            "hidden_rows": rows,
            "slots": rows,
            "offsets": rows,
            "listed": rows,
            "temperature": rows,
            "top_p": rows,
            "min_p": rows,
            "top_k": rows,
            "keys": (self.rows, 2),
            "token_ids": tokens,
            "positions": tokens,
            "slot_mapping": tokens,
            "context_lens": (self.seqs,),
            "table_stride": (1,),
            "block_tables": (self.seqs, self.width),
            "targets": (self.targets,),
            "tiles": (self.tiles, 3),
        }
        places: dict[str, Place] = {}
        begin = 0
        for name, shape in shapes.items():
            places[name] = (begin, shape)
            begin += math.prod(shape)
        places["end"] = (begin, ())
        return places


class InputBuffers:
    """Two buffers on the host, filled in turn, and the one on the device that they are copied to.

    On a CPU the device's buffer is the host's.
    """

    def __init__(self, capacity: Layout, device: torch.device) -> None:
        words, _ = capacity.places()["end"]
        setting = "max_num_batched_tokens, max_num_seqs or max_model_len"
        self._on_device = None
        if device.type != "cpu":
            self._on_device = memory.allocate("step inputs", setting, words, dtype=torch.int32, device=device)
        self._on_host = [
            memory.allocate("step inputs", setting, words, dtype=torch.int32, pinned=device.type != "cpu")
            for _ in range(2)
        ]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._current = 0

    def next_arrays(self, places: dict[str, Place]) -> dict[str, Array]:
        """The host's arrays of a step, to be filled; they hold what an earlier step left there."""
        self._current = 1 - self._current
        copied = self._copied[self._current]
        if copied is not None and not copied.query():  # type: ignore[no-untyped-call]
            copied.synchronize()  # two steps ago, so mostly long done
        flat = self._on_host[self._current].numpy()
        arrays: dict[str, Array] = {}
        for name, (begin, shape) in places.items():
            if name != "end":
                array = flat[begin : begin + math.prod(shape)].reshape(shape)
                arrays[name] = array.view(np.float32) if name in _FLOATS else array
        return arrays

    def send(self, places: dict[str, Place]) -> dict[str, Tensor]:
        """Start the copy of what `next_arrays` gave; returns the fields on the device."""
        end, _ = places["end"]
        host = self._on_host[self._current]
        if self._on_device is None:
            return fields(host, places)
        self._on_device[:end].copy_(host[:end], non_blocking=True)
        copied = self._copied[self._current] or torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._copied[self._current] = copied
        return self.fields(places)

    def fields(self, places: dict[str, Place]) -> dict[str, Tensor]:
        """The fields of such a step on the device."""
        return fields(self._on_host[self._current] if self._on_device is None else self._on_device, places)


def fields(flat: Tensor, places: dict[str, Place]) -> dict[str, Tensor]:
    """Views of a flat int32 tensor, by name."""
    views: dict[str, Tensor] = {}
    for name, (begin, shape) in places.items():
        if name != "end":
            view = flat[begin : begin + math.prod(shape)].view(shape)
            views[name] = view.view(torch.float32) if name in _FLOATS else view
    return views


def to_device(array: Array, device: torch.device) -> Tensor:
    """A host array on the device, without waiting for it: what has no place in the buffers."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
