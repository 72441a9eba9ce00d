"""Imports point one way through the house (docs/architecture.md); read from syntax trees, so lazy ones count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "anabranch"
SOURCE = Path(__file__).resolve().parents[1] / "src" / PACKAGE

# From the ground up: a room may import from its own floor and from those below.
FLOORS = [
    {
        *("background", "errors", "files", "foreign", "interrupt", "jsonfiles", "memory", "plots", "processor"),
        *("tree", "sampling"),
    },
    {"verify", "native"},
    {"model"},
    {"costs", "learning"},
    {"methods"},
    {"adapters"},
    {"speculation"},
    {"engine"},
    {"scheduler"},
    {"generation", "loading", "options", "prompts", "stats", "profiles"},
    {"api", "certify", "installation", "train", "bench", "analysis"},
    {"tune"},
    {"cli", "__main__"},
]
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


def imported_modules(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, relative ones resolved; ``from a import b`` gives ``a.b``."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """One sentence for each import of ``module`` that points up the house."""
    room = module.split(".")[1]
    if room not in HEIGHT:
        return [f"{module} stands in no known room; give {room!r} a floor in tests/test_imports.py"]
    found = []
    for line, target in imported_modules(source, module, is_package=is_package):
        parts = target.split(".")
        if parts[0] != PACKAGE:
            continue
        target_room = parts[1] if len(parts) > 1 else ""
        if target_room not in HEIGHT:
            found.append(f"{module}:{line} imports {target}, which is the public face and not a room below")
        elif HEIGHT[target_room] > HEIGHT[room]:
            found.append(f"{module}:{line} imports {target}: {room} may not look up to {target_room}")
    return found


def module_files() -> list[tuple[str, Path]]:
    """Every module of the package but its face, ``anabranch/__init__.py``, which may import from anywhere."""
    files = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts != ("__init__",):
            files.append((".".join((PACKAGE, *(part for part in parts if part != "__init__"))), path))
    return files


def test_imports_point_one_way() -> None:
    found = [
        sentence
        for module, path in module_files()
        for sentence in violations(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py")
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("anabranch.tree", "from anabranch.errors import InputError", 0),
        ("anabranch.tree", "from anabranch.verify import verify", 1),
        ("anabranch.engine", "import anabranch.model.cache, torch", 0),
        ("anabranch.model.load", "def f():\n    import anabranch.engine", 1),
        ("anabranch.model.load", "from .cache import Cache", 0),
        ("anabranch.model.load", "from ..methods import streams", 1),
        ("anabranch.model.load", "from anabranch import engine, errors", 1),
        ("anabranch.model.load", "from anabranch import load", 1),
        ("anabranch.train.trainer", "from anabranch.generation import generate", 0),
        ("anabranch.generation", "from anabranch.stats import Stats", 0),
        ("anabranch.attic", "", 1),
    ],
)
def test_the_check_itself(module: str, source: str, expected: int) -> None:
    assert len(violations(source, module)) == expected


def test_a_package_resolves_its_own_relative_imports() -> None:
    assert violations("from .load import load", "anabranch.model", is_package=True) == []
    assert len(violations("from ..cli import main", "anabranch.model", is_package=True)) == 1
