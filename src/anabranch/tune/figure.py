"""The curve behind a choice: predicted tokens/s over the nodes of a tree, a line a method. Needs matplotlib."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch import plots
from anabranch.errors import InputError
from anabranch.plots import BLACK, GREEN, GREY
from anabranch.tune.fit import Fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_figure", "draw"]

METHODS = ("streams", "streams+prompt_lookup")
WORDS = {False: "", True: ", as many as pay"}


def check_figure(path: Path) -> None:
    """Refuse what could not be drawn, before anything is measured for it."""
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"a figure is a .png or .svg file, not {path.name!r}")
    plots.check_matplotlib("or leave --figure out")


def draw(found: Fit, path: Path) -> None:
    """Write the figure."""
    with plots.styled():
        figure = plots.new_figure(6.4, 4.0)
        _draw(figure.add_subplot(), found)
    plots.save(figure, path)


def _draw(axes: Axes, found: Fit) -> None:
    for (method, (colour, marker)), auto in itertools.product(zip(METHODS, plots.LINES, strict=False), WORDS):
        points = [
            (candidate.nodes, rate)
            for candidate, _, rate in found.tried
            if (candidate.method, candidate.auto) == (method, auto) and not candidate.cut.threshold
        ]
        if points:
            style = ":" if auto else "-"
            label = method + WORDS[auto]
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=style, label=label)
    lookup = max((rate for c, _, rate in found.tried if c.method == "prompt_lookup"), default=0.0)
    axes.axhline(lookup, color=GREEN, linestyle="--", label="prompt_lookup, its best length")
    axes.axhline(found.predicted_plain, color=GREY, linestyle=":", label="plain decoding")
    if found.chosen.nodes is not None:
        axes.plot([found.chosen.nodes], [found.measured], marker="*", markersize=13, color=BLACK, linestyle="none")
        axes.annotate("measured", (found.chosen.nodes, found.measured), xytext=(6, 6), textcoords="offset points")
    axes.set(xlabel="nodes of the tree at most, root included", ylabel="tokens/s while decoding", ylim=(0, None))
    axes.set_title("Predicted from measured step times and recorded acceptance")
    axes.legend()
