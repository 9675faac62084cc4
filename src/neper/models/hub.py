"""Models by hub id. Unsupported ones are refused by their config.json, before any weight is downloaded."""

from __future__ import annotations

from pathlib import Path

from neper.errors import ModelLoadError
from neper.files import one_line
from neper.models.checkpoint import IS_ADAPTER
from neper.models.model_config import ModelConfig

_SMALL = ("*.json", "*.jinja", "merges.txt", "tokenizer.model")
_SAFE, _PICKLED = "model*.safetensors", "pytorch_model*.bin"


def download(model: str, tried: list[str]) -> Path:
    """The local snapshot of a hub model. Files that are not there are downloaded.

    Args:
        tried: the earlier interpretations of the name, for errors.

    Raises:
        ModelLoadError: no such model, no way to it, or one that is not supported.
    """
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return _download(model)
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
        raise ModelLoadError(f"cannot download {model!r} from the hub: {one_line(error)}") from error


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download

    small = Path(snapshot_download(model, allow_patterns=list(_SMALL)))
    if not (small / "config.json").exists():
        raise ModelLoadError(_without_config(model, small))
    try:
        ModelConfig.from_directory(small)
    except ModelLoadError as error:
        raise ModelLoadError(f"{model}: {error}") from None
    snapshot = Path(snapshot_download(model, allow_patterns=[*_SMALL, _SAFE]))
    if any(snapshot.glob(_SAFE)):
        return snapshot
    return Path(snapshot_download(model, allow_patterns=[*_SMALL, _PICKLED]))


def _without_config(model: str, snapshot: Path) -> str:
    if (snapshot / "adapter_config.json").exists():
        return f"{model} {IS_ADAPTER}"
    return (
        f"{model} has no config.json, so it is no model in Hugging Face form; "
        "if it holds .gguf files, download one of them (`hf download`) and give its path"
    )
