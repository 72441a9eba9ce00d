"""A study's figure as SVG text, in the style of all figures. Needs the extra ``figures``."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from anabranch.support import plots
from studies.base import Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

MARKERS = "osD^vPX*<>"
COLOURS = (plots.BLUE, plots.RED, plots.GREEN, plots.PINK, plots.ORANGE, plots.SKY, plots.BLACK, "#8C6D31", "#5254A3")


def draw(chart: Chart) -> str:
    """The figure as SVG. Raises CapabilityError without matplotlib."""
    plots.check_matplotlib()
    with plots.styled():
        figure = plots.new_figure(7.6, 4.4)
        axes = figure.add_subplot()
        (_bars if chart.kind == "bars" else _lines)(axes, chart)
        axes.set_title(chart.title)
        axes.set_xlabel(chart.x)
        axes.set_ylabel(chart.y)
        if chart.log:
            axes.set_yscale("log")
        if len(chart.lines) > 1:
            axes.legend(fontsize=8.5)
        data = io.StringIO()
        figure.savefig(data, format="svg", facecolor="white", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in data.getvalue().splitlines()) + "\n"


def _lines(axes: Axes, chart: Chart) -> None:
    colours = iter(COLOURS)
    for marker, line in zip(MARKERS, chart.lines, strict=False):
        style = {"color": plots.GREY, "linestyle": "--"} if line.faint else {"color": next(colours)}
        axes.plot(line.x, line.y, marker=marker, markersize=4.5, label=line.label, **style)  # type: ignore[arg-type]
    plots.grid(axes)


def _bars(axes: Axes, chart: Chart) -> None:
    names, width = [str(name) for name in chart.lines[0].x], 0.8 / len(chart.lines)
    for number, (colour, line) in enumerate(zip(COLOURS, chart.lines, strict=False)):
        places = [i + (number - (len(chart.lines) - 1) / 2) * width for i in range(len(names))]
        bars = axes.barh(places, line.y, width, color=colour, label=line.label)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    plots.grid(axes, "x")
