"""The curve behind a choice: predicted tokens/s over the nodes of a tree, a line a method. Needs matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from anabranch.errors import CapabilityError, InputError
from anabranch.files import write_atomically
from anabranch.tune.fit import Fit

__all__ = ["check_figure", "draw"]

LINES = {"streams": ("#0072B2", "o"), "streams+prompt_lookup": ("#D55E00", "s")}


def check_figure(path: Path) -> None:
    """Refuse what could not be drawn, before anything is measured for it."""
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"a figure is a .png or .svg file, not {path.name!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CapabilityError("figures need matplotlib; pip install matplotlib, or leave --figure out") from error


def draw(found: Fit, path: Path) -> None:
    """Write the figure."""
    from matplotlib.figure import Figure

    canvas: Any = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = canvas.add_subplot()
    for method, (colour, marker) in LINES.items():
        points = [
            (candidate.cut.nodes, rate)
            for candidate, _, rate in found.tried
            if candidate.streams and not candidate.cut.threshold and ("+" in candidate.spec) == ("+" in method)
        ]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=method)
    lookup = max((rate for c, _, rate in found.tried if c.spec.startswith("prompt_lookup")), default=0.0)
    axes.axhline(lookup, color="#009E73", linestyle="--", label="prompt_lookup, its best length")
    axes.axhline(found.predicted_plain, color="#555555", linestyle=":", label="plain decoding")
    if found.chosen.cut.nodes is not None and found.chosen.cut.nodes > 1:
        axes.plot(
            [found.chosen.cut.nodes], [found.measured], marker="*", markersize=13, color="black", linestyle="none"
        )
        axes.annotate("measured", (found.chosen.cut.nodes, found.measured), xytext=(6, 6), textcoords="offset points")
    axes.set(xlabel="nodes of the tree, root included", ylabel="tokens/s while decoding", ylim=(0, None))
    axes.set_title("Predicted from measured step times and recorded acceptance", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    out = io.BytesIO()
    canvas.savefig(out, format=path.suffix[1:], dpi=150)
    write_atomically(path, out.getvalue())
