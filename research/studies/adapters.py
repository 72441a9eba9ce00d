"""Adapters side by side, by replay: ACL figures 11 (number of stream layers) and 12a (value rotation)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anabranch.drafting.replay import replay_all
from anabranch.errors import InputError
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import StreamDraft, StreamSettings
from anabranch.methods.streams.objective import StreamObjective
from studies.base import Chart, Line, Result, Setup, Study, Table, rounded

__all__ = ["LAYERS", "ROTATION", "measure"]

DRAFTS = {"chain": StreamSettings(tree="chain"), "tree of 8 nodes": StreamSettings(nodes=8)}


def measure(setup: Setup) -> dict[str, Any]:
    """Predicted mean acceptance length and accuracy by stream of every adapter on the target's own completions."""
    target = setup.target(pack=False, dtype="float32")
    adapters = setup.labelled(target)
    if not adapters:
        raise InputError("the study compares adapters; give each with --adapter LABEL=FOLDER (docs/reproduction.md)")
    if other := [label for label, each in adapters.items() if not isinstance(each.module, StreamAdapter)]:
        raise InputError(f"the adapter {other[0]!r} is not one of the method streams; leave it out")
    examples, records = setup.answers(), []
    for label, each in adapters.items():
        setup.report(f"replaying with {label}")
        module = each.module
        assert isinstance(module, StreamAdapter)
        drafts = {name: StreamDraft(target.decoder, module, options) for name, options in DRAFTS.items()}
        totals, accuracy = replay_all(StreamObjective(target.decoder, module), drafts, examples, rows=4)
        records.append(
            {
                "label": label,
                "num_stream_layers": module.shape.num_stream_layers,
                "position": module.shape.position,
                "parameters": module.num_parameters(),
                "training": each.record["training"].get("command", ""),
                "top_1": rounded(accuracy.shares()[0]),
                **{name: round(total.mean_acceptance_length, 4) for name, total in totals.items()},
            }
        )
    tokens = sum(len(example.answer_ids) for example in examples)
    return {"records": records, "texts": len(examples), "tokens": tokens}


def _ours(result: Result) -> str:
    return ", ".join(
        f"{record['label']}: mean acceptance length {record['tree of 8 nodes']:.2f}" for record in result["records"]
    )


def _table(result: Result) -> Table:
    rows: list[list[object]] = [
        [
            r["label"],
            r["num_stream_layers"],
            r["position"],
            f"{r['parameters']:,}",
            *(f"{r[name]:.2f}" for name in DRAFTS),
            " ".join(f"{share:.2f}" for share in r["top_1"]),
        ]
        for r in result["records"]
    ]
    titles = ("adapter", "stream layers", "streams told apart by", "parameters", *DRAFTS, "top-1 by stream")
    return titles, rows


def _by_layers(result: Result) -> Chart:
    kinds = dict.fromkeys(record["position"] for record in result["records"])
    lines = []
    for position in kinds:
        found = sorted(
            (r for r in result["records"] if r["position"] == position), key=lambda r: r["num_stream_layers"]
        )
        for name in DRAFTS:
            label = name if len(kinds) == 1 else f"{position}: {name}"
            lines.append(Line(label, [r["num_stream_layers"] for r in found], [r[name] for r in found]))
    return Chart("Stream layers", "stream layers N_s", "predicted mean acceptance length", lines)


TRAIN = "anabranch train streams --answers answers.jsonl --recipe small"
LAYERS = Study(
    name="layers",
    papers="ACL figure 11, v1 figure 6",
    title="Number of stream layers",
    measures="Tokens a pass and top-1 accuracy by stream, predicted by replaying the target's own completions, of "
    f"adapters that differ in N_s. Train one for each N with `{TRAIN} --stream-layers N --out LAYERS-N`, on the same "
    "completions and for as long (`anabranch train answers` writes them).",
    paper="no values in the text; the task metrics of shared mode rise with the layers; 2 to 8 are recommended, 4 used",
    differs="the paper shows the quality of shared mode; a lossless adapter leaves quality as it is, so this is "
    "acceptance",
    ours=_ours,
    table=_table,
    chart=_by_layers,
    measure=measure,
    suite="spec_bench",
    limit=26,
    command="python research/study.py layers --adapter 2=LAYERS-2 --adapter 4=LAYERS-4 --adapter 8=LAYERS-8 --data DIR "
    "--out benchmarks/study-layers-DATE.json",
)
ROTATION = replace(
    LAYERS,
    name="rotation",
    papers="ACL figure 12a, v1 figure 9a",
    title="Value rotation in place of stream embeddings",
    measures="The same of adapters whose streams are told apart by rotated values (ACL eq. 8) and by stream "
    f"embeddings. Train one of each with `{TRAIN} --stream-layers N`, with and without `--position rotation`.",
    paper="no values in the text; rotation stays below stream embeddings at the same number of layers; with "
    "16 layers it is above embeddings with 4",
    command="python research/study.py rotation --adapter embeddings=LAYERS-4 --adapter rotation=ROTATION-4 --data DIR "
    "--out benchmarks/study-rotation-DATE.json",
)
