"""ACL table 4: speculation over a target of 8-bit and 4-bit weights."""

from __future__ import annotations

from functools import partial
from typing import Any

from studies.base import Chart, Line, Result, Setup, Study, Table, spread
from studies.speed import alone, by_name, facts

__all__ = ["PRINTED", "STUDY"]

SPEC = "streams:nodes=8"
PRINTED = {"none": ("FP16", 2.92), "int8": ("INT8", 2.84), "int4": ("INT4", 2.68)}  # speedup of SS-Shared


def _measure(setup: Setup) -> dict[str, Any]:
    by_weights = {}
    for weights in PRINTED:
        loaded = setup.load(quantize=weights)
        setup.report(f"weights: {weights}")
        by_weights[weights] = setup.part(weights, partial(alone, setup, loaded, {"streams": SPEC}))
        told = facts(setup, loaded)
    return {"by_weights": by_weights, **told}


def _streams(result: Result) -> dict[str, Any]:
    return {weights: by_name(records).get("streams") for weights, records in result["by_weights"].items()}


def _format(result: Result, weights: str) -> str:
    return {"bfloat16": "bf16"}.get(result["dtype"], str(result["dtype"])) if weights == "none" else weights


def _ours(result: Result) -> str:
    found = _streams(result).items()
    return ", ".join(f"{_format(result, weights)} {r['speedup_quartiles'][1]:.2f}x" for weights, r in found if r)


def _table(result: Result) -> Table:
    rows: list[list[object]] = []
    for weights, record in _streams(result).items():
        kind, printed = PRINTED[weights]
        plain = by_name(result["by_weights"][weights])["none"]
        measured = ["-"] * 3
        if record:
            speed = spread(record["speedup_quartiles"])
            measured = [f"{record['mean_acceptance_length']:.2f}", f"{record['tokens_per_second']:.1f}", speed]
        rows.append([_format(result, weights), f"{plain['tokens_per_second']:.1f}", *measured, f"{printed} ({kind})"])
    return (
        "weights",
        "plain tokens/s",
        "mean acceptance length",
        "tokens/s",
        "times plain (quartiles)",
        "the paper's",
    ), rows


def _chart(result: Result) -> Chart:
    found = {weights: record for weights, record in _streams(result).items() if record}
    names = [_format(result, weights) for weights in found]
    lines = [
        Line("ours", names, [record["speedup_quartiles"][1] for record in found.values()]),
        Line("the paper's", names, [PRINTED[weights][1] for weights in found]),
    ]
    return Chart("Quantised targets", "", "times plain decoding with the same weights", lines, kind="bars")


STUDY = Study(
    name="quantization",
    papers="ACL table 4",
    title="Quantised targets",
    measures="Tokens/s of streams with trees of 8 nodes over plain decoding with the same weights. The quantised "
    "model is the target: both decode its text.",
    paper="speedup 2.92 (FP16), 2.84 (INT8), 2.68 (INT4)",
    differs="Mistral-Instruct-7B tuned for text-to-SQL with bitsandbytes on a GPU there, and exact match, which is not "
    "measured here; the adapter is the one trained for the unquantised target",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
    suite="spec_bench",
)
