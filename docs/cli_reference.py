"""docs/cli.md, the command-line reference: made from the commands' own help, checked by a test."""

from __future__ import annotations

import os
import subprocess
import sys

from generated import ROOT, update

COMMANDS: list[list[str]] = [
    [],
    ["serve"],
    ["chat"],
    ["score"],
    ["engine"],
    ["doctor"],
    ["bench", "cpu"],
    ["bench", "kernels"],
    ["bench", "engine"],
    ["bench", "http"],
    ["bench", "speculate"],
]


def help_text(command: list[str]) -> str:
    environment = os.environ | {"COLUMNS": "80", "TERMINAL_WIDTH": "80", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    code = "import sys; sys.argv[0] = 'neper'; import neper.cli; neper.cli.main()"
    result = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"], env=environment, capture_output=True, text=True, check=True
    )
    return "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())


def reference() -> str:
    parts = []
    for command in COMMANDS:
        name = " ".join(["neper", *command])
        parts += [f"<details><summary><code>{name}</code></summary>", "", "```text", help_text(command), "```"]
        parts += ["", "</details>", ""]
    return "\n".join(parts)


def main() -> int:
    return update(ROOT / "docs" / "cli.md", "cli_reference.py", {"commands": reference()})


if __name__ == "__main__":
    sys.exit(main())
