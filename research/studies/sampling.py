"""ACL figure 12b (v1 figure 9b): top-k sampling at temperature 1."""

from __future__ import annotations

from functools import partial
from typing import Any

from anabranch.options import Keywords
from studies.base import Chart, Line, Result, Setup, Study, Table, spread
from studies.speed import PLAIN, alone, by_name, facts

__all__ = ["STUDY", "specs"]

TOP = (1, 2, 5, 10, 20, 50)
REJECTION = "streams, chain, rejection"


def specs(methods: list[str]) -> dict[str, str]:
    """Streams by both rules, and the given other methods."""
    found = {"streams": "streams:nodes=8", REJECTION: "streams:tree=chain"}
    return found | {name: f"{name}:nodes=8" for name in methods if name != "streams"}


def _measure(setup: Setup) -> dict[str, Any]:
    loaded = setup.load()
    given = {each.method.name for each in setup.labelled(loaded.target).values()}
    drafters = specs([each.method.name for each in loaded.adapters if each.method.name in given])
    by_top = {}
    for top in TOP:
        name = f"top-k {top}"
        setup.report(name)
        sampling: Keywords = {"temperature": 1.0, "top_k": top, "seed": 0}
        measure = partial(alone, setup, loaded, drafters, sampling=sampling, rejection=(REJECTION,))
        by_top[str(top)] = setup.part(name, measure)
    return {"by_top": by_top, **facts(setup, loaded)}


def _ours(result: Result) -> str:
    ends = [(top, by_name(records)["streams"]) for top, records in result["by_top"].items()]
    named = (f"k = {top}: mean acceptance length {r['mean_acceptance_length']:.2f}" for top, r in (ends[0], ends[-1]))
    return "streams, " + ", ".join(named)


def _table(result: Result) -> Table:
    rows: list[list[object]] = []
    for top, records in result["by_top"].items():
        for name, record in by_name(records).items():
            if name != PLAIN:
                ratio = spread(record["speedup_quartiles"])
                rows.append([name, top, f"{record['mean_acceptance_length']:.2f}", ratio])
    rows.sort(key=lambda row: str(row[0]))
    return (
        "drafter",
        "top-k",
        "mean acceptance length (call reduction ratio)",
        "times plain decoding (quartiles)",
    ), rows


def _chart(result: Result) -> Chart:
    tops = [int(top) for top in result["by_top"]]
    found = [by_name(records) for records in result["by_top"].values()]
    names = [name for name in found[0] if name != PLAIN and all(name in each for each in found)]
    lines = [Line(name, tops, [each[name]["mean_acceptance_length"] for each in found]) for name in names]
    return Chart("Top-k sampling at temperature 1", "top-k", "mean acceptance length", lines)


STUDY = Study(
    name="sampling",
    papers="ACL figure 12b, v1 figure 9b",
    title="Top-k sampling at temperature 1",
    measures="Tokens a pass and tokens/s at temperature 1 with top-k sampling, by matching (the default; drafts know "
    "the random numbers of the target's draws) and by rejection of sampled chains (the paper's rule). Adapters of "
    "other methods, such as Medusa's heads, are added with `--adapter FOLDER`.",
    paper="no values in the text; the speedup falls as k grows, and stays above Medusa's",
    differs="another target, and open prompts in place of the meaning-representation task; matching draws with common "
    "random numbers, which the paper does not",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
    suite="spec_bench",
)
