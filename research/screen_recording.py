"""An animated SVG of recorded terminals, one above the other, from the times at which their characters appeared."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from xml.sax.saxutils import escape

from pyte.screens import Char

__all__ = ["Recorded", "animation"]

Recorded = dict[tuple[int, int], tuple[float, Char]]  # (line, column) -> when the character appeared, and it
Pane = tuple[str, str, Recorded]  # command, title, screen

SLOWER = 4.0  # the text is drawn so many times slower than it was decoded
LONGEST_GAP, REST = 0.25, 4.0  # seconds: pauses of the recording are cut to the first, the end is shown for the second
CELL, LINE, MARGIN, HEAD = 8.4, 18, 14, 46  # pixels; HEAD is the height of a pane's title and command
PAPER, INK, FAINT, BLUE = "#1b1f24", "#e6edf3", "#8b949e", "#79c0ff"
COLOURS = {
    "red": "#ff7b72",
    "green": "#7ee787",
    "brown": "#e3b341",
    "blue": BLUE,
    "magenta": "#d2a8ff",
    "cyan": "#76e3ea",
    "brightblack": FAINT,
}


def animation(panes: Sequence[Pane], *, columns: int) -> str:
    """An SVG image that loops; where animation is off or not supported, it shows the last frame.

    panes  all start at the first character of their text
    """
    drawn = [(command, title, list(_runs(recorded))) for command, title, recorded in panes]
    whole = max(start for _, _, runs in drawn for start, *_ in runs) * SLOWER + REST
    width = round(columns * CELL + 2 * MARGIN)
    body, styles, top = [], [], 0
    for command, title, runs in drawn:
        body.append(_words(MARGIN, top + 20, f"{title}, {SLOWER:g} times slower than recorded", FAINT, size=12))
        for place, part in enumerate(textwrap.wrap(f"$ {command}", columns - 2, break_on_hyphens=False)):
            more = " \\" if not f"$ {command}".endswith(part) else ""
            top += LINE if place else 0
            body.append(_words(MARGIN + 2 * CELL * bool(place), top + HEAD - 6, part + more, BLUE))
        for start, y, x, text, colour in runs:
            share, name = 100 * start * SLOWER / whole, f"t{len(styles)}"
            styles.append(f".{name}{{animation-name:{name}}}@keyframes {name}{{0%,{share:.2f}%{{opacity:0}}")
            styles[-1] += f"{share + 0.01:.2f}%,100%{{opacity:1}}}}"
            body.append(_words(MARGIN + x * CELL, top + HEAD + LINE * (y + 1), text, COLOURS.get(colour, INK), of=name))
        top += HEAD + LINE * (max(y for _, y, *_ in runs) + 2)
    label = " above ".join(escape(command, {chr(34): "&quot;"}) for command, _, _ in panes)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}" '
        f'role="img" aria-label="{label}">',
        "<style>text{font-family:ui-monospace,Menlo,Consolas,monospace;white-space:pre}"
        f"text[class]{{animation-duration:{whole:.2f}s;animation-iteration-count:infinite}}"
        "@media (prefers-reduced-motion: reduce){text[class]{animation:none}}" + "".join(styles) + "</style>",
        f'<rect width="{width}" height="{top}" rx="8" fill="{PAPER}"/>',
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def _runs(recorded: Mapping[tuple[int, int], tuple[float, Char]]) -> Iterator[tuple[float, int, int, str, str]]:
    """(seconds from the first character, line, column, text, colour) of what appeared at once, without long pauses."""
    cells = sorted((at, y, x, char.fg, char.data) for (y, x), (at, char) in recorded.items() if char.data.strip())
    clock, last = 0.0, cells[0][0]
    for (at, y), group in groupby(cells, key=lambda cell: cell[:2]):
        clock += min(at - last, LONGEST_GAP)
        last = at
        text, first, colour = "", 0, ""
        for _, _, x, fg, data in group:
            gap = x - first - len(text)
            if text and (gap > 1 or fg != colour):
                yield clock, y, first, text, colour
                text = ""
            if not text:
                first, colour, gap = x, fg, 0
            text += " " * gap + data
        yield clock, y, first, text, colour


def _words(x: float, y: float, text: str, colour: str, *, size: int = 14, of: str = "") -> str:
    name = f' class="{of}"' if of else ""
    length = f' textLength="{len(text) * CELL:.1f}"' if size == 14 else ""
    return f'<text{name} x="{x:.1f}" y="{y}" font-size="{size}" fill="{colour}"{length}>{escape(text)}</text>'
