"""Parts of the documents that are made from the code: each stands between two marks in its file.

A script that makes one compares, and exits 1 on a difference; with `--write` (or `make docs`) it updates the file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def update(file: Path, maker: str, parts: Mapping[str, str]) -> int:
    """Compare, or with --write replace, parts of a file by name; returns the exit code.

    `<!-- begin: NAME, made by MAKER -->` and `<!-- end: NAME -->` are the marks around a part.
    """
    current = wanted = file.read_text(encoding="utf-8")
    for name, text in parts.items():
        begin, end = f"<!-- begin: {name}, made by {maker} -->", f"<!-- end: {name} -->"
        before, rest = wanted.split(begin)
        _, after = rest.split(end)
        wanted = f"{before}{begin}\n{text}{end}{after}"
    if current == wanted:
        return 0
    if "--write" in sys.argv[1:]:
        file.write_text(wanted, encoding="utf-8")
        return 0
    print(f"{file.name} is not current; run: make docs")
    return 1
