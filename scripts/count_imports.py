"""Count the imports of a checkout of anabranch, between its rooms and between its modules, and name the circles.

A room is a folder of the package, or a module that stands in no folder. Imports are read from the syntax trees, so
those inside functions and those for type checkers only count as well.

    python scripts/count_imports.py                  this checkout
    python scripts/count_imports.py ../older .       two checkouts, to compare
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

PACKAGE = "anabranch"
SOURCE = Path(__file__).resolve().parents[1] / "src" / PACKAGE

Graph = Mapping[str, set[str]]


def imported_names(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, relative ones resolved; ``from a import b`` gives ``a.b``."""
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


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Every module of the package and its file."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join((PACKAGE, *(part for part in parts if part != "__init__")))] = path
    return found


def module_graph(source: Path = SOURCE) -> dict[str, set[str]]:
    """The modules of the package that each of them imports."""
    files = modules(source)
    graph: dict[str, set[str]] = {module: set() for module in files}
    for module, path in files.items():
        text = path.read_text(encoding="utf-8")
        for _, name in imported_names(text, module, is_package=path.name == "__init__.py"):
            while name and name not in files:  # a name that is defined in a module
                name = name.rpartition(".")[0]
            if name and name != module:
                graph[module].add(name)
    return graph


def room_of(module: str) -> str:
    """The folder of a module, or its own name on the top level; that of the package itself is empty."""
    return module.partition(".")[2].partition(".")[0]


def room_graph(imports: Graph) -> dict[str, set[str]]:
    """The rooms that each room imports from. The package itself, which may import from all, is left out."""
    graph: dict[str, set[str]] = {room: set() for room in map(room_of, imports) if room}
    for module, targets in imports.items():
        if room := room_of(module):
            graph[room] |= {room_of(target) for target in targets} - {room, ""}
    return graph


def circle(graph: Graph) -> list[str]:
    """The nodes of one circle, in order; empty where there is none."""
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for target in sorted(graph.get(path[-1], ())):
            if target in path:
                return path[path.index(target) :]
            if target not in done and (found := search([*path, target])):
                return found
        done.add(path[-1])
        return []

    for node in sorted(graph):
        if node not in done and (found := search([node])):
            return found
    return []


def arrows(graph: Graph) -> int:
    """The number of imports between nodes, each pair counted once."""
    return sum(map(len, graph.values()))


def report(source: Path) -> Iterable[str]:
    """The printed lines of a checkout."""
    imports = module_graph(source)
    rooms = room_graph(imports)
    yield f"{len(rooms)} rooms, {arrows(rooms)} arrows between them"
    yield f"{len(imports)} modules, {arrows(imports)} arrows between them"
    for name, graph in (("rooms", rooms), ("modules", imports)):
        yield f"circle of {name}: {' -> '.join(circle(graph)) or 'none'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="*", type=Path, help="folder with src/anabranch (default: this one)")
    for checkout in parser.parse_args().checkout or [SOURCE.parents[1]]:
        print(f"{checkout}:")
        for line in report(checkout / "src" / PACKAGE):
            print(f"  {line}")


if __name__ == "__main__":
    main()
