"""The tables of errors and limits in api.md: made from the exceptions and the configuration, checked by a test."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

from generated import ROOT, update

from neper import errors
from neper.config import EngineConfig, ServerConfig
from neper.machine import format_size
from neper.options import SIZES

LIMITS = {
    ServerConfig: (
        "max_connections",
        "max_connections_per_client",
        "max_header_bytes",
        "max_body_bytes",
        "max_kept_bytes",
        "max_choices",
        "max_listed",
        "max_requests",
        "max_waiting",
        "request_timeout",
        "receive_timeout",
        "keep_alive_timeout",
    ),
    EngineConfig: ("max_model_len", "max_logprobs"),
}


def error_kinds(base: type[errors.NeperError] = errors.NeperError) -> Iterator[type[errors.NeperError]]:
    """All errors that a request can meet."""
    for kind in base.__subclasses__():
        if kind is not errors.StartupError:
            yield kind
            yield from error_kinds(kind)


def errors_table() -> str:
    rows = [
        f"| {kind.status} | `{kind.type}` | `{kind.code}` | {_first_sentence(kind.__doc__ or '')} |"
        for kind in sorted(error_kinds(), key=lambda kind: (kind.status, kind.type))
    ]
    return "\n".join(["| status | type | code | when |", "| --- | --- | --- | --- |", *rows, ""])


def limits_table() -> str:
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for config, names in LIMITS.items():
        fields = {field.name: field for field in dataclasses.fields(config)}
        for name in names:
            shown = _shown(name, fields[name].default)
            lines.append(f"| `--{name.replace('_', '-')}` | {shown} | {fields[name].metadata['help']} |")
    return "\n".join([*lines, ""])


def _shown(name: str, default: float | None) -> str:
    if default is None:
        return ""
    if name in SIZES:
        return format_size(int(default))
    return f"{default:,}" if isinstance(default, int) else f"{default:g}"


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".").replace("|", "\\|")


def main() -> int:
    return update(ROOT / "docs/api.md", "api_reference.py", {"errors": errors_table(), "limits": limits_table()})


if __name__ == "__main__":
    sys.exit(main())
