"""Figures of a result: speedup by task, acceptance by depth, time by part, tokens/s against the memory floor.

A figure shows at most ten contenders (``leading``) and notes how many were left out; the tables list them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.bench.journal import beside
from anabranch.support import plots
from anabranch.support.plots import BLUE, GREEN, GREY, INK, LINES, ORANGE, PINK, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FIGURES", "MOST", "draw", "leading", "save_figures"]

MOST = 10  # maximum number of contenders in a figure
PARTS = {"forward": BLUE, "draft": ORANGE, "prepare": GREEN, "verify": PINK, "commit": GREY}
Records = list[dict[str, Any]]


def leading(records: Records, limit: int = MOST) -> Records:
    """Choose at most ``limit`` records, in order: the first one, then alternately the fastest remaining of each kind.

    Kinds are our contenders by weight format, and peers.
    """
    if len(records) <= limit:
        return records
    kinds: dict[tuple[str, str], Records] = {}
    for record in sorted(records[1:], key=lambda record: -float(record["tokens_per_second"])):
        kind = (record["kind"], record.get("weights", "") if record["kind"] == "ours" else "")
        kinds.setdefault(kind, []).append(record)
    in_turn = [record for turn in zip_longest(*kinds.values()) for record in turn if record is not None]
    chosen = {record["name"] for record in [records[0], *in_turn[: limit - 1]]}
    return [record for record in records if record["name"] in chosen]


def draw(result: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw the figures of a result, by name, omitting empty ones, for the contenders that decoded all prompts."""
    records = [record for record in result["contenders"] if "error" not in record and "every" not in record]
    with plots.styled():
        drawn = {name: make(result, records) for name, make in FIGURES.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def save_figures(result: Mapping[str, Any], out: Path) -> list[Path]:
    """Write every figure as FILE.NAME.png and FILE.NAME.svg; returns the paths."""
    return [path for name, figure in draw(result).items() for path in plots.save_both(figure, beside(out, f".{name}"))]


def _most(records: Records, eligible: Records) -> str:
    """A note that not all ``eligible`` contenders are shown; empty if they are."""
    if len(records) == len(eligible):
        return ""
    return f"{len(records)} of {len(eligible)} contenders: the first, and the fastest of each kind"


def _figure(result: Mapping[str, Any], title: str, width: float, height: float, *notes: str) -> Figure:
    """A figure with ``title`` above it, and below it what was measured and ``notes``."""
    figure = plots.new_figure(width, height)
    run, where = result["run"], result["environment"]
    sampling = "greedy" if run["temperature"] == 0 else f"T = {run['temperature']:g}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    figure.supxlabel(
        f"{run['suite']}, {result['prompts_done']} prompts, {run['max_new_tokens']} new tokens, {sampling}, "
        f"{run['dtype']}, batch 1; {where['processor']}, threads: {where['threads']}; {where['date']}"
        + "".join(f"\n{note}" for note in notes if note),
        x=0.01,
        ha="left",
        fontsize=8,
        color=GREY,
    )
    return figure


def _rows(axes: Axes, names: list[str]) -> None:
    """Label the y axis with contenders, the first on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    plots.grid(axes, "x")


def _colour(record: Mapping[str, Any]) -> str:
    return BLUE if record["kind"] == "ours" else ORANGE


def _speedup(result: Mapping[str, Any], records: Records) -> Figure | None:
    """One panel per task: median and quartiles over its prompts of the speedup over plain decoding."""
    baseline = result["run"]["baseline"]
    eligible = [r for r in records if "speedup_quartiles" in r and r["name"] != baseline]
    if not eligible:
        return None
    records = leading(eligible)
    tasks = list(records[0]["by_task"])
    panels = [("all prompts", records)]
    if len(tasks) > 1:
        panels += [(task, [r["by_task"][task] for r in records]) for task in tasks]
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    peers = any(record["kind"] == "peer" for record in records)
    figure = _figure(
        result,
        "Speedup over plain decoding, by task",
        max(8.5, 2.6 + 2.3 * columns),  # wide enough for the title and the caption
        1.2 + lines * (0.75 + 0.3 * len(records)),
        "bars: quartiles of the prompts" + ("; circles: anabranch; diamonds: peers" if peers else ""),
        _most(records, eligible),
    )
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(panels):
            axes.set_visible(False)
            continue
        task, parts = panels[place]
        _rows(axes, [record["name"] for record in records])
        axes.axvline(1.0, color=INK, linewidth=1, zorder=1)
        for y, (record, part) in enumerate(zip(records, parts, strict=True)):
            low, middle, high = part["speedup_quartiles"]
            axes.plot([low, high], [y, y], color=_colour(record), linewidth=2.5, alpha=0.45, solid_capstyle="round")
            axes.plot(middle, y, "o" if record["kind"] == "ours" else "D", color=_colour(record), markersize=6)
            axes.annotate(
                f"{middle:.2f}",
                (middle, y),
                (0, 6),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=7.5,
                bbox={"boxstyle": "square,pad=0.1", "color": "white"},
                zorder=1.5,
            )
        axes.margins(x=0.12)
        axes.set_title(task.replace("_", " "))
        if place + columns >= len(panels):
            axes.tick_params(axis="x", labelbottom=True)
            axes.set_xlabel("times plain decoding")
    return figure


def _acceptance(result: Mapping[str, Any], records: Records) -> Figure | None:
    """One line per method: the share of steps that accepted at least n draft tokens."""
    eligible = [record for record in records if record.get("acceptance_by_depth")]
    if not eligible:
        return None
    records = leading(eligible)
    figure = _figure(result, "Acceptance by depth", 8, 4.6, _most(records, eligible))
    axes = figure.subplots()
    deepest = min(10, max(len(record["acceptance_by_depth"]) for record in records))
    for place, record in enumerate(records):
        colour, marker = LINES[place % len(LINES)]
        shares = [100 * share for share in record["acceptance_by_depth"][:deepest]]
        label = f"{record['name']}: {record['mean_acceptance_length']:.2f} mean acceptance length"
        dashes = "-" if place < len(LINES) else "--"
        axes.plot(range(1, len(shares) + 1), shares, dashes, color=colour, marker=marker, linewidth=2, label=label)
    axes.set_xticks(range(1, deepest + 1))
    axes.set_xlabel("minimum number of accepted draft tokens")
    axes.set_ylabel("steps with a draft (%)")
    axes.set_ylim(0, 100)
    plots.grid(axes)
    axes.legend(fontsize=9)
    return figure


def _time(result: Mapping[str, Any], records: Records) -> Figure | None:
    """One stacked bar per method: milliseconds per token by part, and the floor of plain decoding."""
    eligible = [record for record in records if "token_ms_by_part" in record]
    if not eligible:
        return None
    records = leading(eligible)
    title = "Time per token by part"
    figure = _figure(result, title, 8.5, 1.9 + 0.42 * len(records), _most(records, eligible))
    axes = figure.subplots()
    _rows(axes, [record["name"] for record in records])
    ends = [0.0] * len(records)
    for part, colour in PARTS.items():
        widths = [record["token_ms_by_part"].get(part, 0.0) for record in records]
        axes.barh(range(len(records)), widths, left=ends, color=colour, height=0.62, edgecolor="white", label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for y, end in enumerate(ends):
        axes.annotate(f"{end:.1f}", (end, y), (4, 0), textcoords="offset points", va="center", fontsize=9)
    floor = result["machine"]["floor_ms"]
    axes.axvline(floor, color=RED, linewidth=1.5, linestyle="--", label=f"floor of plain decoding ({floor:.1f})")
    axes.set_xlim(0, 1.1 * max([*ends, floor]))
    axes.set_xlabel("milliseconds per new token, without the prompt")
    handles, labels = axes.get_legend_handles_labels()
    order = [*range(1, len(handles)), 0]  # matplotlib lists the line first; list it last
    axes.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        fontsize=9,
        ncols=len(handles),
    )
    return figure


def _floor(result: Mapping[str, Any], records: Records) -> Figure | None:
    """Tokens/s while decoding and including the prompt, and the limit set by reading all weights for each token."""
    if not records:
        return None
    eligible, records = records, leading(records)
    title = "Tokens per second, and the limit set by memory"
    figure = _figure(result, title, 8.5, 2.1 + 0.42 * len(records), _most(records, eligible))
    axes = figure.subplots()
    _rows(axes, [record["name"] for record in records])
    limit = 1e3 / result["machine"]["floor_ms"]
    most = limit
    for y, record in enumerate(records):
        middle = record["token_ms_quartiles"]
        whole = record["tokens_per_second"]
        decoding = whole if middle is None else 1e3 / middle[1]
        if middle is not None:
            axes.barh(y, decoding, color=_colour(record), height=0.62, alpha=0.85)
        axes.plot(whole, y, "o", color="white", markeredgecolor=INK, markersize=7)
        right = max(decoding, whole)
        most = max(most, right)
        axes.annotate(f"{decoding:.0f}", (right, y), (7, 0), textcoords="offset points", va="center", fontsize=9)
    axes.axvline(limit, color=RED, linewidth=1.5, linestyle="--")
    axes.annotate(
        f"every weight read once per token: {limit:.0f} tokens/s",
        (limit, 1.0),
        (-4, 3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right",
        color=RED,
        fontsize=9,
    )
    axes.set_xlim(0, 1.1 * most)
    axes.set_xlabel("new tokens per second (bar: while decoding; circle: including the prompt)")
    return figure


FIGURES: dict[str, Callable[[Mapping[str, Any], Records], Figure | None]] = {
    "speedup": _speedup,
    "acceptance": _acceptance,
    "time": _time,
    "floor": _floor,
}
