"""A horizontal bar chart as SVG text: the same numbers give the same bytes on every machine, unlike matplotlib's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["Bar", "bar_chart"]

WIDTH, LABELS, BARS, ROW, TOP = 760, 290, 410, 26, 56  # pixels; LABELS is where bars start, BARS the longest bar
OURS, PEERS, INK, GREY = "#0072B2", "#E69F00", "#333333", "#666666"


@dataclass(frozen=True)
class Bar:
    """A bar of ``value`` with its ``label``; ``ours`` chooses the colour."""

    label: str
    value: float
    ours: bool


def bar_chart(title: str, caption: str, bars: Sequence[Bar], *, digits: int = 0) -> str:
    """An SVG image: ``title`` above, ``caption`` below it, then one line a bar, values with ``digits`` decimals."""
    height = TOP + ROW * len(bars) + 12
    longest = max(bar.value for bar in bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold" fill="{INK}">{escape(title)}</text>',
        f'<text x="12" y="41" font-size="11" fill="{GREY}">{escape(caption)}</text>',
    ]
    for place, bar in enumerate(bars):
        y, width = TOP + ROW * place, BARS * bar.value / longest
        base = f'y="{y + 14}" font-size="12.5" fill="{INK}"'
        lines += [
            f'<text x="{LABELS - 8}" {base} text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="19" fill="{OURS if bar.ours else PEERS}"/>',
            f'<text x="{LABELS + width + 6:.1f}" {base}>{bar.value:.{digits}f}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"
