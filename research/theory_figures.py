"""Draw the papers' figures on theory and cost from our own formulas and counts, each with a table of its numbers.

    python research/theory_figures.py --out DIR

v1 4, ACL 20  ``streaming_speedup``  Speculative Streaming over a draft model (eq. 10)
Leviathan     ``t5``                 the T5 experiments, predicted and measured
ACL 8         ``overhead``           parameters and memory traffic of a draft
ACL 9         ``operations``         arithmetic of a draft
"""

from __future__ import annotations

import argparse
import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.analysis.cost import costs
from anabranch.analysis.theory import T5, streaming_speedup
from anabranch.drafting.counting import DraftCost, DraftShape
from anabranch.errors import AnabranchError, FileError
from anabranch.support import plots
from anabranch.support.files import check_folder, check_output, write_atomically
from anabranch.support.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["write_figures"]

RATIOS = {2: BLUE, 5: RED, 10: GREEN, 20: PINK, 50: ORANGE, 100: BLACK}  # target / draft latency
GAMMA = 4
RIDING = 32

Table = list[dict[str, Any]]
Draw = Callable[["Figure", Table], None]


NAMES = ("streaming_speedup", "t5", "overhead", "operations")


def write_figures(folder: Path, *, model: str = "Llama-2-13B", force: bool = False) -> list[Path]:
    """Write NAME.csv, NAME.png and NAME.svg of every figure into ``folder``; the cost figures are for ``model``.

    Before drawing, raises FileError if the folder is not writable, or if files exist and ``force`` is not set.
    """
    plots.check_matplotlib()
    counted = _counted(model)
    if folder.is_file():
        raise FileError(f"{folder} is a file; give a folder for the figures (it is created if necessary)")
    check_folder(folder, "figures", "folder")
    for name in NAMES:
        for suffix in (".csv", *plots.OPTIONS):
            check_output(folder / f"{name}{suffix}", force=force, what="figures")
    pages: dict[str, tuple[Table, Draw]] = {
        "streaming_speedup": (_streaming(), _draw_streaming),
        "t5": (_t5(), _draw_t5),
        "overhead": (
            [{"method": n, "parameters": c.parameters, "bytes_read": c.read} for n, c in counted.items()],
            _draw_overhead,
        ),
        "operations": ([{"method": n, "operations": c.operations} for n, c in counted.items()], _draw_operations),
    }
    written = []
    for name, (table, draw) in pages.items():
        written.append(folder / f"{name}.csv")
        write_atomically(written[-1], _csv(table))
        with plots.styled():
            figure = plots.new_figure(8, 4.5)
            draw(figure, table)
            if draw in (_draw_overhead, _draw_operations):
                figure.suptitle(model)
        written += plots.save_both(figure, folder / name)
    return written


# -- numbers ---------------------------------------------------------------------------------------------------------
def _streaming() -> Table:
    return [
        {
            "zeta_over_beta": x / 20,
            "target_over_draft": ratio,
            "speedup": round(streaming_speedup(x / 20, GAMMA, ratio), 4),
        }
        for ratio in RATIOS
        for x in range(10, 51)
    ]


def _t5() -> Table:
    names = ("task", "draft", "temperature", "gamma", "alpha", "c")
    return [
        {name: getattr(row, name) for name in names} | {"predicted": round(row.predicted, 4), "measured": row.speedup}
        for row in T5
    ]


def _counted(model: str) -> dict[str, DraftCost]:
    """Every method, and again with its rows riding on ``RIDING`` nodes if that changes its cost."""
    plain, riding = costs(model), costs(model, DraftShape(nodes=RIDING))
    more = {f"{name}, riding on {RIDING} nodes": riding[name] for name in plain if riding[name] != plain[name]}
    return plain | more


def _csv(table: Table) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


# -- pictures --------------------------------------------------------------------------------------------------------
def _draw_streaming(figure: Figure, table: Table) -> None:
    axes = figure.add_subplot()
    for ratio, colour in RATIOS.items():
        rows = [row for row in table if row["target_over_draft"] == ratio]
        axes.plot(
            [row["zeta_over_beta"] for row in rows],
            [row["speedup"] for row in rows],
            color=colour,
            label=f"target / draft latency {ratio}",
        )
    axes.axhline(1, color=GREY, linewidth=1, linestyle="--")
    axes.set_xlabel("mean acceptance length, draft model / Speculative Streaming (ζ / β)")
    axes.set_ylabel("speedup of Speculative Streaming over a draft model")
    axes.set_title(f"Speculative Streaming against a draft model, gamma = {GAMMA}")
    plots.grid(axes)
    axes.legend()


def _draw_t5(figure: Figure, table: Table) -> None:
    axes = figure.add_subplot()
    places = range(len(table))
    width = 0.38
    axes.bar([x - width / 2 for x in places], [r["predicted"] for r in table], width, color=BLUE, label="theory")
    axes.bar([x + width / 2 for x in places], [r["measured"] for r in table], width, color=ORANGE, label="measured")
    labels = [f"{r['task']}\n{r['draft']}\nT = {r['temperature']:g}" for r in table]
    axes.set_xticks(list(places), labels, fontsize=8)
    axes.set_ylabel("speedup")
    axes.set_title("T5-XXL with T5 draft models (Leviathan et al. 2023)")
    plots.grid(axes, "y")
    axes.legend()


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float], label: str) -> None:
    bars = axes.barh(names, values, color=BLUE)
    axes.bar_label(bars, labels=[_short(value) if value else "" for value in values], padding=3, fontsize=8)
    for place, value in enumerate(values):
        if not value:
            axes.text(0.01, place, "none", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set_xscale("log")
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    plots.grid(axes, "x")


def _short(value: float) -> str:
    return f"{value:.2e}" if value >= 1e5 else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _draw_overhead(figure: Figure, table: Table) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    rows = [row for row in table if "riding" not in row["method"]]  # riding changes neither parameters nor reads
    names = [row["method"] for row in rows]
    _bars(left, names, [row["parameters"] for row in rows], "additional parameters")
    _bars(right, names, [row["bytes_read"] / 1e6 for row in rows], "megabytes read per draft")
    right.invert_yaxis()  # once: the axis is shared


def _draw_operations(figure: Figure, table: Table) -> None:
    names = [row["method"] for row in table]
    _bars(figure.add_subplot(), names, [row["operations"] / 1e9 for row in table], "10⁹ operations per draft")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="write the figures and tables here")
    parser.add_argument("--model", default="Llama-2-13B", help="draw the cost figures for this model")
    parser.add_argument("--force", action="store_true", help="replace existing files")
    args = parser.parse_args()
    try:
        for path in write_figures(args.out, model=args.model, force=args.force):
            print(path)
    except AnabranchError as error:
        raise SystemExit(f"theory_figures.py: {error}") from error


if __name__ == "__main__":
    main()
