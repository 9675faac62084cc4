"""The files of a directory that hold a model's weights: found, distinguished, and compared with the config.

Free of torch: models that cannot be served are refused before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from neper.errors import ModelLoadError
from neper.files import inside, one_line, open_regular, read_json
from neper.models.model_config import ModelConfig
from neper.models.safetensors_header import StoredTensor, read_header
from neper.models.weight_shapes import weight_shapes

_FORMS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
IS_ADAPTER = (
    "is an adapter (LoRA), not a model: merge it into its base model first "
    "(peft: merge_and_unload, then save_pretrained)"
)
_MAX_FILES = 1024
_FLOATS = ("F64", "F32", "F16", "BF16")
_PART = re.compile(r"(.+)-\d{5}-of-\d{5}\.gguf")


@dataclass(frozen=True)
class Checkpoint:
    """Attributes:
    files: in the order of their names; one, or the shards of an index.
    pickled: they have PyTorch's own format, whose contents only torch can list.
    """

    files: tuple[Path, ...]
    pickled: bool


def find_checkpoint(directory: Path) -> Checkpoint:
    """The weights of a directory in Hugging Face form, safetensors before PyTorch's own format.

    Raises:
        ModelLoadError: there are none, an index is damaged, or a file that it names is not there.
    """
    for single, index in _FORMS:
        pickled = single.endswith(".bin")
        if (directory / single).exists():
            open_regular(directory / single).close()
            return Checkpoint((directory / single,), pickled)
        if (directory / index).exists():
            return Checkpoint(_shards(directory, index), pickled)
    raise ModelLoadError(without_weights(directory))


def find_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory that holds no weights in Hugging Face form; None where there is none.

    Raises:
        ModelLoadError: there are several.
    """
    if any((directory / name).exists() for form in _FORMS for name in form):
        return None
    files = sorted(path for path in directory.glob("*.[gG][gG][uU][fF]") if path.is_file())
    if len(files) > 1:
        names = few([path.name for path in files])
        if all(_PART.fullmatch(path.name) for path in files):
            raise ModelLoadError(f"{directory} holds a GGUF file in parts ({names}): join them (gguf-split --merge)")
        raise ModelLoadError(f"{directory} holds several GGUF files ({names}): give the path of one of them")
    return files[0] if files else None


def check_weights(directory: Path, config: ModelConfig) -> None:
    """Check that the weights of a directory fit its config, as far as headers show.

    Raises:
        ModelLoadError: as `find_checkpoint`; or weights are missing, unknown, of the wrong shape, or quantised.
    """
    checkpoint = find_checkpoint(directory)
    if not checkpoint.pickled:
        stored: dict[str, StoredTensor] = {}
        for path in checkpoint.files:
            for name, tensor in read_header(path).items():
                if name in stored:
                    raise ModelLoadError(f"weight {one_line(name)} is in two files of {directory}")
                stored[name] = tensor
        check_names(directory, config, {name: tensor.shape for name, tensor in stored.items()})
        for name, tensor in stored.items():
            if tensor.dtype not in _FLOATS and not harmless(name, config):
                raise ModelLoadError(f"weight {name} has dtype {tensor.dtype}: quantised is not supported")


def check_names(directory: Path, config: ModelConfig, stored: dict[str, tuple[int, ...]]) -> None:
    """Check that names and shapes fit the config; ModelLoadError names the differences."""
    missing: list[str] = []
    wrong: list[str] = []
    wanted: set[str] = set()
    for name, shape in weight_shapes(config):
        wanted.add(name)
        if name not in stored:
            missing.append(name)
            if len(missing) > len(stored) + 1000:  # a config of a million layers, which nobody wants listed
                break
        elif stored[name] != shape:
            wrong.append(f"{name} {list(stored[name])} instead of {list(shape)}")
    unknown = [name for name in stored if name not in wanted and not harmless(name, config)]
    problems = [
        f"{kind}: {few(names)}"
        for kind, names in (("missing", missing), ("unknown", unknown), ("of the wrong shape", wrong))
        if names
    ]
    if problems:
        raise ModelLoadError(f"the weights in {directory} do not fit config.json; {'; '.join(problems)}")


def few(names: Collection[str]) -> str:
    """Some of the names, and the number of the others."""
    shown = [one_line(name) for name in sorted(names)[:4]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def harmless(name: str, config: ModelConfig) -> bool:
    """True for a weight that has no place in the model: it repeats facts that the model knows, or drafts for it."""
    if name.startswith("mtp."):
        return True
    behind = (f"model.layers.{config.num_layers + extra}." for extra in range(config.num_nextn_layers))
    if name.startswith(tuple(behind)):
        return True
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def stored_names(directory: Path) -> list[str] | None:
    """The names of a directory's weights; None where only loading tells. ModelLoadError as `find_checkpoint`."""
    checkpoint = find_checkpoint(directory)
    if checkpoint.pickled:
        return None
    return [name for path in checkpoint.files for name in read_header(path)]


def _shards(directory: Path, index: str) -> tuple[Path, ...]:
    weight_map = read_json(directory / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{directory / index} has no weight_map")
    names = {name if isinstance(name, str) else repr(name) for name in weight_map.values()}
    if len(names) > _MAX_FILES:
        raise ModelLoadError(f"{directory / index} names {len(names)} files; at most {_MAX_FILES} are supported")
    files = [inside(directory, name) for name in sorted(names)]
    absent = [path.name for path in files if not path.exists()]
    if absent:
        raise ModelLoadError(f"{index} names files that are not in {directory}: {few(absent)}")
    for path in files:
        open_regular(path).close()
    return tuple(files)


def without_weights(directory: Path) -> str:
    """The reason why a directory has no weights that can be loaded, and the remedy."""
    if (directory / "adapter_config.json").exists():
        return f"{directory} {IS_ADAPTER}"
    formats = {
        "*.pth": "Meta's own format",
        "*.h5": "Keras' format",
        "*.msgpack": "Flax' format",
        "*.onnx": "ONNX",
        "*.ckpt*": "a training checkpoint",
        "*.safetensors": "safetensors under another name than model.safetensors, without an index",
    }
    for pattern, what in formats.items():
        if any(directory.glob(pattern)):
            return (
                f"{directory} has its weights in a form that is not supported ({what}): "
                "take the model in Hugging Face form (model.safetensors), or a .gguf file"
            )
    return (
        f"{directory} has no weights: neither model.safetensors nor pytorch_model.bin, an index of them, "
        "or a .gguf file; download the model again"
    )
