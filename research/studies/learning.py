"""Learning curves of trained methods on the same completions, from the logs of their trainings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anabranch.adapters.folder import read_record
from anabranch.errors import InputError
from anabranch.train.checkpoint import read_log
from studies.base import Chart, Line, Result, Setup, Study, Table

__all__ = ["ADDED", "COMPARED", "LARGER", "PARTS", "STORED", "STUDY"]

POINTS = 12  # of a run, over whose lines the loss is averaged
SIZES = ("4 nodes", "8 nodes")
STEADY = 0.01  # a gain below this share is none


def _curve(record: dict[str, Any], log: list[dict[str, Any]]) -> dict[str, Any]:
    """Loss by tokens seen, averaged in parts of the run, and the held-out evaluations, the last at its end."""
    training, measured = record["training"], record["measured"]
    tokens = training["options"]["epochs"] * training["answer_tokens"] / log[-1]["steps"]
    size, losses = max(1, len(log) // POINTS), []
    for first in range(0, len(log), size):
        part = log[first : first + size]
        losses.append([round(part[-1]["step"] * tokens), round(sum(line["loss"] for line in part) / len(part), 4)])
    lengths, steps = measured["predicted mean acceptance length"], training["steps"]
    seen = [(line["step"], line["evaluation"]["tree"]) for line in log if line["evaluation"] and line["step"] < steps]
    (accuracy,) = (value for name, value in measured.items() if name.startswith("accuracy by"))
    return {
        "steps": steps,
        "tokens": round(steps * tokens),
        "losses": losses,
        "held_out": [[round(step * tokens), length] for step, length in [*seen, (steps, lengths["tree"])]],
        "by_nodes": {name: lengths[name] for name in SIZES if name in lengths} | {"16 nodes": lengths["tree"]},
        "chain": lengths["chain"],
        "top_1": accuracy["best token"],
    }


def _measure(setup: Setup) -> dict[str, Any]:
    if not setup.adapters:
        raise InputError("the study reads adapters' logs; give each with --adapter LABEL=FOLDER (docs/reproduction.md)")
    curves, data = {}, set()
    for label, folder in setup.adapters.items():
        record, log = read_record(folder), read_log(folder / "training")
        if not log or "predicted mean acceptance length" not in record["measured"]:
            raise InputError(f"{folder} has no log of a training with examples held out; train it with --held-out N")
        training = record["training"]
        data.add(training["data_sha256"])
        about = {"method": record["method"], "parameters": record["parameters"], "command": training["command"]}
        curves[label] = about | {"words": record["draft_vocabulary"]} | _curve(record, log)
    if len(data) > 1:
        raise InputError("the adapters were trained on different completions; give those of one file of completions")
    (examples,) = data
    return {"adapters": curves, "data_sha256": examples, "answer_tokens": training["answer_tokens"]}


def _grows(curve: Result) -> bool:
    """Return whether the last fifth of the tokens brought a gain."""
    *_, (tokens, last) = curve["held_out"]
    before = [length for seen, length in curve["held_out"] if seen <= 0.8 * tokens]
    return not before or last > (1 + STEADY) * before[-1]


def _ours(result: Result) -> str:
    lengths = (f"{name} {curve['held_out'][-1][1]:.2f}" for name, curve in result["adapters"].items())
    return f"predicted mean acceptance length at 16 nodes: {', '.join(lengths)}"


def _table(result: Result) -> Table:
    rows: list[list[object]] = []
    for name, curve in result["adapters"].items():
        lengths = ", ".join(f"{length:.2f} at {seen:,}" for seen, length in curve["held_out"])
        ends = f"{curve['losses'][0][1]:.2f} to {curve['losses'][-1][1]:.2f}"
        row = [f"`{name}`", f"{curve['parameters']:,}", f"{curve['tokens']:,}", ends, lengths]
        row += ["rising" if _grows(curve) else "level", f"{curve['chain']:.2f}"]
        rows.append([*row, " ".join(f"{share:.2f}" for share in curve["top_1"])])
    return (
        "method",
        "parameters",
        "completion tokens seen",
        "loss",
        "held-out length at 16 nodes, by tokens seen",
        "in the last fifth",
        "length of a chain",
        "accuracy by token",
    ), rows


def _chart(result: Result) -> Chart:
    lines = [Line(name, *zip(*curve["held_out"], strict=True)) for name, curve in result["adapters"].items()]
    title = "Learning curves on the same completions"
    return Chart(title, "completion tokens seen", "predicted mean acceptance length", lines)


STUDY = Study(
    name="learning",
    papers="ACL table 6, lossless mode",
    title="The papers' recipes on the same completions",
    measures="Predicted mean acceptance length on held-out completions, of best-first trees of 16 nodes, while recipes "
    "of papers are trained on the same completions of the default model: of Speculative Streaming's lossless form, "
    "Medusa-1 and Hydra++, and our Medusa, which has the target's head. Two trainings ran at a time, with other jobs "
    "beside them. The prompts are those of `python research/build_prompts.py --data DIR --seed 11 --scale 1`, the "
    "completions those of `anabranch train answers --rows 48 --max-new-tokens 128 --longest-prompt 400`, the trainings "
    "those of `WORDS=8192 EPOCHS=1.4 EVERY=600 research/train_methods`.",
    paper="mean accepted tokens on MT-Bench, Vicuna-7B: lossless streams 3.52, Medusa 2.67, Hydra 3.70, EAGLE 3.94",
    differs="a target of 135M parameters, a draft vocabulary of 8,192 tokens for all",
    ours=_ours,
    table=_table,
    chart=_chart,
    measure=_measure,
    command="python research/study.py learning --adapter paper-lossless=ADAPTERS/paper-lossless "
    "--adapter medusa-paper=ADAPTERS/medusa-paper --adapter hydra++=ADAPTERS/hydra++ --adapter medusa=ADAPTERS/medusa "
    "--out benchmarks/study-learning-DATE.json",
    whole=True,
)


LARGER = replace(
    STUDY,
    name="learning_larger",
    title="The same on a target of 0.5 billion parameters",
    measures="The same of Qwen2.5-Coder-0.5B, trained on an NVIDIA H200 with `research/train_on_gpu.py` on the same "
    "1.55 million tokens of completions: the papers' literal recipes, our forms of Medusa and Hydra, and our streams, "
    "which went on from an adapter that had seen 453 thousand other tokens.",
    differs="a target of 0.5 billion parameters, greedy completions of prompts that are not conversations alone, a "
    "draft vocabulary of 8,192 tokens for all",
    command="python research/study.py learning_larger --model MODEL.gguf --adapter paper-lossless=FOLDER "
    "--adapter medusa-paper=FOLDER --adapter medusa=FOLDER --adapter hydra=FOLDER --adapter streams=FOLDER "
    "--out benchmarks/study-learning_larger-DATE.json",
)

COMPARED = replace(
    STUDY,
    name="learning_compared",
    title="Trainings of the comparison on the default model",
    measures="Learning curves, as above, of the adapters in [the comparison on 120 "
    "prompts](comparison.md#on-the-default-model). All were trained on the same 0.3 million completion tokens, 3.1 "
    "times over; `paper-lossless` was set to stop after three evaluations without gain. Up to two "
    "trainings shared the machine with other jobs, and some were paused. They were started by `WORDS=8192 EPOCHS=3.1 "
    "EVERY=400 research/train_methods`.",
    command="python research/study.py learning_compared --adapter paper-lossless=ADAPTERS/paper-lossless "
    "--adapter medusa-paper=ADAPTERS/medusa-paper --adapter hydra-paper=ADAPTERS/hydra-paper "
    "--adapter hydra++=ADAPTERS/hydra++ --adapter eagle-1=ADAPTERS/eagle-1 "
    "--adapter medusa=ADAPTERS/medusa --adapter eagle=ADAPTERS/eagle "
    "--out benchmarks/study-learning_compared-DATE.json",
)

ADDED = replace(
    STUDY,
    name="learning_added",
    title="Trainings of the comparison on another machine",
    measures="Learning curves of the adapters that were [measured on a Xeon with "
    "AVX-512](comparison.md#2026-11-30-avx512_vnni). They were trained on 0.26 million completion tokens, which is "
    "less than above: our Hydra 3.1 times over; once, and together with the target, the masks of SPACE, in products of "
    "int8; Medusa-2 0.8 times, from our Medusa's heads, which had seen them 3.1 times. Two trainings shared the "
    "machine most of the time. They were started by `WORDS=8192 research/train_methods`. Lengths of a tuned target "
    "count its own next tokens, in texts of the untuned one.",
    paper="mean accepted tokens on MT-Bench, Vicuna-7B: Hydra 3.70",
    command="python research/study.py learning_added --adapter hydra=ADAPTERS/hydra "
    "--adapter 'space-paper=ADAPTERS/space-paper --target-format int8' --adapter medusa2=ADAPTERS/medusa2 "
    "--out benchmarks/study-learning_added-DATE.json",
)

STORED = replace(
    LARGER,
    name="learning_stored",
    title="Trainings of the comparison on 0.5 billion parameters",
    measures="Learning curves of the adapters of Qwen2.5-Coder-0.5B that were [measured on 120 "
    "prompts](comparison.md#qwen25-coder-05b-instruct-q4_k_m-on-two-cores-avx512_vnni), trained on its Q4_K_M file as "
    "it is stored, on the same 0.22 million completion tokens, 3.1 times over. Two trainings shared two cores of a "
    "Xeon with AVX-512. The prompts and completions were made as those [of the default "
    "model](#the-papers-recipes-on-the-same-completions). The trainings were started by `MODEL=FILE.gguf WORDS=8192 "
    "EPOCHS=3.1 EVERY=1060 research/train_methods`.",
    command="python research/study.py learning_stored --model MODEL.gguf "
    "--adapter paper-lossless=ADAPTERS/paper-lossless --adapter medusa-paper=ADAPTERS/medusa-paper "
    "--out benchmarks/study-learning_stored-DATE.json",
)

PARTS = replace(
    STUDY,
    name="learning_parts",
    papers="ACL sections 2.1 and 2.4, lossless mode",
    title="The paper's lossless form with one part changed",
    measures="Learning curves, as above, of the literal lossless form and of variants that change one part of it. Each "
    "variant is named by the options of `anabranch train streams` that change it. The trainings are short and equally "
    "long, so they compare beginnings only. Up to two shared the machine with other jobs. They were started by "
    "`WORDS=8192 EPOCHS=0.3 EVERY=200 research/train_methods`, with the name of a row as METHOD.",
    paper="none of this",
    differs="a target of 135M parameters, a draft vocabulary of 8,192 tokens, 0.1 million completion tokens",
    command="python research/study.py learning_parts --adapter PARTS/paper-lossless "
    "--adapter 'PARTS/paper-lossless --adapter-rank 128' ... --out benchmarks/study-learning_parts-DATE.json",
)
