"""A result as HTML for notebooks: its tokens coloured by what proposed them, and how many each proposed."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence

__all__ = ["coloured"]

# translucent, so that text is readable on light and on dark pages
COLOURS = (
    "46,160,67",
    "31,136,222",
    "163,80,200",
    "209,134,22",
    "20,160,150",
    "214,80,120",
    "120,120,220",
    "150,150,40",
)
TARGET = "target"  # the target's own tokens have no colour


def coloured(text: str, pieces: Sequence[str] | None, sources: Sequence[str], facts: str) -> str:
    """The text, coloured if the ``pieces`` of its tokens are known, a legend, and a line of ``facts``."""
    counts = Counter(sources)
    drafted = sorted(source for source in counts if source != TARGET)
    colours = {source: COLOURS[place % len(COLOURS)] for place, source in enumerate(drafted)}
    if pieces is None:
        shown = html.escape(text)
    else:
        shown = "".join(_span(piece, source, colours) for piece, source in zip(pieces, sources, strict=True))
    listed = [source for source in (TARGET, *drafted) if source in counts]
    legend = " ".join(f"{_span(source, source, colours)} {counts[source]}" for source in listed)
    return (
        f'<div style="white-space:pre-wrap">{shown}</div>'
        f'<div style="margin-top:0.5em;opacity:0.8;font-size:90%">proposed by: {legend}<br>{html.escape(facts)}</div>'
    )


def _span(text: str, source: str, colours: dict[str, str]) -> str:
    if not text or source not in colours:
        return html.escape(text)
    title = html.escape(source, quote=True)
    return f'<span style="background:rgba({colours[source]},0.3)" title="{title}">{html.escape(text)}</span>'
