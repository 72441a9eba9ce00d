"""The part of docs/comparison.md on the order of methods by target: the same methods with the same number of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmark_tables import table
from comparison_tables import alone, newest_of_each
from larger_targets import TARGET, contenders

__all__ = ["lines"]

Result = Mapping[str, Any]
NODES = (8, 16)
SMALL, MIDDLE, LARGE = "135M", "0.5B", "1.5B"
LARGE_NODES = {  # by contender of ``bench``
    "streams:tree=8": ("streams", 8),
    "medusa:nodes=8": ("medusa", 8),
    "draft_model": ("draft_model", 16),
}


class Cell(NamedTuple):
    """A method on a target.

    draft   its size
    tokens  completion tokens seen in training, in millions; None for several trainings
    source  the result
    """

    draft: str
    length: float
    speedup: float
    tokens: float | None
    source: str


Cells = dict[tuple[str, int], dict[str, Cell]]  # by method and nodes, then by target


def lines(small: Mapping[str, Result], middle: Mapping[str, Result]) -> list[str]:
    """All lines: the table, its sources, and the order of methods that it gives.

    small, middle  results of ``compare_methods.py`` on the default model and on the 0.5B
    """
    found: Cells = {}
    for target, results in ((SMALL, small), (MIDDLE, middle)):
        for nodes in NODES:
            for name, cell in _newest(results, nodes):
                found.setdefault((name, nodes), {})[target] = cell
    for (name, nodes), cell in _large():
        found.setdefault((name, nodes), {})[LARGE] = cell
    shared = {key: cells for key, cells in sorted(found.items(), key=lambda each: each[0][1]) if len(cells) > 1}
    return [*_table(shared), *_sources(shared), *_orders(shared)]


def _newest(results: Mapping[str, Result], nodes: int) -> Iterator[tuple[str, Cell]]:
    """The methods with drafts of this size, each from the newest result that has it."""
    sized = {stem: result for stem, result in results.items() if nodes in result["run"]["budgets"]}
    for stem, result, method in newest_of_each(sized):
        run, where = result["run"], result["environment"]
        device = f"{where['kernels']} on two cores" if where["device"] == "cpu" else where["device"]
        source = f"`{stem}` ({device}, {run['limit']} prompts, {run['max_new_tokens']} new tokens)"
        for record in alone(method):
            if record["name"] in (f"{nodes} nodes", "as given"):
                facts = method["facts"]
                trained = facts.get("answer_tokens", 0) * facts.get("epochs", 0) / 1e6
                tokens = None if facts.get("init") else trained
                length, speedup = record["mean_acceptance_length"], record["speedup_total"]
                # a trained draft model is labelled with the name of its folder
                name = "draft_model" if method["name"] == "draft-model" else method["name"]
                yield name, Cell(record["name"], length, speedup, tokens, source)


def _large() -> Iterator[tuple[tuple[str, int], Cell]]:
    for stem, result, record, _ in contenders():
        run = result["run"]
        if run["model"] == TARGET and record["name"] in LARGE_NODES:
            source = f"`{stem}` ({run['prompts']} prompts, {run['max_new_tokens']} new tokens)"
            name, nodes = LARGE_NODES[record["name"]]
            length, speedup = record["mean_acceptance_length"], record["speedup_total"]
            yield (name, nodes), Cell(f"{nodes} nodes", length, speedup, None, source)


def _table(cells: Cells) -> list[str]:
    rows = []
    for (name, _), by_target in cells.items():
        row = [f"`{name}`", next(iter(by_target.values())).draft]
        for target in (SMALL, MIDDLE, LARGE):
            cell = by_target.get(target)
            row += ["-", "-"] if cell is None else [f"{cell.length:.2f}", f"{cell.speedup:.2f}"]
        tokens = [cell.tokens for target, cell in by_target.items() if target != LARGE]
        known = all(tokens) and len(tokens) == 2
        rows.append([*row, " and ".join(f"{each:.1f}" for each in tokens) if known else "-"])
    columns = [f"{target}: {title}" for target in (SMALL, MIDDLE, LARGE) for title in ("length", "times plain")]
    return table(["method", "draft", *columns, "M training tokens, 135M and 0.5B"], rows, left=2)


def _sources(cells: Cells) -> list[str]:
    sources: dict[str, None] = {}
    for (_, nodes), by_target in cells.items():
        sources |= {f"{target} with {nodes} nodes: {cell.source}": None for target, cell in by_target.items()}
    return [*(f"- {source}" for source in sources), ""]


def _orders(cells: Cells) -> list[str]:
    """The order, by length and by speed, of methods that were measured together on both targets, 135M and 0.5B."""
    groups: dict[tuple[int, str, str], dict[str, dict[str, Cell]]] = {}
    for (name, nodes), each in cells.items():
        if {SMALL, MIDDLE} <= each.keys():
            groups.setdefault((nodes, each[SMALL].source, each[MIDDLE].source), {})[name] = each
    found = []
    for (nodes, *sources), both in groups.items():
        if len(both) < 2:
            continue
        where = " and ".join(f"`{source.split('`')[1]}`" for source in sources)
        for what, field in (("length", "length"), ("speed", "speedup")):
            orders = [
                " > ".join(f"`{name}`" for name in sorted(both, key=lambda name: -getattr(both[name][target], field)))
                for target in (SMALL, MIDDLE)
            ]
            same = orders[0] == orders[1]
            text = f"{orders[0]} on both" if same else f"{orders[0]} on the {SMALL}, {orders[1]} on the {MIDDLE}"
            found.append(f"- By {what}, {nodes} nodes, in {where}: {text}.")
    return [*found, ""]
