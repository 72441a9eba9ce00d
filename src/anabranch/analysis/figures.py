"""The papers' figures of theory and cost, drawn from our own formulas and counts, each beside a table of its numbers.

v1 4, ACL 20  ``streaming_speedup``  Speculative Streaming over a draft model (eq. 10)
Leviathan     ``t5``                 the T5 experiments, predicted and measured
ACL 8         ``overhead``           parameters and memory traffic of a draft
ACL 9         ``operations``         arithmetic of a draft
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anabranch.analysis.cost import METHODS, Cost, Setting, costs
from anabranch.analysis.theory import T5, streaming_speedup
from anabranch.errors import CapabilityError
from anabranch.files import write_atomically

__all__ = ["check_matplotlib", "write_figures"]

RATIOS = (2, 5, 10, 20, 50, 100)  # target / draft latency
GAMMA = 4
RIDING = 32
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")  # Okabe and Ito's
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "svg.hashsalt": "anabranch",
}

Table = list[dict[str, Any]]


def check_matplotlib() -> None:
    """Raise CapabilityError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CapabilityError("figures need matplotlib; install it with pip install 'anabranch[figures]'") from error


def write_figures(folder: Path, *, model: str = "Llama-2-13B") -> list[Path]:
    """Write NAME.csv, NAME.png and NAME.svg of every figure into ``folder``; the cost figures are of ``model``."""
    check_matplotlib()
    counted = _counted(model)
    pages: dict[str, tuple[Table, Callable[[Any, Table], None]]] = {
        "streaming_speedup": (_streaming(), _draw_streaming),
        "t5": (_t5(), _draw_t5),
        "overhead": ([_overhead(name, found) for name, found in counted.items()], _draw_overhead),
        "operations": ([{"method": n, "operations": c.operations} for n, c in counted.items()], _draw_operations),
    }
    written = []
    for name, (table, draw) in pages.items():
        written.append(folder / f"{name}.csv")
        write_atomically(written[-1], _csv(table))
        for kind, data in _pictures(table, draw, model).items():
            written.append(folder / f"{name}.{kind}")
            write_atomically(written[-1], data)
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
    return [
        {
            "task": row.task,
            "draft": row.draft,
            "temperature": row.temperature,
            "gamma": row.gamma,
            "alpha": row.alpha,
            "c": row.c,
            "predicted": round(row.predicted, 4),
            "measured": row.speedup,
        }
        for row in T5
    ]


def _counted(model: str) -> dict[str, Cost]:
    found = costs(model)
    riding = costs(model, Setting(nodes=RIDING), methods=METHODS[-2:])
    return found | {f"{name}, riding on {RIDING} nodes": c for name, c in riding.items()}


def _overhead(name: str, found: Cost) -> dict[str, Any]:
    return {"method": name, "parameters": found.parameters, "bytes_read": found.read}


def _csv(table: Table) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


# -- pictures --------------------------------------------------------------------------------------------------------
def _pictures(table: Table, draw: Callable[[Any, Table], None], model: str) -> dict[str, bytes]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = {}
    with matplotlib.rc_context(STYLE):
        for kind in ("png", "svg"):
            figure = Figure(figsize=(8, 4.5), layout="constrained")
            FigureCanvasAgg(figure)
            draw(figure, table)
            if draw in (_draw_overhead, _draw_operations):
                figure.suptitle(model)
            data = io.BytesIO()
            figure.savefig(data, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
            found[kind] = data.getvalue()
    return found


def _draw_streaming(figure: Any, table: Table) -> None:
    axes = figure.add_subplot()
    for ratio, colour in zip(RATIOS, COLOURS, strict=True):
        rows = [row for row in table if row["target_over_draft"] == ratio]
        axes.plot(
            [row["zeta_over_beta"] for row in rows],
            [row["speedup"] for row in rows],
            color=colour,
            label=f"target / draft latency {ratio}",
        )
    axes.axhline(1, color="#888888", linewidth=1, linestyle="--")
    axes.set_xlabel("tokens a target pass, draft model / Speculative Streaming (ζ / β)")
    axes.set_ylabel("speedup of streams over a draft model")
    axes.set_title(f"Speculative Streaming against a draft model, gamma = {GAMMA}")
    axes.legend(frameon=False)


def _draw_t5(figure: Any, table: Table) -> None:
    axes = figure.add_subplot()
    places = range(len(table))
    width = 0.38
    axes.bar([x - width / 2 for x in places], [r["predicted"] for r in table], width, color=COLOURS[0], label="theory")
    axes.bar([x + width / 2 for x in places], [r["measured"] for r in table], width, color=COLOURS[4], label="measured")
    labels = [f"{r['task']}\n{r['draft']}\nT = {r['temperature']:g}" for r in table]
    axes.set_xticks(list(places), labels, fontsize=8)
    axes.set_ylabel("speedup")
    axes.set_title("T5-XXL with T5 draft models (Leviathan et al. 2023)")
    axes.legend(frameon=False)


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], label: str) -> None:
    bars = axes.barh(names, values, color=COLOURS[0])
    axes.bar_label(bars, labels=[_short(value) if value else "" for value in values], padding=3, fontsize=8)
    for place, value in enumerate(values):
        if not value:
            axes.text(0.01, place, "none", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set_xscale("log")
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel(label)


def _short(value: float) -> str:
    return f"{value:.2e}" if value >= 1e5 else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _draw_overhead(figure: Any, table: Table) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    rows = [row for row in table if "riding" not in row["method"]]  # riding reads and trains nothing more
    names = [row["method"] for row in rows]
    _bars(left, names, [row["parameters"] for row in rows], "parameters beside the target")
    _bars(right, names, [row["bytes_read"] / 1e6 for row in rows], "megabytes read a draft")
    right.invert_yaxis()  # shared, so turned once


def _draw_operations(figure: Any, table: Table) -> None:
    names = [row["method"] for row in table]
    _bars(figure.add_subplot(), names, [row["operations"] / 1e9 for row in table], "10⁹ operations a draft")
