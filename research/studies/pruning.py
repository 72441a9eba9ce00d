"""ACL figure 13: what a tree adds to a chain, and pruning to a tree."""

from __future__ import annotations

from typing import Any

from studies.base import Chart, Line, Result, Setup, Study, Table, streams_of
from studies.speed import PLAIN, alone, by_name, facts, speed_table

__all__ = ["STUDY", "specs"]

DEPTH, CHILDREN, KEPT = 3, 3, 16


def specs(pruning: bool) -> dict[str, str]:
    """The shapes of drafts; pruned ones only if the adapter has a pruning layer."""
    tree = f"streams:tree=product,k={CHILDREN},depth={DEPTH}"
    found = {
        f"chain of {DEPTH}": f"streams:tree=chain,depth={DEPTH}",
        f"tree, k = {CHILDREN}": tree,
        f"pruned tree, k = {CHILDREN}, {KEPT} nodes": f"{tree},prune={KEPT}",
        f"pruned tree, k = {CHILDREN}, {KEPT // 2} nodes": f"{tree},prune={KEPT // 2}",
        "best-first tree, 8 nodes": "streams:nodes=8",
        "best-first tree, 16 nodes": "streams:nodes=16",
    }
    return found if pruning else {name: spec for name, spec in found.items() if "prune=" not in spec}


def _measure(setup: Setup) -> dict[str, Any]:
    loaded = setup.load()
    pruning = streams_of(loaded).prune is not None
    return {"pruning_layer": pruning, "records": alone(setup, loaded, specs(pruning)), **facts(setup, loaded)}


def _ours(result: Result) -> str:
    found = by_name(result["records"])
    shapes = [name for name in specs(result["pruning_layer"]) if name in found][:4]
    told = (f"{name}: {found[name]['speedup_quartiles'][1]:.2f}x" for name in shapes)
    return "; ".join(told) + ("" if result["pruning_layer"] else "; the adapter has no pruning layer")


def _table(result: Result) -> Table:
    return speed_table(result["records"])


def _chart(result: Result) -> Chart:
    found = [record for name, record in by_name(result["records"]).items() if name != PLAIN]
    names = [record["name"] for record in found]
    lines = [
        Line("mean acceptance length", names, [record["mean_acceptance_length"] for record in found]),
        Line("times plain decoding", names, [record["speedup_quartiles"][1] for record in found]),
    ]
    return Chart("Chain, tree, pruned tree", "", "", lines, kind="bars")


STUDY = Study(
    name="pruning",
    papers="ACL figure 13",
    title="Chain, tree, pruned tree",
    measures=f"Tokens a pass and tokens/s of a chain of {DEPTH} drafted tokens, of the full product tree of "
    f"{CHILDREN} children over {DEPTH} streams, and of that tree cut by the early-exit layer to {KEPT} and "
    f"{KEPT // 2} nodes; below them the best-first trees that are the default here. An adapter without a pruning "
    "layer leaves the pruned ones out (train one with `--pruning-rank 8`).",
    paper="no values in the text; each adds to the one before it, for Vicuna 7B, 13B and 33B",
    differs="the pruning layer drops all but the most probable nodes, where the paper's drops those below a "
    "threshold that is not printed; streams trail the pass, where the paper's ride in it; a CPU is near its "
    "arithmetic limit at widths that cost nothing on an A100",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
    suite="mt_bench",
)
