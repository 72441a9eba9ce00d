"""Figure of a training run: held-out acceptance and loss by step. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anabranch.support import plots
from anabranch.support.plots import BLUE, GREY, RED
from anabranch.train.advice import Curve

__all__ = ["draw_curves"]


def draw_curves(log: Sequence[Mapping[str, Any]], curve: Curve, path: Path) -> None:
    """Write the figure of a run's ``log`` and held-out acceptance ``curve`` to ``path`` (.png or .svg)."""
    with plots.styled():
        figure = plots.new_figure(6.4, 4.8)
        above, below = figure.subplots(2, 1, sharex=True)
        if curve:
            steps, lengths = zip(*curve, strict=True)
            above.plot(steps, lengths, color=BLUE, marker="o")
        above.axhline(1.0, color=GREY, linestyle=":", label="plain decoding")
        above.set(ylabel="mean acceptance length")
        above.set_title("Held-out completions (predicted)")
        above.legend()
        below.plot([line["step"] for line in log], [line["loss"] for line in log], color=RED)
        below.set(xlabel="step", ylabel="loss")
        below.set_title("Training loss")
        for axes in (above, below):
            plots.grid(axes, "y")
    plots.save(figure, path)
