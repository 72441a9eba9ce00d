"""Figure of a tuning result: predicted tokens/s by tree size, one line per method. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.errors import InputError
from anabranch.support import plots
from anabranch.support.plots import BLACK, GREY
from anabranch.tune.fit import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_figure", "draw"]


def check_figure(path: Path) -> None:
    """Check before measuring that a figure can be drawn. Raises InputError or CapabilityError."""
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"a figure must be a .png or .svg file, got {path.name!r}")
    plots.check_matplotlib("or leave out --figure")


def draw(fit: Fit, path: Path) -> None:
    """Write the figure."""
    with plots.styled():
        figure = plots.new_figure(6.4, 4.0)
        _draw(figure.add_subplot(), fit)
    plots.save(figure, path)


def _draw(axes: Axes, fit: Fit) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for one in fit.tried:
        candidate = one.candidate
        if candidate.methods:
            label = f"{candidate.group}, chosen at every step" if candidate.adaptive else candidate.group
            lines.setdefault(label, []).append((candidate.nodes, one.rate))
    for place, (label, points) in enumerate(lines.items()):
        colour, marker = plots.LINES[place % len(plots.LINES)]
        axes.plot(*zip(*sorted(points), strict=True), color=colour, marker=marker, label=label)
    axes.axhline(fit.predicted_plain, color=GREY, linestyle=":", label="plain decoding")
    if fit.predicted.methods:
        at = (fit.predicted.nodes, fit.measured)
        axes.plot(*at, marker="*", markersize=13, color=BLACK, linestyle="none")
        axes.annotate("measured", at, xytext=(6, 6), textcoords="offset points")
    axes.set(xlabel="maximum nodes of a tree, root included", ylabel="tokens/s while decoding", ylim=(0, None))
    axes.set_title("Predicted from measured step times and recorded acceptance")
    axes.legend()
