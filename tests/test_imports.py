"""Imports point one way through the package and form no circle (docs/architecture.md).

They are read from syntax trees, so imports inside functions and those for type checkers only count as well.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _script() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "scripts" / "count_imports.py"
    spec = importlib.util.spec_from_file_location("count_imports", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


count_imports = _script()

# From the ground up: a room, which is a folder or a module in none, imports only from rooms that stand before it.
ROOMS = (
    *("errors", "support", "declared"),
    "tasks",
    "native",
    *("tree", "sampling", "processors", "verify"),
    "model",
    "learning",
    *("drafting", "methods", "adapters"),
    "control",
    "decoding",
    *("prompts", "structure", "options", "loading", "speech"),
    *("train", "analysis", "certify", "bench", "tune", "installation"),
    *("capabilities", "api", "serve", "integrations"),
    *("cli", "__main__"),
)
HEIGHT = {room: height for height, room in enumerate(ROOMS)}


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """One sentence for each import of ``module`` from a room that stands after its own."""
    room = count_imports.room_of(module)
    if room not in HEIGHT:
        return [f"{module} is in no known room; give {room!r} a place in tests/test_imports.py"]
    found = []
    for line, target in count_imports.imported_names(source, module, is_package=is_package):
        if target.split(".")[0] != count_imports.PACKAGE:
            continue
        above = count_imports.room_of(target)
        if above not in HEIGHT:
            found.append(f"{module}:{line} imports {target}, which is the public face and not a room")
        elif HEIGHT[above] > HEIGHT[room]:
            found.append(f"{module}:{line} imports {target}, but {above} stands above {room}")
    return found


def test_imports_point_one_way() -> None:
    found = [
        sentence
        for module, path in count_imports.modules().items()
        if module != count_imports.PACKAGE  # its face may import from anywhere
        for sentence in violations(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py")
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return count_imports.module_graph()


def test_modules_import_in_no_circle(graph: dict[str, set[str]]) -> None:
    assert " -> ".join(count_imports.circle(graph)) == ""


def test_every_room_exists(graph: dict[str, set[str]]) -> None:
    assert set(ROOMS) == set(count_imports.room_graph(graph))


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("anabranch.tree", "from anabranch.errors import InputError", 0),
        ("anabranch.tree", "from anabranch.verify import verify", 1),
        ("anabranch.tree", "from anabranch.sampling import argmax", 1),
        ("anabranch.decoding.engine", "import anabranch.model.cache, torch", 0),
        ("anabranch.model.load", "def f():\n    import anabranch.decoding.engine", 1),
        ("anabranch.model.load", "from .cache import Cache", 0),
        ("anabranch.model.load", "from ..methods import streams", 1),
        ("anabranch.model.load", "from anabranch import decoding, errors", 1),
        ("anabranch.model.load", "from anabranch import load", 1),
        ("anabranch.train.trainer", "from anabranch.decoding.generation import generate", 0),
        ("anabranch.decoding.generation", "from anabranch.decoding.stats import Stats", 0),
        ("anabranch.attic", "", 1),
    ],
)
def test_the_check_itself(module: str, source: str, expected: int) -> None:
    assert len(violations(source, module)) == expected


def test_a_package_resolves_its_own_relative_imports() -> None:
    assert violations("from .load import load", "anabranch.model", is_package=True) == []
    assert len(violations("from ..cli import main", "anabranch.model", is_package=True)) == 1


def test_circles_are_found_and_imports_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = {
        "__init__": "from anabranch.a import one",
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from anabranch.room.b import two",
        "room/__init__": "",
        "room/b": "def two():\n    from .c import three",
        "room/c": "import anabranch.a",
        "d": "from anabranch.a import one\nfrom anabranch import room",
    }
    for name, text in sources.items():
        path = tmp_path / "src" / "anabranch" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["count_imports.py", str(tmp_path)])
        count_imports.main()
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  3 rooms, 4 arrows between them",
        "  6 modules, 6 arrows between them",
        "  circle of rooms: a -> room",
        "  circle of modules: anabranch.a -> anabranch.room.b -> anabranch.room.c",
    ]
