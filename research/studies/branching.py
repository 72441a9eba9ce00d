"""ACL figure 10 (v1 figure 5): children per node, with and without pruning."""

from __future__ import annotations

from typing import Any

from studies.base import Chart, Line, Result, Setup, Study, Table, streams_of
from studies.pruning import KEPT
from studies.speed import alone, by_name, facts, speed_table

__all__ = ["STUDY", "specs"]

DEPTH = 3  # the paper's gamma
CHILDREN = (1, 2, 3, 4, 5)


def specs(pruning: bool) -> dict[str, str]:
    """Product trees of 1 + k + k^2 + k^3 nodes; those of more than ``KEPT`` nodes pruned, too."""
    trees = {k: f"streams:tree=product,k={k},depth={DEPTH}" for k in CHILDREN}
    found = {f"k = {k}": spec for k, spec in trees.items()}
    if pruning:
        wide = {k: spec for k, spec in trees.items() if sum(k**d for d in range(DEPTH + 1)) > KEPT}
        found |= {f"k = {k}, pruned to {KEPT}": f"{spec},prune={KEPT}" for k, spec in wide.items()}
    return found


def _measure(setup: Setup) -> dict[str, Any]:
    loaded = setup.load()
    pruning = streams_of(loaded).prune is not None
    return {"pruning_layer": pruning, "records": alone(setup, loaded, specs(pruning)), **facts(setup, loaded)}


def _best(result: Result, pruned: bool) -> str:
    found = [r for name, r in by_name(result["records"]).items() if name != "none" and ("pruned" in name) == pruned]
    best = max(found, key=lambda record: record["speedup_quartiles"][1], default=None)
    return "-" if best is None else f"{best['name']}: {best['speedup_quartiles'][1]:.2f}x"


def _ours(result: Result) -> str:
    return f"fastest without pruning: {_best(result, False)}; with it: {_best(result, True)}"


def _table(result: Result) -> Table:
    return speed_table(result["records"])


def _chart(result: Result) -> Chart:
    found, lines = by_name(result["records"]), []
    for label, suffix in (("full tree", ""), (f"pruned to {KEPT} nodes", f", pruned to {KEPT}")):
        points = [(k, found[f"k = {k}{suffix}"]) for k in CHILDREN if f"k = {k}{suffix}" in found]
        if points:
            children = [k for k, _ in points]
            lines += [
                Line(f"{label}: mean acceptance length", children, [r["mean_acceptance_length"] for _, r in points]),
                Line(f"{label}: times plain decoding", children, [r["speedup_quartiles"][1] for _, r in points]),
            ]
    return Chart("Children per node", "children per node k, three streams", "", lines)


STUDY = Study(
    name="branching",
    papers="ACL figure 10, v1 figure 5",
    title="Children per node, with and without pruning",
    measures=f"Tokens a pass and tokens/s of full product trees over {DEPTH} streams with k children per node, and of "
    f"the same cut to {KEPT} nodes by the early-exit layer.",
    paper="no values in the text; for gamma = 3, the speedup rises with k, then falls; pruning helps at large k",
    differs="the layer keeps a number of nodes, where the paper's threshold is not printed; a full tree is drafted "
    "before it is pruned, as in the paper",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
    suite="mt_bench",
)
