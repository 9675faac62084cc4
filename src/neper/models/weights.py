"""Loading of weights into a decoder, converted to its dtype: one tensor in memory at a time."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from neper.errors import ModelLoadError
from neper.files import one_line, open_regular, reading
from neper.models.checkpoint import Checkpoint, check_names, check_weights, find_checkpoint, harmless
from neper.models.decoder import Decoder
from neper.models.gguf_model import open_model
from neper.models.model_config import ModelConfig
from neper.models.predictor import MultiTokenPredictor, predictor_names
from neper.types import Progress

Readers = Mapping[str, Callable[[], Tensor]]
"""Name → the function that reads the weight."""


def load_weights(
    make: Callable[[], Decoder], config: ModelConfig, directory: Path, progress: Progress | None = None
) -> Decoder:
    """A decoder with the weights in `directory`, prepacked.

    Args:
        make: makes an empty decoder of that config. It takes the memory, so names and shapes are checked before.

    Raises:
        ModelLoadError: a weight is missing, unknown, of the wrong shape or not floating point, or a file is absent or
            damaged. All names and shapes are checked before any weight is read.
    """
    check_weights(directory, config)
    checkpoint = find_checkpoint(directory)
    with _readers(checkpoint, directory, config) as readers:
        return _fill(make(), readers, str(directory), progress)


def load_gguf(make: Callable[[], Decoder], path: Path, progress: Progress | None = None) -> Decoder:
    """A decoder with a GGUF file's own values, prepacked. ModelLoadError as `open_model` raises it."""
    model = open_model(path)
    readers = {name: lambda name=name: torch.from_numpy(model.weight(name)) for name in model.tensors}
    return _fill(make(), readers, str(path), progress)


def load_predictor(target: Decoder, directory: Path, rows: int) -> MultiTokenPredictor:
    """The multi-token-prediction layer beside a decoder's weights in `directory`, prepacked; `rows` of hidden states.

    Raises:
        ModelLoadError: there is none, or it does not fit the decoder.
    """
    with _readers(find_checkpoint(directory), directory, target.config) as readers:
        predictor = MultiTokenPredictor(target, predictor_names(target.config, readers.keys()), rows)
        predictor.check_names(readers.keys())
        for name, slot in predictor.weight_slots().items():
            with reading(str(directory)):
                tensor = readers[name]()
            if tensor.shape != slot.shape or not tensor.is_floating_point():
                raise ModelLoadError(
                    f"weight {name} is {list(tensor.shape)} of {tensor.dtype}; {list(slot.shape)} of floats is needed"
                )
            slot.copy_(tensor)
    predictor.prepack()
    return predictor


def _fill(decoder: Decoder, readers: Readers, what: str, progress: Progress | None) -> Decoder:
    """Copy every weight into its place, and prepack the decoder. `what`: their origin, for errors."""
    slots = decoder.weight_slots()
    for done, name in enumerate(slots, start=1):
        with reading(what):
            slots[name].copy_(readers[name]())
        if progress is not None:
            progress(done, len(slots), "loading weights")
    slots.clear()
    decoder.prepack()
    return decoder


@contextmanager
def _readers(checkpoint: Checkpoint, directory: Path, config: ModelConfig) -> Iterator[Readers]:
    if checkpoint.pickled:
        tensors = _unpickled(checkpoint, directory, config)
        # Popped: tensors that were copied need not stay.
        yield {name: lambda name=name: tensors.pop(name) for name in list(tensors)}  # type: ignore[misc]
        return
    with ExitStack() as stack:
        readers: dict[str, Callable[[], Tensor]] = {}
        for path in checkpoint.files:
            with reading(path):
                file: Any = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    readers[name] = lambda file=file, name=name: file.get_tensor(name)  # type: ignore[misc]
        yield readers


def _unpickled(checkpoint: Checkpoint, directory: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of PyTorch's own format. No code in such a file is run: it may hold only tensors."""
    tensors: dict[str, Tensor] = {}
    for path in checkpoint.files:
        for name, tensor in _load(path).items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise ModelLoadError(f"{path} holds {one_line(repr(name))}, which is no tensor by name")
            if name in tensors:
                raise ModelLoadError(f"weight {one_line(name)} is in two files of {directory}")
            tensors[name] = tensor
    check_names(directory, config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        # With strides of zero, one number could be a model of any size.
        if not harmless(name, config) and not (tensor.is_floating_point() and tensor.itemsize >= 2):
            raise ModelLoadError(f"weight {name} has dtype {tensor.dtype}: quantised is not supported")
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ModelLoadError(f"weight {name} is no plain tensor: {tensor.layout} on {tensor.device}")
    return tensors


def _load(path: Path) -> dict[Any, Any]:
    _check_archive(path)
    with reading(path):
        try:
            try:
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap can only be used" not in str(error):
                    raise
                loaded = torch.load(path, map_location="cpu", weights_only=True)  # the format before PyTorch 1.6
        except pickle.UnpicklingError as error:
            what = "more than tensors, which may be code" if "global" in str(error).lower() else "no tensors"
            raise ModelLoadError(f"cannot read {path}: it holds {what}; take the model as model.safetensors") from error
    if not isinstance(loaded, dict):
        raise ModelLoadError(f"{path} holds no tensors by name")
    return loaded


def _check_archive(path: Path) -> None:
    """torch writes archives without compression: a compressed one could unpack to any size."""
    with open_regular(path) as file, reading(path):
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                for record in archive.infolist():
                    if record.compress_type != zipfile.ZIP_STORED:
                        raise ModelLoadError(
                            f"cannot read {path}: its parts are compressed, as torch never writes them"
                        )
