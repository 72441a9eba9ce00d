"""Results of ``bench shapes`` as JSON values and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from anabranch.bench.shapes import Shape
from anabranch.support.table import Table, decimal, quartiles_cell

__all__ = ["LIMITS", "pass_costs", "shape_record", "shape_table"]

LIMITS = (1.1, 1.5)  # a pass over more nodes is called free up to the first, cheap up to the second


def shape_record(shape: Shape) -> dict[str, Any]:
    """The result as JSON values, for result files."""
    cells = dict.fromkeys((times.batch, times.context) for times in shape.times)
    return {
        "model": shape.model,
        "parameters": shape.parameters,
        "dtype": shape.dtype,
        "weights": shape.weights,
        "random": shape.random,
        "machine": shape.machine.to_dict(),
        "steps": [asdict(times) for times in shape.times],
        "first_nodes_over": [
            {"batch": batch, "context": context}
            | {f"{limit:g}": shape.first_over(batch, context, limit) for limit in LIMITS}
            for batch, context in cells
        ],
        "left_out": [{"batch": batch, "context": context, "why": why} for batch, context, why in shape.left_out],
        "ratios": shape.ratios(),
    }


def title_of(record: Mapping[str, Any]) -> str:
    """The model and the form of its weights, in words."""
    forms = {"none": record["dtype"], "stored": "as stored"}
    form = forms.get(record["weights"], record["weights"])
    return f"{record['model']}, {form}{', random weights' if record['random'] else ''}"


def pass_costs(records: Sequence[Mapping[str, Any]]) -> Table:
    """One line per model, batch and context, from ``shape_record``: a pass by its number of nodes, in plain steps."""
    passes = [[step for step in record["steps"] if step["kind"].startswith("verify ")] for record in records]
    widths = sorted({int(step["kind"].split()[1]) for steps in passes for step in steps})
    rows: list[list[object]] = []
    for record, steps in zip(records, passes, strict=True):
        for cell in record["first_nodes_over"]:
            here = {
                int(step["kind"].split()[1]): step["over_plain"]
                for step in steps
                if (step["batch"], step["context"]) == (cell["batch"], cell["context"])
            }
            plain = next(
                step["ms"][1]
                for step in record["steps"]
                if (step["kind"], step["batch"], step["context"]) == ("plain", cell["batch"], cell["context"])
            )
            ratios = [quartiles_cell(here[width]) if width in here else "" for width in widths]
            over = [cell[f"{limit:g}"] or f"> {max(here)}" for limit in LIMITS]
            where = [title_of(record), cell["batch"], f"{cell['context']:,}"]
            rows.append([*where, decimal(plain), *ratios, *over])
    titles = ("batch", "context", "ms, plain", *map(str, widths), *(f"over {limit:g} from" for limit in LIMITS))
    return Table(
        ["model", *titles], rows, "time of a pass of n nodes over that of a plain step, median (quartiles)", left=1
    )


def shape_table(shape: Shape) -> list[Table]:
    """Milliseconds by kind, one line per batch and context, and the ratios of methods if there are any."""
    kinds = list(dict.fromkeys(times.kind for times in shape.times))
    steps: list[list[object]] = []
    for batch, context in dict.fromkeys((times.batch, times.context) for times in shape.times):
        cells = (shape.find(batch, context, kind) for kind in kinds)
        steps.append([batch, f"{context:,}", *("" if cell is None else f"{cell.ms[1]:.2f}" for cell in cells)])
    steps += [[batch, f"{context:,}", f"left out: {why}"] for batch, context, why in shape.left_out]
    names = ("plain_over_floor", "over_plain", "tokens_a_step", "speedup", "speedup_in_the_paper")
    ratios = [
        [row["batch"], f"{row['context']:,}", row["method"], *(decimal(row[n]) if n in row else "" for n in names)]
        for row in shape.ratios()
    ]
    floor = f"{shape.machine.weight_mb / 1e3:.2f} GB of weights at {shape.machine.read_gb_s[1]:.1f} GB/s"
    titles = ("plain / floor", "method / plain", "mean acceptance length", "speedup", "the paper's")
    tables = [Table(["batch", "context", *kinds], steps, f"{shape.model}, ms per step (median); floor {floor}", left=0)]
    return tables + ([Table(["batch", "context", "method", *titles], ratios, left=3)] if ratios else [])
