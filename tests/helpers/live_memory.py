"""How much memory tensors take at once while something runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Follows the storages that ops return while the mode is on.

    Attributes:
        peak: the most bytes that were alive at once.
    """

    def __init__(self, columns: int | None = None) -> None:
        """Only tensors whose last dimension is `columns` count; None = all."""
        super().__init__()
        self.columns = columns
        self.peak = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_storage(leaf)[0] for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (self.columns is None or leaf.shape[-1:] == (self.columns,)):
                storage, size = _storage(leaf)
                known = any(s == storage and ref() is not None for ref, s, _ in self._alive.values())
                if known or storage not in given:
                    self._alive[id(leaf)] = (weakref.ref(leaf), storage, size)
        self._alive = {key: entry for key, entry in self._alive.items() if entry[0]() is not None}
        self.peak = max(self.peak, sum({storage: size for _, storage, size in self._alive.values()}.values()))
        return result


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()
