"""The shape of src: no cycles of files, arrows between rooms that fall, and ARCHITECTURE's tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src/neper"
FILES = {".".join(path.relative_to(SRC.parent).with_suffix("").parts): path for path in SRC.rglob("*.py")}
FILES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}

# What each top room may import.
ARROWS = {
    "arrow": "candidates types",
    "config": "errors",
    "files": "errors",
    "candidates": "types",
    "guarded": "errors",
    "options": "machine",
    "ops": "errors types",
    "models": "config errors files machine ops scratch types",
    "text": "errors files types",
    "engine": "arrow candidates config errors files html machine models ops scratch seeds shown text types",
    "neper": "candidates engine errors ops score types",
    "wire": "config engine errors models neper text types",
    "server": "arrow candidates config engine errors files models neper progress seeds text types wire",
    "shown": "text types",
    "html": "shown",
    "plot": "engine shown",
    "terminal": "shown",
    "chat": "config engine models progress shown terminal text types",
    "score": "candidates config engine errors files progress types",
    "doctor": "config engine machine models neper ops",
    "bench": "config engine errors guarded machine models neper ops progress text types",
    "cli": "bench chat config doctor engine errors guarded neper options score server types wire",
    "__main__": "cli",
}

# The rooms inside, from the bottom up: each imports from lines before its own alone.
LEVELS = {
    "ops": """
        common
        attention fused logprobs
        linear sampling
        packing
        backends
        buffers
        token_logprobs
        linear_logprobs views
    """,
    "engine": """
        arguments completion interface memory plan settings
        checks step
        draft
        start
        core
        candidates
        llm remote
    """,
    "server": """
        activity backend bodies entries lane memory timing transport
        explorer kept_items long_texts metrics schemas
        fields
        choice
        generation scoring
        service
        gate replies requests
        candidates openapi tokenization
        app
        run
    """,
}


def imports(name: str, path: Path) -> Iterator[str]:
    """The files that a file imports, in functions and for types as well."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports {'.' * node.level}{node.module}"
            wholes = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [whole if whole in FILES else str(node.module) for whole in wholes]
        else:
            continue
        yield from (file for file in found if file in FILES and file != name)


GRAPH = {name: set(imports(name, path)) for name, path in FILES.items()}


def arrows(depth: int, inside: str) -> Iterator[tuple[str, str]]:
    """The arrows between rooms whose names have so many parts."""
    for name, found in GRAPH.items():
        for other in found:
            rooms = [".".join(file.split(".")[:depth]) for file in (name, other)]
            if rooms[0] != rooms[1] and all(room.startswith(inside) for room in rooms):
                yield rooms[0].removeprefix(inside), rooms[1].removeprefix(inside)


def test_files_import_each_other_in_no_circle() -> None:
    TopologicalSorter(GRAPH).prepare()


def test_top_rooms_import_what_is_listed() -> None:
    TopologicalSorter({room: set(others.split()) for room, others in ARROWS.items()}).prepare()
    assert [
        f"{room} -> {other}"
        for room, other in sorted(set(arrows(2, "")))
        if other.removeprefix("neper.") not in ARROWS.get(room.removeprefix("neper."), "").split()
    ] == []


@pytest.mark.parametrize("top", LEVELS)
def test_inner_rooms_import_from_below(top: str) -> None:
    level = {room: height for height, line in enumerate(LEVELS[top].strip().splitlines()) for room in line.split()}
    inside = f"neper.{top}."
    assert {name.removeprefix(inside).split(".")[0] for name in FILES if name.startswith(inside)} == set(level)
    assert [f"{room} -> {other}" for room, other in set(arrows(3, inside)) if level[room] <= level[other]] == []


def tree() -> dict[Path, str]:
    """The folders of src in ARCHITECTURE's tree, each with the lines about its files."""
    lines = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split("```")[1].splitlines()
    texts: dict[Path, str] = {}
    above: list[tuple[int, Path]] = [(-1, ROOT)]
    for line in filter(str.strip, lines):
        indent = len(line) - len(line.lstrip())
        while above[-1][0] >= indent:
            above.pop()
        folder = re.match(r" {0,4}([a-z_/]+)/(?: |$)", line)
        if folder is not None:
            above.append((indent, above[-1][1] / folder[1]))
            line = line[folder.end() :]
        texts[above[-1][1]] = texts.get(above[-1][1], "") + "\n" + line
    return texts


def test_the_tree_of_the_architecture_is_the_tree() -> None:
    texts = tree()
    folders = {path.parent for path in FILES.values()}
    assert {folder for folder in texts if SRC in (folder, *folder.parents)} == folders
    for folder in folders:
        files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        # What folders beside each other have in common is said once, in the lines of the one around them.
        words = set(re.findall(r"\w+", texts[folder] + texts[folder.parent] if folder != SRC else texts[SRC]))
        assert files - words == set(), folder
        heads = re.findall(r"^ {1,6}((?:\w+(?:\.py)?, )*\w+(?:\.py)?)  +", texts[folder], re.MULTILINE)
        heads += re.findall(r"(?:; |^ {2,})((?:\w+, )*\w+): ", texts[folder], re.MULTILINE)
        named = {name.removesuffix(".py") for head in heads for name in head.split(", ")}
        assert named <= files | {"__init__"}, folder
