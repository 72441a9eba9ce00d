"""Print facts and tables at the width of the terminal; output to a pipe is not wrapped."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from anabranch.cli.wrapping import wrapped
from anabranch.support.table import Table, one_line

__all__ = ["fact_lines", "fits", "output", "print_facts", "print_tables", "say", "status_console"]

UNBOUNDED = 10_000


def output() -> Console:
    """A console on standard output: as wide as the terminal or ``COLUMNS``, unlimited in a pipe."""
    console = Console(highlight=False, markup=False)
    if console.is_terminal or os.environ.get("COLUMNS"):
        return console
    return Console(highlight=False, markup=False, width=UNBOUNDED)


def status_console() -> Console:
    """A console for progress and notes on standard error: wrapped at words on a terminal, unwrapped in a pipe."""
    terminal = Console(stderr=True).is_terminal
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=not terminal)


def say(sentence: str) -> None:
    """Print a sentence on standard output, wrapped at words if that is a terminal."""
    print(wrapped(sentence))


def print_facts(groups: Mapping[str, Mapping[str, str]], console: Console | None = None) -> None:
    """Print names and values in two columns, each group under its heading unless that is empty."""
    console = console or output()
    names = max((len(name) for facts in groups.values() for name in facts), default=0)
    for title, facts in groups.items():
        if title and facts:
            console.print(Text(title, style="bold"), soft_wrap=True)
        for line in fact_lines(facts, names, console.width):
            console.print(Text(line), soft_wrap=True)


def fact_lines(facts: Mapping[str, str], names: int, width: int) -> Iterator[str]:
    """Lines of at most ``width`` characters: a name, padded to ``names`` characters, and its value."""
    names = min(names, width // 2)
    for name, value in facts.items():
        start = f"{name:<{names}}  "
        if len(name) > names:
            yield name
            start = " " * len(start[: names + 2])
        indent = " " * (names + 2)
        lines = textwrap.wrap(
            value, max(width, names + 12), initial_indent=start, subsequent_indent=indent, break_on_hyphens=False
        )
        yield from lines or [start.rstrip()]


def fits(table: Table, console: Console) -> bool:
    """Return whether a table is shown whole at the console's width."""
    return bool(Console(width=UNBOUNDED).measure(table.terminal()).maximum <= console.width)


def print_tables(tables: Sequence[Table], console: Console | None = None) -> None:
    """Print tables; one that is wider than the terminal is printed row by row, so that nothing is truncated."""
    console = console or output()
    for table in tables:
        if fits(table, console):
            console.print(table.terminal())
        else:
            _print_rows(table, console)


def _print_rows(table: Table, console: Console) -> None:
    """Print each row under its first cell, with one line per column."""
    if table.caption:
        console.print(Text(table.caption, style="bold"), soft_wrap=True)
    titles = [one_line(title) for title in table.titles[1:]]
    names = max(map(len, titles)) + 2
    for name, *cells in table.rows:
        console.print(Text(one_line(str(name)), style="bold"), soft_wrap=True)
        facts = {f"  {title}": " ".join(str(cell).split()) for title, cell in zip(titles, cells, strict=False)}
        for line in fact_lines(facts, names, console.width):
            console.print(Text(line), soft_wrap=True)
