"""Write the table of docs/controller.md and its figures: the measured curves, and the choice that follows by load.

python research/controller_page.py            # write
python research/controller_page.py --check    # write nothing; exit 1 and name every file that would change

The table has every tuned constant with the comment beside it in the code, and the effect of other values from the
newest benchmarks/ablation-controller-*.json.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

from ablate_controller import BY_NAME, PASSES, YIELD, Simulated
from anabranch.control import choice, controller, costs
from anabranch.control.controller import Controller, DraftStats
from anabranch.control.costs import Costs, PassCosts, StepCosts
from benchmark_tables import table
from generated import PICTURES, ROOT, between, results, write_or_check

PAGE, SCRIPT = "docs/controller.md", "research/controller_page.py"
OTHERS = ("SECONDS", "CONTEXT", "LARGEST", "NOTHING")  # limits, and a value: not tuned
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#666666")
# streams of the default model on Spec-Bench by rank; the costs are those of a 7B shape on the same two cores
ACCEPTANCE = (0.64, 0.37, 0.27, 0.21, 0.18, 0.15, 0.14, 0.12, 0.11, 0.1, 0.09, 0.08, 0.07, 0.06, 0.05)
DRAFT = DraftStats(ACCEPTANCE, ACCEPTANCE, fixed_ms=14.0, node_ms=0.7, steps=99)
Points = Sequence[tuple[float, float]]


class Panel:
    """One pair of axes in an SVG image, drawn from the same numbers to the same bytes."""

    def __init__(self, left: int, title: str, xs: tuple[float, float], ys: tuple[float, float], labels: str) -> None:
        self.left, self.xs, self.ys, self.parts = left, xs, ys, list[str]()
        across, up = labels.split("|")
        self.text(left + 150, 24, title, "middle", 14)
        self.text(left + 150, 288, across, "middle")
        self.text(left, 44, up, "start")
        for i in range(5):
            x, y = (low + i * (high - low) / 4 for low, high in (xs, ys))
            self.text(self.x(x), 268, f"{x:g}", "middle")
            self.text(left - 6, self.y(y) + 4, f"{y:g}", "end")
            self.parts.append(f'<path d="M{left} {self.y(y):.1f}h300" stroke="#ddd"/>')

    def x(self, value: float) -> float:
        return self.left + 300 * (value - self.xs[0]) / (self.xs[1] - self.xs[0])

    def y(self, value: float) -> float:
        return 252 - 196 * (value - self.ys[0]) / (self.ys[1] - self.ys[0])

    def text(self, x: float, y: float, text: str, anchor: str, size: int = 11) -> None:
        self.parts.append(f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}">{text}</text>')

    def line(self, points: Points, colour: str, label: str = "", *, above: bool = False) -> None:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if label:
            x, y = self.x(points[-1][0]), self.y(points[-1][1])
            self.text(*((x + 16, y - 12, label, "end") if above else (x + 5, y + 4, label, "start")))

    def dot(self, x: float, y: float, colour: str) -> None:
        self.parts.append(f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="5" fill="{colour}"/>')


def image(width: int, label: str, panels: Sequence[Panel]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 300" role="img" aria-label="{label}" '
    body = "\n".join(part for panel in panels for part in panel.parts)
    text = f'{head}font-family="Helvetica, Arial, sans-serif" fill="#333">\n<rect width="{width}" height="300" '
    return f'{text}fill="white"/>\n{body}\n</svg>\n'


def constants() -> list[str]:
    """The lines of the table."""
    stem, result = max(results("ablation-controller-*.json").items())
    effects: dict[str, list[str]] = {}
    for row in result["ablation"]:
        effects.setdefault(row["constant"], []).append(f"{row['value']} {row['rate']:.3f} ({row['worst']:.2f})")
    rows = [("correction by yields", "see above", ", ".join(effects[YIELD]))]
    for module in (controller, costs, choice):
        for name, rest in re.findall(r"^([A-Z]+) = (.+)$", inspect.getsource(module), re.MULTILINE):
            if name in OTHERS:
                continue
            if "  # " not in rest:
                raise SystemExit(f"{name} in {module.__name__} has no comment on its line, which the table needs")
            rows.append((f"`{name}`", rest.partition("  # ")[2], ", ".join(effects.get(name, ("-",)))))
    return [f"From `benchmarks/{stem}.json`:", "", *table(("constant", "sets", "other values"), rows, left=3)]


def figures() -> dict[str, str]:
    """Both images by their paths from the root."""
    made = Controller(Costs(PassCosts(StepCosts.parse(PASSES["7B"]))), ragged=True)
    made.costs.saw_pass(made.costs.pass_ms(1, 1, 0.0), 1, 1, 0.0)
    nodes = range(1, 17)
    gains = [sum(ACCEPTANCE[: n - 1]) for n in nodes]
    left = Panel(
        50, "Acceptance of one row", (0, 16), (0, 3), "nodes of the draft, root included|expected draft tokens"
    )
    left.line([*zip(nodes, gains, strict=True)], COLOURS[0])
    right = Panel(430, "Cost of a step", (0, 64), (0, 600), "nodes of the pass|milliseconds")
    right.line([(n, made.costs.pass_ms(n, 1, 0.0)) for n in range(1, 65)], COLOURS[0], "pass")
    drafted = [(n, made.costs.pass_ms(n, 1, 0.0) + DRAFT.draft_ms(n, 1)) for n in range(2, 17)]
    right.line(drafted, COLOURS[1], "with a draft, 1 row", above=True)
    curves = image(790, "Acceptance by nodes, and cost by nodes", [left, right])

    panel = Panel(50, "Speedup over plain decoding, by load", (0, 16), (0, 3), "nodes of each row's draft|times")
    drafter = Simulated(BY_NAME["eagle"])  # it has no free parts, so a draft and none are the modes
    for colour, rows in zip(COLOURS, (1, 2, 4, 8, 16), strict=True):
        for mode in (0, 2):
            made._stats[drafter.name, mode, rows.bit_length()] = DRAFT if mode else DraftStats((), (), fixed_ms=0.5)
        plain = rows / (made.costs.pass_ms(rows, rows, 0.0) + 0.5 * rows)
        points = [(1.0, 1.0)]
        for n in nodes[1:]:
            ms = made.costs.pass_ms(rows * n, rows, 0.0) + DRAFT.draft_ms(n, rows)
            points.append((n, rows * (1 + gains[n - 1]) / ms / plain))
        panel.line([point for point in points if point[1] >= 0], colour)
        plan = made.plan({drafter: rows}, 0.0)[drafter]
        chosen = max(1, plan.nodes)
        panel.dot(chosen, points[chosen - 1][1], colour)
        said = f"{rows} row{'s' if rows > 1 else ''}: {plan.nodes or 'no'} nodes"
        panel.text(380, 60 + 20 * COLOURS.index(colour), said, "start", 12)
        panel.parts.append(
            f'<rect x="362" y="{50 + 20 * COLOURS.index(colour)}" width="12" height="12" fill="{colour}"/>'
        )
    load = image(520, "Speedup by nodes and number of rows, with the chosen number of nodes", [panel])
    return {f"{PICTURES}/controller-curves.svg": curves, f"{PICTURES}/controller-load.svg": load}


def outputs() -> dict[str, str]:
    """The text of every file that this script writes, by its path from the root."""
    marks = f"<!-- constants: {SCRIPT} -->", "<!-- end of constants -->"
    return figures() | {PAGE: between(PAGE, (ROOT / PAGE).read_text(encoding="utf-8"), marks, constants())}


if __name__ == "__main__":
    write_or_check(__file__, __doc__, outputs)
