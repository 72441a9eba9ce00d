"""ACL figure 13: what a tree adds to a chain, and pruning to a tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.methods.streams.adapter import StreamAdapter
from studies.base import Chart, Line, Result, Setup, Study, Table, streams_of
from studies.speed import PLAIN, alone, by_name, facts, speed_table

__all__ = ["KEPT", "LEAST", "RIDING", "STUDY", "riding", "specs"]

DEPTH, CHILDREN, KEPT = 3, 3, 16
LEAST = 0.05  # early-exit probability
DEEPER, MORE = 4, 32  # the paper keeps 32 nodes
RIDING = ", riding"


def riding(adapter: StreamAdapter, specs: Mapping[str, str]) -> dict[str, str]:
    """The same drafters with streams that ride in the pass; none if those of the adapter always do."""
    if adapter.config.main_attends == "own":
        return {}
    return {f"{name}{RIDING}": f"{spec},placement=ride" for name, spec in specs.items()}


def specs(adapter: StreamAdapter) -> dict[str, str]:
    """The shapes of drafts that the adapter supports; streams that can trail the pass do so, and ride in it besides."""
    name, tree = f"tree, k = {CHILDREN}", f"streams:tree=product,k={CHILDREN}"
    found = {f"chain of {DEPTH}": f"streams:tree=chain,depth={DEPTH}", name: f"{tree},depth={DEPTH}"}
    if adapter.prune is not None:
        found |= {f"pruned {name}, {kept} nodes": f"{tree},depth={DEPTH},prune={kept}" for kept in (KEPT, KEPT // 2)}
        found[f"pruned {name}, probability {LEAST}"] = f"{tree},depth={DEPTH},prune_threshold={LEAST}"
        if adapter.config.num_streams >= DEEPER:
            found[f"pruned {name}, depth {DEEPER}, {MORE} nodes"] = f"{tree},depth={DEEPER},prune={MORE}"
    best = {f"best-first tree, {nodes} nodes": f"streams:nodes={nodes}" for nodes in (8, 16)}
    return found | best | riding(adapter, found)


def _measure(setup: Setup) -> dict[str, Any]:
    loaded = setup.load()
    adapter = streams_of(loaded)
    records = alone(setup, loaded, specs(adapter))
    return {"pruning_layer": adapter.prune is not None, "records": records, **facts(setup, loaded)}


def _ours(result: Result) -> str:
    found = by_name(result["records"])
    shapes = [name for name in found if name != PLAIN][: 4 if result["pruning_layer"] else 2]
    told = (f"{name}: {found[name]['speedup_quartiles'][1]:.2f}x" for name in shapes)
    return "; ".join(told) + ("" if result["pruning_layer"] else "; the adapter has no pruning layer")


def _table(result: Result) -> Table:
    return speed_table(result["records"])


def _chart(result: Result) -> Chart:
    found = [record for name, record in by_name(result["records"]).items() if name != PLAIN and RIDING not in name]
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
    measures=f"Tokens a pass and tokens/s of a chain of {DEPTH} drafted tokens, and of the full product tree of "
    f"{CHILDREN} children over {DEPTH} streams. The early-exit layer prunes this tree to {KEPT} nodes, to "
    f"{KEPT // 2} nodes, or to the nodes whose early-exit probability given their parent is at least {LEAST}. The "
    f"tree over {DEEPER} streams is pruned to {MORE}. The last rows are the best-first trees that are the default "
    "here. Streams trail the pass unless the name says that they ride in it; those of the paper's shared form always "
    "ride. An adapter without a pruning layer leaves the pruned ones out (train one with `--pruning-rank 8`).",
    paper="no values in the text; each adds to the one before it, for Vicuna 7B, 13B and 33B",
    differs="the paper's threshold is not printed; a CPU is near its arithmetic limit at widths that cost nothing on "
    "an A100",
    ours=_ours,
    table=_table,
    chart=_chart,
    whole=True,
    measure=_measure,
    suite="mt_bench",
)
