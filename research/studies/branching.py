"""ACL figure 10 (v1 figure 5): children per node, with and without pruning."""

from __future__ import annotations

from typing import Any

from anabranch.methods.streams.adapter import StreamAdapter
from studies.base import Chart, Line, Result, Setup, Study, Table, streams_of
from studies.pruning import KEPT, LEAST, riding
from studies.speed import alone, by_name, facts, speed_table

__all__ = ["STUDY", "specs"]

DEPTH = 3  # the paper's gamma
CHILDREN = (1, 2, 3, 4, 5)
CUT = {f", pruned to {KEPT}": f",prune={KEPT}", f", probability {LEAST}": f",prune_threshold={LEAST}"}


def specs(adapter: StreamAdapter) -> dict[str, str]:
    """Product trees of 1 + k + k^2 + k^3 nodes; those of more than ``KEPT`` nodes pruned, too.

    Streams that can trail the pass do so, and those of pruned trees ride in it besides.
    """
    trees = {k: f"streams:tree=product,k={k},depth={DEPTH}" for k in CHILDREN}
    found = {f"k = {k}": spec for k, spec in trees.items()}
    if adapter.prune is not None:
        wide = {k: spec for k, spec in trees.items() if sum(k**d for d in range(DEPTH + 1)) > KEPT}
        pruned = {f"k = {k}{name}": spec + cut for name, cut in CUT.items() for k, spec in wide.items()}
        found |= pruned | riding(adapter, pruned)
    return found


def _measure(setup: Setup) -> dict[str, Any]:
    loaded = setup.load()
    adapter = streams_of(loaded)
    records = alone(setup, loaded, specs(adapter))
    return {"pruning_layer": adapter.prune is not None, "records": records, **facts(setup, loaded)}


def _best(result: Result, pruned: bool) -> str:
    found = [r for name, r in by_name(result["records"]).items() if name != "none" and ("," in name) == pruned]
    best = max(found, key=lambda record: record["speedup_quartiles"][1], default=None)
    return "-" if best is None else f"{best['name']}: {best['speedup_quartiles'][1]:.2f}x"


def _ours(result: Result) -> str:
    return f"fastest without pruning: {_best(result, False)}; with it: {_best(result, True)}"


def _table(result: Result) -> Table:
    return speed_table(result["records"])


def _chart(result: Result) -> Chart:
    found, lines = by_name(result["records"]), []
    for suffix in ("", *CUT):
        label = suffix.removeprefix(", ") or "full tree"
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
    f"the same trees when the early-exit layer prunes them to {KEPT} nodes, or to the nodes whose probability given "
    f"their parent is at least {LEAST}. Streams trail the pass unless the name says that they ride in it; those of the "
    "paper's shared form always ride.",
    paper="no values in the text; for gamma = 3, the speedup rises with k, then falls; pruning helps at large k",
    differs="the paper's threshold is not printed; a full tree is drafted before it is pruned, as in the paper",
    ours=_ours,
    table=_table,
    chart=_chart,
    whole=True,
    measure=_measure,
    suite="mt_bench",
)
