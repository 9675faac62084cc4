"""The header of a safetensors file: names, shapes and places of its tensors, all of them checked.

Layout (https://github.com/huggingface/safetensors#format): 8 bytes with the length of the header, little-endian; a JSON
object, name → {dtype, shape, data_offsets}; the data. Free of torch and of the library, which maps the whole file.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from neper.errors import ModelLoadError
from neper.files import one_line, open_regular, reading

MAX_HEADER = 16 * 2**20
"""Most bytes. The format allows 100 MB. An entry has about 120, and the largest supported models have 2,000 entries."""

_MAX_DIMENSIONS = 8
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


class StoredTensor(NamedTuple):
    """A tensor, as the header of a file describes it."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Name → tensor. Every place and size has been checked against the size of the file.

    Raises:
        ModelLoadError: the file is cut short, damaged, or no safetensors file.
    """
    with open_regular(path) as file, reading(path):
        total = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if total < 8 or length > total - 8:
            raise ModelLoadError(f"{path} is cut short or no safetensors file: download it again")
        if length > MAX_HEADER:
            raise ModelLoadError(f"{path} has a header of {length} bytes; more than {MAX_HEADER} are not supported")
        header = orjson.loads(file.read(length))
        if not isinstance(header, dict):
            raise ModelLoadError(f"{path} has a header that is no JSON object")
        header.pop("__metadata__", None)
        tensors, end = {}, 0
        for name, entry in header.items():
            tensors[name], last = _tensor(path, name, entry)
            end = max(end, last)
    if end != total - 8 - length:
        what = "is cut short" if end > total - 8 - length else "is damaged"
        raise ModelLoadError(
            f"{path} {what}: it holds {total - 8 - length} bytes of data, its header tells of {end}; download it again"
        )
    return tensors


def _tensor(path: Path, name: str, entry: Any) -> tuple[StoredTensor, int]:
    """The tensor of an entry, and the end of its data."""
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS
        whole = whole and all(type(size) is int and size >= 0 for size in (start, end, *shape))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise ModelLoadError(f"{path} has a damaged header: {one_line(name)} is {one_line(entry)}")
    if end < start or (dtype in _BYTES and end - start != _BYTES[dtype] * math.prod(shape)):
        raise ModelLoadError(
            f"{path} has a damaged header: {one_line(name)} has {end - start} bytes for {dtype} {shape}"
        )
    return StoredTensor(dtype, tuple(shape)), end
