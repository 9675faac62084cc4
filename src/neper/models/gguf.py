"""Conversion of a GGUF file to a Hugging Face style directory in a cache: once, and all or nothing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from neper.errors import ModelLoadError
from neper.files import reading
from neper.models import cache
from neper.models.gguf_model import GGUFModel, open_model
from neper.models.gguf_tokenizer import end_token_ids, write_tokenizer
from neper.scratch import ScratchDirectory
from neper.types import Progress


def convert(path: Path, cache_dir: Path, *, key: str | None = None, progress: Progress | None = None) -> Path:
    """The directory that `path` converts to, made now unless the cache has it.

    The work is done in a temporary directory beside the result, which a rename then publishes. So readers see a whole
    conversion or none, even if the process is killed, or another one converts the same file at the same time.

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
    model = open_model(path)
    if progress is not None:
        progress(0, len(model.tensors), f"converting {path.name}")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with ScratchDirectory(".converting-", cache_dir) as work:
            cache.check_space(cache_dir, sum(2 * math.prod(tensor.shape) for tensor in model.tensors.values()))
            _write(work, model, path, progress)
            _publish(work, final)
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the converted model to {cache_dir}: {error.strerror or error}; "
            "free some space there or choose another cache directory (XDG_CACHE_HOME)"
        ) from error
    return final


def _write(directory: Path, model: GGUFModel, path: Path, progress: Progress | None) -> None:
    config, metadata = model.config, model.header.metadata
    with reading(path):
        write_tokenizer(metadata, directory)
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": end_token_ids(metadata),
        "pad_token_id": config["pad_token_id"],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
    with open(directory / "model.safetensors", "wb") as file:
        # Every shape is known before any value, so the file is written tensor by tensor, never held in memory.
        _write_header(file, {name: tensor.shape for name, tensor in model.tensors.items()})
        for done, name in enumerate(model.tensors, start=1):
            with reading(path):
                weight = torch.from_numpy(model.weight(name))
            file.write(_bfloat16_bytes(weight))
            if progress is not None:
                progress(done, len(model.tensors), f"converting {path.name}")
        file.flush()
        os.fsync(file.fileno())


def _write_header(file: BinaryIO, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The safetensors header (8 bytes of length, then JSON padded to 8 bytes) of bfloat16 tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
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
