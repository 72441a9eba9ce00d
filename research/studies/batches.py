"""ACL figure 18: speedup over plain decoding with 1 to 16 rows at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

from anabranch.methods import parse_spec
from case_parts import several_rows
from studies.base import Chart, Line, Result, Setup, Study, Table, spread
from studies.speed import PLAIN, facts

__all__ = ["STUDY"]

ROWS = (1, 2, 4, 8, 16)
SPECS = {"streams, chain": "streams:tree=chain", "streams, size by load": "streams:tree=auto"}
KEPT = ("name", "rows", "tokens_per_second", "ratio", "mean_acceptance_length", "draft_nodes_per_step", "error")


def _measure(setup: Setup) -> dict[str, Any]:
    loaded = setup.load()
    prompts, records = setup.encoded(loaded.target), []
    specs = {name: parse_spec(spec) for name, spec in SPECS.items()}
    for rows in [rows for rows in ROWS if rows <= len(prompts)]:
        setup.report(f"{rows} rows")
        settings: dict[str, Any] = {"rows": rows, "max_new_tokens": setup.new, "repeats": 2, "report": setup.report}
        records += setup.part(f"{rows} rows", partial(several_rows, loaded, specs, prompts, **settings))
    return {"records": [{key: r[key] for key in KEPT if key in r} for r in records], **facts(setup, loaded)}


def _measured(result: Result) -> list[Any]:
    return [record for record in result["records"] if "error" not in record and record["name"] != PLAIN]


def _ours(result: Result) -> str:
    told = (
        f"{r['rows']} rows: {r['ratio'][1]:.2f}x" for r in _measured(result) if r["name"] == "streams, size by load"
    )
    return ", ".join(told)


def _table(result: Result) -> Table:
    rows: list[list[object]] = [
        [
            r["name"],
            r["rows"],
            f"{r['tokens_per_second'][1]:.1f}",
            f"{r['mean_acceptance_length']:.2f}",
            spread(r["ratio"]),
        ]
        for r in _measured(result)
    ]
    return ("drafter", "rows", "tokens/s", "mean acceptance length", "times plain decoding (range)"), sorted(
        rows, key=lambda row: str(row[0])
    )


def _chart(result: Result) -> Chart:
    lines = []
    for name in SPECS:
        points = [record for record in _measured(result) if record["name"] == name]
        lines.append(Line(name, [r["rows"] for r in points], [r["ratio"][1] for r in points]))
    return Chart("Several prompts at a time", "rows decoded at a time", "times plain decoding", lines)


STUDY = Study(
    name="batches",
    papers="ACL figure 18",
    title="Batch sizes from 1 to 16",
    measures="Throughput over plain decoding at the same number of rows: of chains of the most probable tokens, as "
    "in the paper, and of trees whose size follows the load. Drafters and plain decoding take turns, twice.",
    paper="no values in the text but that all stay above 2 times plain decoding, on an A100",
    differs="a small target on a CPU, on which a few rows are enough arithmetic to leave none idle",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
    suite="mt_bench",
    limit=16,
    new=64,
)
