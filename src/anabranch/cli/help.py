"""Help texts that fit any terminal, for the program and every command.

Typer's panels truncate option names in narrow terminals, and click's list of commands truncates sentences.
``typer.Typer(**HELP)`` prints plain paragraphs instead: names are never truncated, and text is wrapped. A command that
takes a drafter (``cls=Verb``, or a group of ``cls=Verbs``) lists the methods below its options.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

__all__ = ["HELP", "Verb", "Verbs", "methods"]

DRAFTERS = ("drafter", "method")  # parameters that take a drafter's specification


class Verb(TyperCommand):
    """A command that lists the methods if it takes one, and what its recipes hold if it has some.

    recipes  a line of their names, then one an option with its values
    """

    recipes: Sequence[Sequence[str]] = ()

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the methods and the recipes, then the epilog."""
        _write_methods(self, formatter)
        _write_recipes(self.recipes, formatter)
        super().format_epilog(ctx, formatter)


class Verbs(TyperGroup):
    """A group that lists its commands with the complete first sentence of each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names and sentences as a list of two columns."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _first_sentence(verb.help or "")) for name, verb in verbs if verb is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the methods, then the epilog."""
        _write_methods(self, formatter)
        super().format_epilog(ctx, formatter)


def _write_methods(command: Any, formatter: Any) -> None:
    if any(parameter.name in DRAFTERS for parameter in command.params) and (listed := list(methods())):
        with formatter.section("Drafters, combined with +"):
            formatter.write_dl([*listed, *_installed()])


def _installed() -> Iterator[tuple[str, str]]:
    """The methods that installed packages declare, which are imported when they are named."""
    from importlib.metadata import entry_points

    for point in entry_points(group="anabranch.methods"):
        yield point.name, "of an installed package" if point.dist is None else f"of the package {point.dist.name}"


def _write_recipes(rows: Sequence[Sequence[str]], formatter: Any) -> None:
    """A table of the recipes' values, in blocks of as many columns as fit."""
    if len(rows) < 2:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = formatter.width - formatter.indent_increment - widths[0]
    with formatter.section("Where recipes differ (the first is the default)"):
        start = 1
        while start < len(widths):
            end = start + 1
            while end < len(widths) and sum(widths[start : end + 1]) + 2 * (end + 1 - start) <= room:
                end += 1
            if start > 1:
                formatter.write("\n")
            for row in rows:
                cells = [row[0].ljust(widths[0]), *(row[place].ljust(widths[place]) for place in range(start, end))]
                formatter.write(" " * formatter.current_indent + "  ".join(cells).rstrip() + "\n")
            start = end


def methods() -> Iterator[tuple[str, str]]:
    """The name and summary of each method of the library, sorted by name.

    Read from the syntax trees of ``METHOD = Method(...)``, since importing the registry imports torch.
    """
    folder = Path(__file__).parents[1] / "methods"
    summaries = {}
    for path in [*folder.glob("*.py"), *folder.glob("*/entry.py")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            made = node.value if isinstance(node, ast.Assign) else None
            if isinstance(made, ast.Call) and ast.unparse(made.func) == "Method":
                entry = {word.arg: word.value for word in made.keywords}
                summaries[str(ast.literal_eval(entry["name"]))] = str(ast.literal_eval(entry["summary"]))
    yield from sorted(summaries.items())


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n", 1)[0].split()).split(". ", 1)[0].rstrip(".")


HELP: dict[str, Any] = {
    "rich_markup_mode": None,
    "cls": Verbs,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""Keywords for the program's ``typer.Typer``. Commands need none; add a group with ``cls=Verbs``."""
