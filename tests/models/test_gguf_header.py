"""The header of GGUF files: what gguf-py reads as well, sooner, and no count that the file cannot hold."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from neper.errors import ModelLoadError
from neper.models.gguf_header import read_header
from neper.models.source import resolve

VOCABULARY, MERGES = 262_144, 514_906  # of a Gemma 3


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name.encode()) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def file(*keys: bytes, tensors: tuple[bytes, ...] = (), num_keys: int | None = None, rest: bytes = b"") -> bytes:
    count = len(keys) if num_keys is None else num_keys
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), count) + b"".join(keys) + b"".join(tensors) + rest


def tensor(shape: tuple[int, ...], kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    sizes = b"".join(struct.pack("<Q", size) for size in shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def test_it_is_what_gguf_py_reads(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    values: dict[str, Any] = {"text": "ünï\0", "list": ["a", "", "日本"], "numbers": [1, -2, 3], "reals": [0.5, 1.5]}
    writer.add_string("text", values["text"])
    for name in ("list", "numbers", "reals"):
        writer.add_array(name, values[name])
    writer.add_array("flags", [True, False])
    writer.add_bool("flag", True)
    for add in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{add}")(add, 100)
    writer.add_float32("float32", 0.1)
    writer.add_float64("float64", 0.1)
    weight = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    writer.add_tensor("plain", weight)
    writer.add_tensor("half", weight.astype(np.float16))
    kind = gguf.GGMLQuantizationType.Q4_0
    writer.add_tensor("small", gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs, ours = gguf.GGUFReader(tmp_path / "x.gguf"), read_header(tmp_path / "x.gguf")
    expected = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == expected
    assert [type(value) for value in ours.metadata.values()] == [type(value) for value in expected.values()]
    assert list(ours.tensors) == [stored.name for stored in theirs.tensors]
    for stored in theirs.tensors:
        own = ours.tensors[stored.name]
        assert (own.shape, own.type) == (tuple(reversed(stored.shape.tolist())), stored.tensor_type)
        values = gguf.quants.dequantize(ours.data(own), own.type)
        assert np.array_equal(values, gguf.quants.dequantize(stored.data, stored.tensor_type))


def test_case_96_an_unsupported_family_is_known_at_once(tmp_path: Path) -> None:
    keys = (
        key("general.architecture", 8, text(b"gemma3")),
        key("tokenizer.ggml.tokens", 9, array(8, VOCABULARY, text(b"\xc4\xa0token") * VOCABULARY)),
        key("tokenizer.ggml.scores", 9, array(6, VOCABULARY, bytes(4 * VOCABULARY))),
        key("tokenizer.ggml.merges", 9, array(8, MERGES, text(b"\xc4\xa0t oken") * MERGES)),
    )
    (tmp_path / "big.gguf").write_bytes(file(*keys))
    started = time.process_time()
    with pytest.raises(ModelLoadError, match="GGUF architecture 'gemma3' is not supported; supported are llama"):
        resolve(str(tmp_path / "big.gguf"), cache_dir=tmp_path / "cache")
    assert time.process_time() - started < 3.0  # 0.3 s measured; gguf-py's reader takes 26 s
    assert len(read_header(tmp_path / "big.gguf").metadata["tokenizer.ggml.tokens"]) == VOCABULARY


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"GGUF", "cut short within its header"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "it tells of 4611686018427387904 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "and 4611686018427387904 keys"),
        (file(num_keys=5), "cut short within its header"),
        (file(struct.pack("<Q", 2**63)), "a text of 9223372036854775808 bytes"),
        (file(key("k", 8, struct.pack("<Q", 2**20))), "cut short within its header"),
        (file(key("k", 9, array(0, 10**10, bytes(1000)))), "more than 4194304 items"),
        (file(key("k", 9, array(8, 2**22, bytes(1000)))), "cut short within its header"),
        (file(key("k", 9, array(12, 2**22, bytes(1000)))), "cut short within its header"),
        (file(key("k", 9, array(9, 3, bytes(100)))), "an array of arrays"),
        (file(key("k", 99, b"")), "of the unknown type 99"),
        (file(key("k", 0, b"1"), key("k", 0, b"2")), "the key k stands twice"),
        (file(key("k", 8, text(b"\xff"))), "can't decode byte"),
        (file(tensors=(tensor((4, 4)),)), "is cut short: it has .* its tensors need"),
        (file(tensors=(tensor((2**40, 2**40)),)), "is cut short"),
        (file(tensors=(tensor((4,), offset=2**63),)), "is cut short"),
        (file(tensors=(tensor((0, 4)),)), r"has the shape \[4, 0\]"),
        (file(tensors=(tensor((33, 4), kind=2),)), r"Q4_0 has the shape \[4, 33\]"),
        (file(tensors=(tensor((4,) * 5),)), "has 5 dimensions"),
        (file(tensors=(tensor((4,), kind=77),)), "of the unknown type 77"),
        (file(tensors=(tensor((1,)), tensor((1,))), rest=bytes(100)), "the tensor t stands twice"),
        (file(key("general.alignment", 4, struct.pack("<I", 3))), "general.alignment is 3"),
        (file(key("split.count", 2, struct.pack("<H", 3))), "one of 3 parts; join them"),
    ],
)
def test_case_118_what_a_header_tells_is_held_against_the_file(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=says):
        read_header(tmp_path / "x.gguf")
