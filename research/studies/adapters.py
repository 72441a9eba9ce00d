"""Shared-mode adapters side by side: ACL figures 11 (number of stream layers) and 12a (value rotation)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anabranch
from anabranch.adapters.folder import read_record
from anabranch.bench.suites import Application
from anabranch.errors import InputError
from anabranch.support.table import percent
from studies.base import Chart, Line, Result, Setup, Study, Table
from task_scores import Columns, answers, compared, first_metric, quality_cells, quality_titles, scores_of

__all__ = ["LAYERS", "ROTATION", "measure"]

DRAFTER = "streams:nodes=8"


def _decoded(setup: Setup, application: Application, folder: Path) -> tuple[Columns, float]:
    """Scores of the answers with an adapter, by column and row, and the mean acceptance length."""
    tuned = folder / "model"  # shared mode writes its target there
    name = tuned if tuned.is_dir() else setup.model
    with anabranch.load(name, adapter=folder, dtype=setup.dtype or "auto") as model:
        found = answers(model, application, setup.new, drafter=DRAFTER)
    tokens, steps = (sum(getattr(each.stats, name) for each in found) for name in ("tokens", "steps"))
    return scores_of(application, [each.text for each in found]), round(tokens / steps, 4)


def measure(setup: Setup) -> dict[str, Any]:
    """Quality and mean acceptance length on test rows of a task, by the folder of a training in shared mode.

    The first folder is the one that the others' quality is compared with.
    """
    if not setup.adapters:
        raise InputError("the study compares adapters; give each with --adapter LABEL=FOLDER (docs/reproduction.md)")
    application = setup.application
    records, first = [], {}
    for label, folder in setup.adapters.items():
        setup.report(f"decoding with {label}")
        scores, length = setup.part(label, partial(_decoded, setup, application, folder))
        first = first or scores
        record = read_record(folder)
        training, config = record["training"], record["config"]
        records.append(
            {
                "label": label,
                **{key: config[key] for key in ("num_stream_layers", "position", "rotation_step")},
                "parameters": record["parameters"],
                **{key: training.get(key) for key in ("examples", "steps", "command")},
                "mean_acceptance_length": length,
                **compared(scores, first),
            }
        )
    return {"drafter": DRAFTER, "task": application.described(), "records": records}


def _ours(result: Result) -> str:
    key, title = first_metric(result["task"])
    found = (
        f"{r['label']}: {title} {percent(r['quality'][key])} %, {r['mean_acceptance_length']:.2f} tokens a pass"
        for r in result["records"]
    )
    return "; ".join(found)


def _table(result: Result) -> Table:
    rows: list[list[object]] = []
    for r in result["records"]:
        row = [r["label"], r["num_stream_layers"], r["position"], f"{r['parameters']:,}"]
        rows.append([*row, f"{r['mean_acceptance_length']:.2f}", *quality_cells(result["task"], r)])
    titles = ["adapter", "stream layers", "streams told apart by", "parameters", "mean acceptance length, 8 nodes"]
    return [*titles, *quality_titles(result["task"])], rows


def _by_layers(result: Result) -> Chart:
    key, title = first_metric(result["task"])
    lines = []
    for position in dict.fromkeys(record["position"] for record in result["records"]):
        found = [r for r in result["records"] if r["position"] == position]
        found.sort(key=lambda r: r["num_stream_layers"])
        percents = [100 * r["quality"][key]["mean"] for r in found]
        lines.append(Line(position, [r["num_stream_layers"] for r in found], percents))
    return Chart("Stream layers", "stream layers N_s", f"{title}, %", lines)


TRAIN = "RANK=32 FORMAT=stored WORDS=8192 research/train_application sql DIR 800 SQL"
COMMAND = "python research/study.py {name} --suite sql --data DIR {adapters} --out benchmarks/study-{name}-DATE.json"
LAYERS = Study(
    name="layers",
    papers="ACL figure 11, v1 figure 6",
    title="Number of stream layers",
    measures="Quality on test rows of text-to-SQL, and tokens a pass with 8 nodes, of the paper's shared form "
    f"(equation 3) tuned with N_s stream layers on the same rows: `{TRAIN} paper-2 paper-8`.",
    paper="no values in the text; the task metrics of shared mode rise with the layers; 2 to 8 are recommended, 4 used",
    differs="a target of 135M parameters in place of OPT-1.3B; 800 rows, one epoch",
    ours=_ours,
    table=_table,
    chart=_by_layers,
    measure=measure,
    suite="sql",
    limit=500,
    whole=True,
    command=COMMAND.format(
        name="layers",
        adapters="--adapter 2=SQL/paper-2 --adapter 8=SQL/paper-8",
    ),
)
ROTATION = replace(
    LAYERS,
    name="rotation",
    papers="ACL figure 12a, v1 figure 9a",
    title="Value rotation in place of stream embeddings",
    measures="The same two measures, for streams told apart by stream embeddings and by values that are rotated by "
    f"pi / 2N a stream, with N = 256, which no row reaches (ACL eq. 8): `ANGLE=0.006136 {TRAIN} paper-2 "
    "paper-rotation-2`.",
    paper="no values in the text; rotation stays below stream embeddings at the same number of layers; with "
    "16 layers it is above embeddings with 4",
    chart=None,
    differs="text-to-SQL in place of summaries; a target of 135M parameters in place of OPT-1.3B; 800 rows, one epoch",
    command=COMMAND.format(
        name="rotation",
        adapters="--adapter embeddings=SQL/paper-2 --adapter rotation=SQL/paper-rotation-2",
    ),
)
