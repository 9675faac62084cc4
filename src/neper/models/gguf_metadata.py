"""The metadata of a GGUF file, read with checks."""

from __future__ import annotations

from typing import Any

from neper.errors import ModelLoadError
from neper.files import one_line

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class Metadata(dict[str, Any]):
    """Metadata of a GGUF file: key → plain Python value."""

    def need(self, key: str) -> Any:
        """The value of `key`; ModelLoadError where the file has none."""
        if self.get(key) is None:
            raise ModelLoadError(f"the GGUF file has no {key} in its metadata")
        return self[key]

    def integer(self, key: str, default: int | None = None) -> int:
        """The value of `key`, a positive integer; ModelLoadError where it is not one, or absent without a default."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) is not int or value < 1:
            raise ModelLoadError(f"{key} of the GGUF file must be a positive integer, got {one_line(repr(value))}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The value of `key`, a number; ModelLoadError where it is not one, or absent without a default."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) not in (int, float):
            raise ModelLoadError(f"{key} of the GGUF file must be a number, got {one_line(repr(value))}")
        return float(value)

    @property
    def architecture(self) -> str:
        """The model family; ModelLoadError where it is not one of the supported ones."""
        name = str(self.need("general.architecture"))
        if name not in CLASSES:
            known = ", ".join(CLASSES)
            raise ModelLoadError(f"GGUF architecture {one_line(repr(name))} is not supported; supported are {known}")
        return name
