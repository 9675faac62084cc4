"""Command-line options made from the config dataclasses. A field, its default and its help become a flag."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_type_hints

import typer

from neper.machine import format_size

# Fields that hold several texts: their flags take them with commas.
LISTS = frozenset({"allowed_hosts", "allowed_origins"})
# Fields that hold a number of bytes: their flags take 512MiB or 2GiB as well.
SIZES = frozenset({"kv_cache_memory", "max_body_bytes", "max_kept_bytes", "max_header_bytes"})

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power, _letter: 1024**_power}


def parse_size(text: str | int) -> int:
    """Bytes from a number with an optional unit: `4096`, `512MiB` (2**20), `2G` (2**30), `1.5GB` (10**9)."""
    if isinstance(text, int):  # a default, already in bytes
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not a size; write bytes, or a number with a unit such as 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_list(text: str) -> tuple[str, ...]:
    """The parts between commas. An empty text is refused: it would count as the option's default."""
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts:
        raise typer.BadParameter("it is empty; name at least one, or leave the option out")
    return parts


def with_options(
    skip: frozenset[str] = frozenset(), only: frozenset[str] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Replace every dataclass parameter of a command by one option per field, and hand the command the made instance.

    `skip` names fields that get no option. `only` keeps the options of the named fields alone. Fields without an option
    have their default. The dataclass checks the values itself, and raises a StartupError.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        configs: dict[str, Any] = {
            name: parameter.annotation
            for name, parameter in signature.parameters.items()
            if dataclasses.is_dataclass(parameter.annotation)
        }
        options = {
            name: [o for o in _options(config) if o.name not in skip and (only is None or o.name in only)]
            for name, config in configs.items()
        }

        def wrapper(**values: Any) -> None:
            given = {name: value for name, value in values.items() if value is not None or name not in LISTS}
            made = {
                name: configs[name](
                    **{option.name: given.pop(option.name) for option in options[name] if option.name in given}
                )
                for name in configs
            }
            command(**given, **made)

        own = [parameter for name, parameter in signature.parameters.items() if name not in configs]
        parameters = own + [option for group in options.values() for option in group]
        wrapper.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        )
        wrapper.__name__ = command.__name__
        wrapper.__doc__ = command.__doc__
        wrapper.__annotations__ = {}
        return wrapper

    return decorate


def _options(config: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        flag = "--" + field.name.replace("_", "-")
        extra: dict[str, Any] = {}
        default: Any = field.default
        if "bool" in str(field.type):
            flag += "/--no-" + field.name.replace("_", "-")
        if field.name in SIZES:
            extra = {"parser": parse_size, "metavar": "SIZE"}
            if isinstance(field.default, int):
                extra["show_default"] = format_size(field.default)
        elif field.name in LISTS:
            hints[field.name], default = str | None, ",".join(default) or None  # a parser gets the default as well
            extra = {"parser": parse_list, "metavar": "TEXT,...", "show_default": bool(default)}
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[
                hints[field.name], typer.Option(flag, help=field.metadata["help"], show_envvar=False, **extra)
            ],
        )
