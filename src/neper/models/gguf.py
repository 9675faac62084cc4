"""Conversion of a GGUF file to a Hugging Face style directory in a cache: once, and all or nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf import quants
from torch import Tensor

from neper.errors import ModelLoadError
from neper.models import cache
from neper.models.gguf_metadata import Metadata, hf_config, open_gguf
from neper.models.gguf_tokenizer import write_tokenizer
from neper.types import Progress

_STALE_SECONDS = 3600.0

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(path: Path, cache_dir: Path, *, key: str | None = None, progress: Progress | None = None) -> Path:
    """The directory that `path` converts to, made now unless the cache has it.

    The work is done in a temporary directory beside the result, which a rename then publishes: readers see a whole
    conversion or none, whether the process is killed or another one converts the same file at the same time.

    Args:
        cache_dir: made if need be.
        key: name of the conversion, when the caller knows the content; None = `file_key(path)`.
        progress: called after every tensor.

    Returns:
        A directory with config.json, model.safetensors (bfloat16), tokenizer.json, tokenizer_config.json and
        generation_config.json.

    Raises:
        ModelLoadError: the file is damaged or of an unsupported kind, or the cache cannot be written.
    """
    if not path.is_file():
        raise ModelLoadError(f"there is no file {path}")
    key = key or cache.file_key(path)
    finished = cache.cached(cache_dir, key)
    if finished is not None:
        return finished
    final = cache.directory(cache_dir, key)
    reader, metadata = open_gguf(path)
    work: Path | None = None
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache_dir)
        work = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache_dir))
        _write(work, metadata, {tensor.name: tensor for tensor in reader.tensors}, path.name, progress)
        _publish(work, final)
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the converted model to {cache_dir}: {error.strerror or error}; "
            "free some space there or choose another cache directory (XDG_CACHE_HOME)"
        ) from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    return final


def _write(
    directory: Path, metadata: Metadata, tensors: Mapping[str, Any], what: str, progress: Progress | None
) -> None:
    config = hf_config(metadata, tensors)
    names = {_hf_name(name): name for name in tensors if name != "rope_freqs.weight"}
    write_tokenizer(metadata, directory)
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "pad_token_id": config["pad_token_id"],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
    with open(directory / "model.safetensors", "wb") as file:
        # Every shape is known before any value, so the file is written tensor by tensor, never held in memory.
        _write_header(file, {hf: _shape(tensors[name]) for hf, name in names.items()})
        for done, (hf, name) in enumerate(names.items(), start=1):
            file.write(_bfloat16_bytes(_hf_weight(hf, tensors[name], config)))
            if progress is not None:
                progress(done, len(names), f"converting {what}")
        file.flush()
        os.fsync(file.fileno())


def _hf_name(name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ModelLoadError(f"the GGUF file has a tensor of unknown use: {name}")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _shape(tensor: Any) -> list[int]:
    return [int(size) for size in reversed(tensor.shape)]


def _hf_weight(name: str, tensor: Any, config: Mapping[str, Any]) -> Tensor:
    """A GGUF tensor as float32, its rows in the order of the Hugging Face layout."""
    try:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelLoadError(f"GGUF tensor type {tensor.tensor_type.name} of {tensor.name} is not supported") from error
    weight = torch.from_numpy(np.array(values, dtype=np.float32, copy=True)).reshape(_shape(tensor))
    if config["model_type"] == "llama":
        # Llama's GGUF layout interleaves the two halves of each head that the rotary embedding pairs.
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f"self_attn.{part}." in name:
                pairs = weight.reshape(config[heads], config["head_dim"] // 2, 2, -1)
                weight = pairs.swapaxes(1, 2).reshape(weight.shape)
    return weight


def _write_header(file: BinaryIO, shapes: Mapping[str, list[int]]) -> None:
    """The safetensors header (8 bytes of length, then JSON padded to 8 bytes) of bfloat16 tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _bfloat16_bytes(weight: Tensor) -> bytes:
    return weight.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()


def _publish(work: Path, final: Path) -> None:
    # mkdtemp makes the directory private; a cache may be shared.
    work.chmod(0o755)
    try:
        work.rename(final)
    except OSError:
        # A directory in the way is another process's finished conversion of the same file.
        if not (final / "config.json").is_file():
            raise


def _remove_stale(cache_dir: Path) -> None:
    """Remove what killed conversions left: temporary directories in which nothing was written for an hour."""
    for directory in cache_dir.glob(".converting-*"):
        try:
            newest = max(entry.stat().st_mtime for entry in (directory, *directory.iterdir()))
        except OSError:
            continue
        if time.time() - newest > _STALE_SECONDS:
            shutil.rmtree(directory, ignore_errors=True)
