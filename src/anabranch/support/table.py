"""A table of text that prints in a terminal and as Markdown, HTML and CSV, and the form of numbers in its cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import rich.table

__all__ = ["Table", "decimal", "one_line", "percent", "quartiles_cell", "signed_percent"]

WORDS = 100  # columns at most of a cell of words in a terminal


@dataclass(frozen=True)
class Table:
    """Titles and rows; a row may be shorter than the titles.

    titles   of the columns; a line break in one is shown in terminals and HTML only
    caption  above the table; empty: none
    left     number of leading columns that hold words, aligned left; the others hold numbers
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    left: int = 1

    def terminal(self) -> rich.table.Table:
        """The table for rich; brackets in cells are no markup."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        made = RichTable(
            title=self.caption or None,
            title_justify="left",
            title_style="bold",
            box=SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for place, title in enumerate(self.titles):
            words = place < self.left
            made.add_column(title, justify="left" if words else "right", max_width=WORDS if words else None)
        for row in self.rows:
            made.add_row(*(Text(str(cell)) for cell in row))
        return made

    def markdown(self) -> list[str]:
        """The lines of the table without its caption, and an empty one."""
        kinds = "---|" * self.left + "---:|" * (len(self.titles) - self.left)
        lines = [[one_line(title) for title in self.titles]]
        lines += [[str(cell).replace("|", "\\|") for cell in row] for row in self.rows]
        head, *body = (f"| {' | '.join(cells)} |" for cells in lines)
        return [head, f"|{kinds}", *body, ""]

    def html(self) -> str:
        """A ``table`` element with its caption."""
        head = "".join(f"<th>{_escaped(title)}</th>" for title in self.titles)
        body = "".join(f"\n<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        caption = f"<caption>{_escaped(self.caption)}</caption>\n" if self.caption else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"

    def csv(self) -> str:
        """The titles and the rows as comma-separated values."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.titles, *self.rows])
        return text.getvalue()


def one_line(title: str) -> str:
    """A title without its line breaks: words that were hyphenated there, or joined by a slash, are put together."""
    return " ".join(title.replace("-\n", "").replace("/\n", "/").replace("\n/", "/").split())


def _escaped(cell: object) -> str:
    return escape(str(cell)).replace("\n", "<br>").replace("\x00", "")


def decimal(value: float | None, digits: int = 2) -> str:
    """A number; "-" if there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def quartiles_cell(values: Sequence[float] | None, digits: int = 2) -> str:
    """The median, followed by the quartiles; "-" if there are none."""
    if values is None:
        return "-"
    low, middle, high = (f"{value:.{digits}f}" for value in values)
    return f"{middle} ({low}-{high})"


def percent(part: Mapping[str, Any]) -> str:
    """A mean with its interval, in %; "-" if nothing was scored."""
    if part["mean"] is None:
        return "-"
    mean, low, high = (f"{100 * part[name]:.1f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low}-{high})"


def signed_percent(part: Mapping[str, Any]) -> str:
    """A mean difference with its interval, in percentage points; "-" if nothing was scored."""
    if part["mean"] is None:
        return "-"
    mean, low, high = (f"{100 * part[name]:+.1f}" for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"
