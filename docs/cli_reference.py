"""The README's command-line reference: made from the commands' own help, checked by a test.

`python docs/cli_reference.py` compares and exits 1 on a difference; `--write` (or `make docs`) updates the README.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- begin: made by docs/cli_reference.py -->"
END = "<!-- end: made by docs/cli_reference.py -->"
COMMANDS: list[list[str]] = [
    [],
    ["serve"],
    ["chat"],
    ["doctor"],
    ["bench", "cpu"],
    ["bench", "kernels"],
    ["bench", "engine"],
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
    current = README.read_text(encoding="utf-8")
    before, rest = current.split(BEGIN)
    after = rest.split(END)[1]
    wanted = f"{before}{BEGIN}\n{reference()}{END}{after}"
    if current == wanted:
        return 0
    if "--write" in sys.argv[1:]:
        README.write_text(wanted, encoding="utf-8")
        return 0
    print("the README's command line reference is not current; run: make docs")
    return 1


if __name__ == "__main__":
    sys.exit(main())
