"""The memory that a step's inputs travel in: one flat int32 buffer, laid out on the host and copied at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neper.engine import memory
from neper.engine.step.row_parameters import ROW_PARAMETERS
from neper.ops.attention.parts import ITEM_WORDS
from neper.ops.sampling.api import DrawRows

Array = npt.NDArray[Any]
Field = TypeVar("Field")
Other = TypeVar("Other")

_KEPT_LAYOUTS = 64

_DTYPES = {name: parameter.dtype for name, parameter in ROW_PARAMETERS.columns().items()}


class Place(NamedTuple):
    """Where a field lies in the buffer.

    Attributes:
        begin, end: its first word, and the one after its last.
        dtype: of its values on the host, 32 bits each.
    """

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: type[np.generic]

    def array(self, flat: Array) -> Array:
        """The field in the host's buffer."""
        words = flat[self.begin : self.end]
        array = words if self.dtype is np.int32 else words.view(self.dtype)
        return array if len(self.shape) == 1 else array.reshape(self.shape)

    def tensor(self, flat: Tensor) -> Tensor:
        """The field in the device's buffer: float32 or int32."""
        words = flat[self.begin : self.end]
        tensor = words.view(torch.float32) if self.dtype is np.float32 else words
        return tensor if len(self.shape) == 1 else tensor.view(self.shape)


@dataclass(frozen=True)
class RowFields(DrawRows[Field]):
    """The fields of the rows that get a next token: how each is drawn, and these.

    Attributes:
        hidden_rows: the row's place in the step's hidden states.
        slots: of its sequence.
        offsets: the first of its packed words; -1 where nothing is packed.
        listed: places of its list; -1 where it is packed without scores.
    """

    hidden_rows: Field
    slots: Field
    offsets: Field
    listed: Field


@dataclass(frozen=True)
class StepFields(RowFields[Field]):
    """All fields of a step: as places, as arrays of the host, or as tensors of the device.

    Attributes:
        token_ids, positions, slot_mapping: of each token.
        context_lens, block_tables: of each sequence.
        table_stride: words of a block table.
        num_items, items: see AttentionInputs.
        targets: prompt tokens that are scored.
        tiles: see AttentionInputs.tiles.
    """

    token_ids: Field
    positions: Field
    slot_mapping: Field
    context_lens: Field
    table_stride: Field
    num_items: Field
    items: Field
    block_tables: Field
    targets: Field
    tiles: Field

    def each(self, made: Callable[[Field], Other]) -> StepFields[Other]:
        """The same fields, each made of what it is here."""
        return StepFields(**{name: made(field) for name, field in vars(self).items()})


@dataclass(frozen=True)
class Layout:
    """Where each field of a step lies, in words.

    The rows come first, so that their places depend on their number alone: what is captured for so many rows is
    replayed after steps of any number of tokens. What a decode step has comes before what only other steps have, so a
    captured forward finds its inputs whatever else is in the step.

    Attributes:
        rows: rows that get a next token. tokens: flat tokens. seqs: sequences. targets: scored prompt positions.
        items: items of the attention kernels, at most; a decode step's follow from its rows.
        tiles: tiles of longer chunks. width: blocks in the longest block table.
    """

    rows: int
    tokens: int
    seqs: int
    items: int = 0
    targets: int = 0
    tiles: int = 0
    width: int = 1

    @lru_cache(maxsize=_KEPT_LAYOUTS)  # noqa: B019 - few layouts, which most decode steps share
    def places(self) -> StepFields[Place]:
        """The place of each field, in the order of the buffer; the last ends where all do."""
        rows, tokens = (self.rows,), (self.tokens,)
        shapes: dict[str, tuple[int, ...]] = {
            **{
                name: rows if parameter.width == 1 else (self.rows, parameter.width)
                for name, parameter in ROW_PARAMETERS.columns().items()
            },
            "hidden_rows": rows,
            "slots": rows,
            "offsets": rows,
            "listed": rows,
            "token_ids": tokens,
            "positions": tokens,
            "slot_mapping": tokens,
            "context_lens": (self.seqs,),
            "table_stride": (1,),
            "num_items": (1,),
            "items": (self.items, ITEM_WORDS),
            "block_tables": (self.seqs, self.width),
            "targets": (self.targets,),
            "tiles": (self.tiles, 3),
        }
        places: dict[str, Place] = {}
        begin = 0
        for name, shape in shapes.items():
            end = begin + math.prod(shape)
            places[name] = Place(begin, end, shape, _DTYPES.get(name, np.int32))
            begin = end
        return StepFields(**places)


class _Views:
    """The fields at some places of both buffers on the host, and of what the device reads in each one's turn."""

    def __init__(self, places: StepFields[Place], on_host: list[Tensor], on_device: Tensor | None) -> None:
        self.places = places  # kept, or its id could become another's
        flats = [flat.numpy() for flat in on_host]
        self.arrays = [places.each(lambda place, flat=flat: place.array(flat)) for flat in flats]  # type: ignore[misc]
        sources = on_host if on_device is None else [on_device] * len(on_host)
        self.tensors = [places.each(lambda place, flat=flat: place.tensor(flat)) for flat in sources]  # type: ignore[misc]


class InputBuffers:
    """Two buffers on the host, filled in turn, and the one on the device that they are copied to.

    On a CPU the device's buffer is the host's.
    """

    def __init__(self, capacity: Layout, device: torch.device) -> None:
        words = capacity.places().tiles.end
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
        self._views: dict[int, _Views] = {}

    def next_arrays(self, places: StepFields[Place]) -> StepFields[Array]:
        """The host's arrays of a step, to be filled; they hold what an earlier step left there."""
        self._current = 1 - self._current
        copied = self._copied[self._current]
        if copied is not None and not copied.query():  # type: ignore[no-untyped-call]
            copied.synchronize()  # two steps ago, so mostly long done
        return self._views_of(places).arrays[self._current]

    def send(self, places: StepFields[Place]) -> StepFields[Tensor]:
        """Start the copy of what `next_arrays` gave; returns the fields on the device."""
        if self._on_device is not None:
            end = places.tiles.end
            self._on_device[:end].copy_(self._on_host[self._current][:end], non_blocking=True)
            copied = self._copied[self._current] or torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._copied[self._current] = copied
        return self._views_of(places).tensors[self._current]

    def _views_of(self, places: StepFields[Place]) -> _Views:
        """The fields at these places. Most steps have the places of earlier ones, and views are slow to make."""
        found = self._views.get(id(places))
        if found is None:
            if len(self._views) >= _KEPT_LAYOUTS:
                self._views.clear()
            found = self._views[id(places)] = _Views(places, self._on_host, self._on_device)
        return found


def to_device(array: Array, device: torch.device) -> Tensor:
    """A host array on the device, without waiting for it: what has no place in the buffers."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
