"""The header of a GGUF file: metadata and the places of its tensors, all of them checked.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: magic, version, number of tensors
and of keys; keys with typed values; name, shape, type and place of each tensor; the data, aligned. gguf-py's own
reader makes two numpy arrays of each text of a vocabulary (26 s for 262,144 tokens and their merges; here 0.3 s), and
checks no count.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from neper.errors import ModelLoadError
from neper.files import one_line, open_regular, reading
from neper.models.gguf_metadata import Metadata

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS = 2**14
_MAX_TENSORS = 2**16
_MAX_ITEMS = 2**22
"""Most items of all arrays together. The largest known vocabulary has 262,144 tokens, and twice as many merges."""
_MAX_TEXT = 16 * 2**20
_MAX_HEADER = 2**28
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = 32


class GgufTensor(NamedTuple):
    """The place of a tensor.

    Attributes:
        shape: outermost dimension first, as numpy and torch have it. (The file has it last.)
        type: a gguf.GGMLQuantizationType.
        start, nbytes: its first byte in the file, and its size.
    """

    name: str
    shape: tuple[int, ...]
    type: Any
    start: int
    nbytes: int


class Header(NamedTuple):
    """`tensors`: name → tensor."""

    path: Path
    metadata: Metadata
    tensors: dict[str, GgufTensor]

    def data(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor [rows, bytes of a row], read now."""
        with open_regular(self.path) as file:
            file.seek(tensor.start)
            read = np.fromfile(file, dtype=np.uint8, count=tensor.nbytes)
        if len(read) != tensor.nbytes:
            raise ModelLoadError(f"{self.path} was changed while it was read")
        return read.reshape(*tensor.shape[:-1], -1)


def is_gguf(path: Path) -> bool:
    """True where a file begins as GGUF does, with any name."""
    with open_regular(path) as file, reading(path):
        return file.read(4) == MAGIC


def read_header(path: Path) -> Header:
    """Metadata and tensors. Every count, place and size has been checked against the size of the file.

    Raises:
        ModelLoadError: the file is cut short, damaged, one part of several, or no GGUF file.
    """
    with open_regular(path) as file, reading(path):
        if file.read(4) != MAGIC:
            raise ModelLoadError(f"{path} is not a readable GGUF file: it does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()


class _Reader:
    """A reader at a place in the file that moves on. Errors name the defect."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._limit = min(len(data), _MAX_HEADER)
        self._place = 4
        self._items = 0

    def header(self) -> Header:
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            raise self._wrong("it is big-endian, which is not supported" if swapped else f"version {version}")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise self._wrong(f"it tells of {num_tensors} tensors and {num_keys} keys")
        metadata = Metadata()
        for _ in range(num_keys):
            key = self._text()
            if key in metadata:
                raise self._wrong(f"the key {one_line(key)} stands twice")
            metadata[key] = self._value(self._number("I"), key)
        parts = metadata.get("split.count", 1)
        if parts != 1:
            raise ModelLoadError(
                f"{self._path} is one of {one_line(parts)} parts; join them into one file first (gguf-split --merge)"
            )
        return Header(self._path, metadata, self._tensors(num_tensors, metadata))

    def _tensors(self, count: int, metadata: Metadata) -> dict[str, GgufTensor]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        found = []
        for _ in range(count):
            name, dimensions = self._text(), self._number("I")
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise self._wrong(f"tensor {one_line(name)} has {dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
            found.append((name, shape, self._number("I"), self._number("Q")))
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
            raise self._wrong(f"its general.alignment is {one_line(alignment)}")
        begin = -(-self._place // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end = 0
        for name, shape, number, offset in found:
            try:
                kind = GGMLQuantizationType(number)
            except ValueError:
                raise self._wrong(f"tensor {one_line(name)} is of the unknown type {number}") from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if not all(shape) or shape[-1] % block:
                raise self._wrong(f"tensor {one_line(name)} of type {kind.name} has the shape {list(shape)}")
            if name in tensors:
                raise self._wrong(f"the tensor {one_line(name)} stands twice")
            nbytes = math.prod(shape) // block * block_bytes
            tensors[name] = GgufTensor(name, shape, kind, begin + offset, nbytes)
            end = max(end, begin + offset + nbytes)
        if end > self._size:
            raise ModelLoadError(
                f"{self._path} is cut short: it has {self._size} bytes, its tensors need {end}; download it again"
            )
        return tensors

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"), key)
        if kind not in _SCALARS:
            raise self._wrong(f"the value of {one_line(key)} is of the unknown type {kind}")
        return self._number(_SCALARS[kind])

    def _array(self, kind: int, count: int, key: str) -> list[Any]:
        self._items += count
        if self._items > _MAX_ITEMS:
            raise self._wrong(f"its arrays hold more than {_MAX_ITEMS} items ({one_line(key)} has {count})")
        if kind == _STRING:
            return self._texts(count)
        if kind not in _SCALARS:
            raise self._wrong(f"{one_line(key)} is an array of arrays or of an unknown type ({kind})")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        values: list[Any] = np.frombuffer(self._bytes(count * dtype.itemsize), dtype=dtype).tolist()
        return values

    def _texts(self, count: int) -> list[str]:
        # A vocabulary has up to a million texts, so this loop calls no functions of ours.
        data, place, limit, texts = self._data, self._place, self._limit, []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if place + 8 > limit:
                raise self._cut()
            (length,) = length_at(data, place)
            place += 8
            if length > limit - place:
                raise self._cut()
            texts.append(data[place : place + length].decode())
            place += length
        self._place = place
        return texts

    def _text(self) -> str:
        length = self._number("Q")
        if length > _MAX_TEXT:
            raise self._wrong(f"a text of {length} bytes")
        return self._bytes(length).decode()

    def _number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._bytes(struct.calcsize("<" + form)))[0]

    def _bytes(self, count: int) -> bytes:
        if count > self._limit - self._place:
            raise self._cut()
        self._place += count
        return self._data[self._place - count : self._place]

    def _cut(self) -> ModelLoadError:
        if self._limit < self._size:
            return self._wrong(f"its header has more than {_MAX_HEADER} bytes")
        return self._wrong("it is cut short within its header; download it again")

    def _wrong(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path} is not a readable GGUF file: {what}")
