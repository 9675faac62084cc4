"""Loading of safetensors files into a decoder: strict about names and shapes, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from neper.errors import ModelLoadError
from neper.models.decoder import Decoder
from neper.models.model_config import read_json
from neper.types import Progress

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


def load_weights(decoder: Decoder, directory: Path, progress: Progress | None = None) -> None:
    """Fill `decoder` from the safetensors file or shards in `directory`, converted to its dtype, and prepack it.

    Raises:
        ModelLoadError: a weight is missing, unknown, of the wrong shape or not floating point, or a file is absent or
            damaged. All names and shapes are checked before any weight is read.
    """
    files = _files(directory)
    slots = decoder.weight_slots()
    tied = decoder.config.tie_word_embeddings
    with ExitStack() as stack:
        owners: dict[str, Any] = {}
        wrong: list[str] = []
        unknown: list[str] = []
        for path in files:
            try:
                file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"cannot read {path}: {error}") from error
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name in owners:
                    raise ModelLoadError(f"weight {name} is in two files of {directory}")
                if name not in slots:
                    if not _harmless(name, tied):
                        unknown.append(name)
                    continue
                owners[name] = file
                stored = file.get_slice(name)
                expected, found = list(slots[name].shape), list(stored.get_shape())
                if found != expected:
                    wrong.append(f"{name} {found} instead of {expected}")
                if stored.get_dtype() not in _FLOATS:
                    raise ModelLoadError(f"weight {name} has dtype {stored.get_dtype()}: quantised is not supported")
        missing = [name for name in slots if name not in owners]
        problems = [
            f"{kind}: {_few(names)}"
            for kind, names in (("missing", missing), ("unknown", unknown), ("of the wrong shape", wrong))
            if names
        ]
        if problems:
            raise ModelLoadError(f"the weights in {directory} do not fit config.json; {'; '.join(problems)}")
        for done, (name, file) in enumerate(owners.items(), start=1):
            slots[name].copy_(file.get_tensor(name))
            if progress is not None:
                progress(done, len(owners), "loading weights")
    slots.clear()
    decoder.prepack()


def _files(directory: Path) -> list[Path]:
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if not (directory / _INDEX).is_file():
        raise ModelLoadError(f"{directory} has neither {_SINGLE} nor {_INDEX}; other weight formats are not supported")
    weight_map = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{directory / _INDEX} has no weight_map")
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise ModelLoadError(f"{_INDEX} names files that are not in {directory}: {_few(absent)}")
    return [directory / name for name in names]


def _harmless(name: str, tied: bool) -> bool:
    """Whether a weight that the model has no place for may be in the file: it repeats what the model knows already."""
    return name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _few(names: Collection[str], limit: int = 4) -> str:
    shown = sorted(names)[:limit]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
