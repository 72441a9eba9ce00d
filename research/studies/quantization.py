"""ACL table 4: speculation in shared mode over a target of 8-bit and 4-bit weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from anabranch.api import Model
from anabranch.bench.suites import Application
from anabranch.support.table import percent
from anabranch.tasks import sample
from studies.base import Chart, Line, Result, Setup, Study, Table, spread
from studies.speed import PLAIN, alone, by_name, facts
from task_scores import answers, compared, first_metric, quality_cells, quality_titles, scores_of

__all__ = ["PRINTED", "STUDY"]

SPEC = "streams:nodes=8"
TIMED = 60  # of the rows, whose decoding is timed, one at a time
PRINTED = {  # speedup and exact match of SS-Shared
    "none": ("FP16", 2.92, 84.50),
    "int8": ("INT8", 2.84, 83.89),
    "int4": ("INT4", 2.68, 82.11),
}


def _measure(setup: Setup) -> dict[str, Any]:
    application = setup.application
    by_weights, first = {}, {}
    for weights in PRINTED:
        setup.report(f"weights: {weights}")
        found = setup.part(weights, partial(_of, setup, application, weights))
        first = first or found["scores"]
        by_weights[weights] = {"records": found["records"], **compared(found["scores"], first)}
        told = found["facts"]
    return {"task": application.described(), "by_weights": by_weights, **told}


def _of(setup: Setup, application: Application, weights: str) -> dict[str, Any]:
    """Speed on some rows, and the scores of all by plain decoding, whose texts streams do not change."""
    loaded = setup.load(quantize=weights)
    timed = replace(application, rows=sample(application.rows, TIMED)).prompts
    records = alone(setup, loaded, {"streams": SPEC}, prompts=timed)
    with Model(loaded.target, loaded.adapters) as model:
        texts = [each.text for each in answers(model, application, setup.new)]
    return {"records": records, "scores": scores_of(application, texts), "facts": facts(setup, loaded, timed)}


def _streams(result: Result) -> dict[str, Any]:
    return {weights: by_name(found["records"]).get("streams") for weights, found in result["by_weights"].items()}


def _format(result: Result, weights: str) -> str:
    return {"bfloat16": "bf16"}.get(result["dtype"], str(result["dtype"])) if weights == "none" else weights


def _ours(result: Result) -> str:
    key, title = first_metric(result["task"])
    found = [(_format(result, weights), r) for weights, r in _streams(result).items() if r]
    speeds = ", ".join(f"{name} {r['speedup_quartiles'][1]:.2f}x" for name, r in found)
    scores = ", ".join(percent(each["quality"][key]) for each in result["by_weights"].values())
    return f"{speeds}; {title} {scores} %"


def _table(result: Result) -> Table:
    rows: list[list[object]] = []
    for weights, record in _streams(result).items():
        kind, printed, exact = PRINTED[weights]
        found = result["by_weights"][weights]
        measured = ["-"] * 3
        if record:
            speed = spread(record["speedup_quartiles"])
            measured = [f"{record['mean_acceptance_length']:.2f}", f"{record['tokens_per_second']:.1f}", speed]
        plain = by_name(found["records"])[PLAIN]
        row = [_format(result, weights), f"{plain['tokens_per_second']:.1f}", *measured]
        row += quality_cells(result["task"], found)
        rows.append([*row, f"{printed}, {exact:.2f} ({kind})"])
    titles = ["weights", "plain tokens/s", "mean acceptance length", "tokens/s", "times plain (quartiles)"]
    return [*titles, *quality_titles(result["task"]), "the paper's speedup and exact match"], rows


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
    measures="Tokens/s of streams with trees of 8 nodes over plain decoding with the same weights, on "
    f"{TIMED} of the test rows of text-to-SQL, and the quality of all. The target is tuned in shared mode, with "
    "equation 3, and quantised afterwards.",
    paper="speedup 2.92 (FP16), 2.84 (INT8), 2.68 (INT4); exact match 84.50, 83.89, 82.11",
    differs="Mistral-Instruct-7B quantised with bitsandbytes on a GPU there",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
    suite="sql",
    limit=1000,
    whole=True,
    command="python research/study.py quantization --model FILE.gguf --lora examples/sql-qwen2.5-coder-0.5b/lora "
    "--adapter examples/sql-qwen2.5-coder-0.5b --suite sql --data DIR "
    "--out benchmarks/study-quantization-qwen2.5-coder-0.5b-MACHINE-DATE.json",
)
