"""Spector and Ré 2023, tables 1 and 2, figures 2 and 3: staged speculative decoding of code by three models."""

from __future__ import annotations

from functools import partial
from typing import Any

from anabranch.errors import InputError
from anabranch.options import Keywords
from studies.base import Chart, Line, Result, Setup, Study, Table, spread
from studies.speed import PLAIN, alone, by_name, facts

__all__ = ["STUDY", "specs"]

MODES: dict[str, Keywords] = {"greedy": {}, "top-k 50": {"temperature": 1.0, "top_k": 50, "seed": 0}}
CHAIN, TREE, STAGED = "draft model, chain", "draft model, tree", "staged"
# tokens/s, and bandwidth relative to plain decoding
PRINTED = {
    "greedy": {PLAIN: (150, 1.00), CHAIN: (350, 0.31), STAGED: (475, 0.23)},
    "top-k 50": {PLAIN: (150, 1.00), CHAIN: (219, 0.48), STAGED: (298, 0.35)},
}
NODES = 8


def specs(draft: str, table: str) -> dict[str, str]:
    """The standard method, its tree alone, and the tree with an n-gram model below the draft model."""
    inner = f"ngram:data={table}" if table else "prompt_lookup"
    tree = f"model={draft},nodes={NODES}"
    return {
        CHAIN: f"draft_model:model={draft},tree=chain,tokens=4",
        TREE: f"draft_model:{tree}",
        STAGED: f"staged:{tree},inner={inner}",
        f"{STAGED}, prompt lookup": f"staged:{tree},inner=prompt_lookup",
    }


def _measure(setup: Setup) -> dict[str, Any]:
    if not setup.draft:
        raise InputError("the study decodes a target by a smaller model; name it with --draft MODEL")
    loaded = setup.load()
    by_mode = {}
    for mode, sampling in MODES.items():
        setup.report(mode)
        measure = partial(alone, setup, loaded, specs(setup.draft, setup.table), sampling=sampling)
        by_mode[mode] = setup.part(mode, measure)
    return {"draft": setup.shown_draft, "table": bool(setup.table), "by_mode": by_mode, **facts(setup, loaded)}


def _ratio(found: dict[str, Any], name: str) -> str:
    speed, read = (found[name][key] / found[PLAIN][key] for key in ("tokens_per_second", "mb_read_per_token"))
    return f"{name}: {speed:.2f}x, {read:.3f} of the bytes"


def _ours(result: Result) -> str:
    told = []
    for mode, records in result["by_mode"].items():
        found = by_name(records)
        told.append(f"{mode}: " + "; ".join(_ratio(found, name) for name in (CHAIN, TREE, STAGED) if name in found))
    return ". ".join(told)


def _table(result: Result) -> Table:
    rows: list[list[object]] = []
    for mode, records in result["by_mode"].items():
        found = by_name(records)
        for name, record in found.items():
            printed = PRINTED[mode].get(name)
            theirs = "-" if printed is None else f"{printed[0] / PRINTED[mode][PLAIN][0]:.2f}, {printed[1]:.2f}"
            read = record["mb_read_per_token"]
            row = [mode, name, f"{record['mean_acceptance_length']:.2f}", f"{record['draft_calls_per_token']:.2f}"]
            row += [f"{record['tokens_per_second']:.1f}", spread(record["speedup_quartiles"])]
            rows.append([*row, f"{read:.0f} ({read / found[PLAIN]['mb_read_per_token']:.2f})", theirs])
    return (
        "decoding",
        "drafter",
        "mean acceptance length",
        "draft passes a token",
        "tokens/s",
        "times plain (quartiles)",
        "MB read a token (share of plain)",
        "theirs: times plain, share of bytes",
    ), rows


def _chart(result: Result) -> Chart:
    lines = []
    for mode, records in result["by_mode"].items():
        found = {name: record for name, record in by_name(records).items() if name != PLAIN}
        lines.append(Line(mode, list(found), [record["speedup_quartiles"][1] for record in found.values()]))
    return Chart("Staged speculative decoding", "", "times plain decoding", lines, kind="bars")


STUDY = Study(
    name="staged",
    papers="Spector and Ré tables 1 and 2, figure 2",
    title="Staged speculative decoding",
    measures="Tokens/s and bytes of weights read a token, over HumanEval, greedy and with top-k 50 at temperature 1: "
    f"a draft model with chains of 4 tokens, with best-first trees of {NODES} nodes, and with the same trees where a "
    "Katz trigram model, counted from text of the draft model, or prompt lookup, drafts for the draft model.",
    paper="greedy 150, 350, 475 tokens/s and 1, 0.31, 0.23 of the bytes; top-k 150, 219, 298 and 1, 0.48, 0.35",
    differs="two models of one family, of which the draft has a third of the target's parameters, where theirs has a "
    "nineteenth (762M and 40M); 4-bit weights; a CPU, on which wide passes take longer than narrow ones; matching in "
    "place of rejection where tokens are sampled; few prompts (theirs: all 164); a Katz model counted on far less text "
    "(theirs: 120 million tokens). The bytes with stages are those of the tree: the draft model's "
    "tree alone reads as little, and the n-gram stage below it saves next to nothing",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
    suite="humaneval",
    whole=True,
    command="python research/study.py staged --model TARGET --draft MODEL --table FOLDER --data DIR "
    "--out benchmarks/study-staged-DATE.json",
)
