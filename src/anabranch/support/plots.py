"""The common style of all figures, and writing them to files. Needs the extra ``figures`` (matplotlib).

Colours are Okabe and Ito's colour-blind safe palette; lines also differ by marker.
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anabranch.errors import CapabilityError
from anabranch.support.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLACK",
    "BLUE",
    "FAINT",
    "GREEN",
    "GREY",
    "INK",
    "LINES",
    "ORANGE",
    "PINK",
    "RED",
    "SKY",
    "check_matplotlib",
    "grid",
    "new_figure",
    "save",
    "save_both",
    "styled",
]

BLUE, ORANGE, GREEN, RED, SKY, PINK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
BLACK, INK, GREY, FAINT = "#000000", "#333333", "#777777", "#DDDDDD"
# colour and marker of the first, second, ... line in a figure
LINES = ((BLUE, "o"), (RED, "s"), (GREEN, "^"), (PINK, "D"), (ORANGE, "v"), (SKY, "P"), (BLACK, "X"))
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "anabranch",  # makes files reproducible
}
OPTIONS: dict[str, dict[str, Any]] = {".png": {"dpi": 160}, ".svg": {"metadata": {"Date": None}}}


def check_matplotlib(otherwise: str = "") -> None:
    """Raise CapabilityError if matplotlib is not installed; ``otherwise`` is an alternative, as in "or ..."."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        sentence = "figures need matplotlib; install it with pip install 'anabranch[figures]'"
        raise CapabilityError(f"{sentence}, {otherwise}" if otherwise else sentence) from error


def styled() -> AbstractContextManager[None]:
    """Apply the style while drawing: axes take it when they are created."""
    import matplotlib

    context: AbstractContextManager[None] = matplotlib.rc_context(STYLE)
    return context


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def grid(axes: Axes, axis: Literal["both", "x", "y"] = "both") -> None:
    """Draw faint grid lines in the background at the ticks of "x", "y" or "both"."""
    axes.grid(axis=axis, color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` in the format given by the suffix of ``path``: .png or .svg."""
    data = io.BytesIO()
    with styled():
        figure.savefig(data, format=path.suffix.removeprefix("."), facecolor="white", **OPTIONS[path.suffix])
    write_atomically(path, data.getvalue())


def save_both(figure: Figure, stem: Path) -> list[Path]:
    """Write STEM.png and STEM.svg; returns the paths."""
    paths = [stem.with_name(stem.name + suffix) for suffix in OPTIONS]
    for path in paths:
        save(figure, path)
    return paths
