"""The arguments of LLM, checked: settings, parameters, and arrays of other libraries as plain lists."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

from neper.config import EngineConfig
from neper.errors import ConfigError, InvalidRequestError
from neper.types import LogprobParams, LogprobsMode, SamplingParams

Params = TypeVar("Params", SamplingParams, LogprobParams)


def one_each(given: Any, kind: type[Params], count: int, name: str) -> list[Params]:
    """Params for each of `count` prompts, checked: structs do not check types when they are made."""
    if isinstance(given, list):
        values = [_checked(value, kind, name) for value in given]
    else:
        values = [kind() if given is None else _checked(given, kind, name)] * count
    if len(values) != count:
        raise InvalidRequestError(f"{name} holds {len(values)} entries for {count} prompts", param=name)
    return values


def _checked(params: Any, kind: type[Params], name: str) -> Params:
    if not isinstance(params, kind):
        raise InvalidRequestError(f"{name} must be {kind.__name__}, got {type(params).__name__}", param=name)
    values: dict[str, Any] = {}
    member = ""
    try:
        for member, wanted in _types(kind).items():
            values[member] = msgspec.convert(plain(getattr(params, member)), wanted)
    except (TypeError, msgspec.ValidationError) as error:
        raise InvalidRequestError(f"{member}: {error}", param=member) from None
    return kind(**values)


@cache
def _types(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: str if hint is LogprobsMode else hint for name, hint in hints.items()}  # the engine names the modes


def engine_config(model: str, given: dict[str, Any]) -> EngineConfig:
    """Settings of an engine from keyword arguments. Raises ConfigError for an unknown one, and for a wrong type."""
    kinds, values = _types(EngineConfig), dict[str, Any]()
    names = {setting.name: setting.type for setting in fields(EngineConfig)}
    for name, value in given.items():
        if name not in kinds:
            raise ConfigError(f"{name} is no setting; there are {', '.join(kinds)}")
        try:
            values[name] = msgspec.convert(plain(value), kinds[name])
        except (TypeError, msgspec.ValidationError):
            raise ConfigError(f"{name} must be {names[name]}, got {value!r}") from None
    return EngineConfig(model=model, **values)


def plain(value: Any) -> Any:
    """The value with Python's own numbers and lists in place of numpy's, of tensors and of other sequences."""
    return msgspec.to_builtins(
        value,
        builtin_types=(bytes, bytearray, memoryview),  # would become texts
        enc_hook=lambda other: other.tolist() if hasattr(other, "tolist") else list(other),
    )
