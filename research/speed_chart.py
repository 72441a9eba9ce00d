"""A chart of mean acceptance length against the cost of a step, with lines of equal speedup, as SVG text.

Like ``bar_chart``, it gives the same bytes for the same numbers on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["Dot", "speed_chart"]

WIDTH, HEIGHT = 760, 500  # pixels
LEFT, RIGHT, TOP, BOTTOM = 62, 30, 70, 54  # margins around the axes
INK, GREY, FAINT = "#333333", "#666666", "#d8d8d8"
TRAINED, FREE = "#0072B2", "#E69F00"
LETTER, LINE = 6.4, 13.0  # about the width of a letter and the height of a label
STEPS = (0.05, 0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0)  # between ticks
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Dot:
    """A drafter: the cost of its step relative to plain decoding, mean acceptance length; ``trained``: colour."""

    label: str
    cost: float
    tokens: float
    trained: bool


class _Axes:
    """Maps costs and tokens to pixels; both axes are linear and hold every dot and plain decoding, at (1, 1)."""

    def __init__(self, dots: Sequence[Dot]) -> None:
        costs, tokens = [1.0, *(dot.cost for dot in dots)], [1.0, *(dot.tokens for dot in dots)]
        self.x, self.y = _widened(costs), _widened(tokens)

    def at(self, cost: float, tokens: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * (cost - self.x[0]) / (self.x[1] - self.x[0])
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (tokens - self.y[0]) / (self.y[1] - self.y[0])


def _widened(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    more = max(0.08 * (high - low), 0.05)
    return low - min(more, low / 2), high + 2 * more


def _ticks(low: float, high: float) -> Iterator[float]:
    step = next((step for step in STEPS if (high - low) / step <= 8), 10.0)
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        yield number * step


def speed_chart(title: str, caption: str, dots: Sequence[Dot]) -> str:
    """An SVG image: ``title`` above, ``caption`` below it, and one labelled dot per drafter."""
    axes = _Axes(dots)
    speedups = list(_speedups(axes))
    quoted = escape(title, {chr(34): "&quot;"})
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{quoted}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold" fill="{INK}">{escape(title)}</text>',
        f'<text x="12" y="41" font-size="11" fill="{GREY}">{escape(caption)}</text>',
        *_scales(axes),
        *(line for line, _ in speedups),
        *_dots(axes, dots, [label for _, label in speedups]),
    ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = INK, more: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="11.5" fill="{colour}" text-anchor="{anchor}"{more}>'
        f"{escape(text)}</text>"
    )


def _scales(axes: _Axes) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="{GREY}"/>'
    for cost in _ticks(*axes.x):
        x, _ = axes.at(cost, 1)
        yield f'<path d="M{x:.1f} {bottom}v5" stroke="{GREY}"/>'
        yield _text(x, bottom + 18, f"{cost:g}", anchor="middle")
    for tokens in _ticks(*axes.y):
        _, y = axes.at(1, tokens)
        yield f'<path d="M{LEFT} {y:.1f}h-5" stroke="{GREY}"/>'
        yield _text(LEFT - 9, y + 4, f"{tokens:g}", anchor="end")
    yield _text((LEFT + right) / 2, HEIGHT - 14, "time of a step, relative to plain decoding", anchor="middle")
    middle = (TOP + bottom) / 2
    yield _text(18, middle, "mean acceptance length", anchor="middle", more=f' transform="rotate(-90 18 {middle:.1f})"')


def _speedups(axes: _Axes) -> Iterator[tuple[str, Box]]:
    """Lines of equal speedup, tokens divided by cost, as far as they cross the axes; each with its label's place."""
    (left, right), (low, high) = axes.x, axes.y
    for speedup in _ticks(low / right, min(high / left, 4.0)):
        first, last = max(left, low / speedup), min(right, high / speedup)
        if first >= last:
            continue
        (x0, y0), (x1, y1) = axes.at(first, first * speedup), axes.at(last, last * speedup)
        text, x = f"{speedup:g} times", x1 if last < right else x1 - 4
        path = f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="{FAINT}" stroke-dasharray="4 3"/>'
        yield path + _text(x, y1 - 4, text, anchor="end", colour=GREY), (x - LETTER * len(text), y1 - LINE, x, y1)


def _dots(axes: _Axes, dots: Sequence[Dot], labels: Sequence[Box]) -> Iterator[str]:
    places = [axes.at(dot.cost, dot.tokens) for dot in dots]
    taken: list[Box] = [*labels, *((x - 5, y - 5, x + 5, y + 5) for x, y in places)]
    x, y = axes.at(1, 1)
    yield f'<path d="M{x - 5:.1f} {y:.1f}h10M{x:.1f} {y - 5:.1f}v10" stroke="{INK}" stroke-width="1.5"/>'
    yield _text(x + 8, y + 14, "plain", colour=GREY)
    taken.append((x - 5, y - 5, x + 8 + 6 * LETTER, y + 16))
    for dot, (x, y) in zip(dots, places, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{TRAINED if dot.trained else FREE}"/>'
        box = _free_place(x, y, LETTER * len(dot.label), taken)
        taken.append(box)
        yield _text(box[0], box[3] - 3, dot.label)


def _free_place(x: float, y: float, width: float, taken: Sequence[Box]) -> Box:
    """The place of a label of this width at (x, y) that covers the least of what is there already."""
    places = [(x + 8, y - 7), (x - 8 - width, y - 7), (x - width / 2, y - 21), (x - width / 2, y + 7)]
    places += [(x + 7, y - 19), (x + 7, y + 5), (x - 7 - width, y - 19), (x - 7 - width, y + 5)]
    boxes = [(left, top, left + width, top + LINE) for left, top in places]
    return min(boxes, key=lambda box: sum(_shared(box, other) for other in taken) + _outside(box))


def _shared(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _outside(box: Box) -> float:
    return 1e3 * (max(0.0, LEFT - box[0]) + max(0.0, box[2] - WIDTH) + max(0.0, TOP - box[1]))
