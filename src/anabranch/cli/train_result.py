"""The final output of ``anabranch train METHOD``: the result, what to try next, and how to use the adapter."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.cli.layout import print_tables
from anabranch.cli.screen import clock
from anabranch.support.table import Table

if TYPE_CHECKING:
    from anabranch.cli.train_measure import Decoded
    from anabranch.model.load import Target
    from anabranch.train.advice import Curve

__all__ = ["show", "show_lora", "sparkline", "summary", "timing_pays"]

BARS = "▁▂▃▄▅▆▇█"
QUALITY = "next token"  # ``methods.tuning.QUALITY``
PLAIN = "none"  # plain decoding
TIMED = 500e6  # parameters; larger models are timed on a CPU only on request


def timing_pays(target: Target) -> bool:
    """True if decoding a few prompts takes seconds rather than minutes."""
    on_gpu = target.decoder.device.type != "cpu"
    return on_gpu or sum(weight.numel() for weight in target.decoder.parameters()) < TIMED


def summary(
    record: Mapping[str, Any],
    log: Sequence[Mapping[str, Any]],
    speeds: Mapping[str, float],
    *,
    model: str,
    lora: Path | None = None,
    out: Path,
    decoded: Mapping[str, Decoded] | None = None,
    task: Sequence[str] = (),
) -> dict[str, Any]:
    """The result for ``show`` and --json: curve, table, what to try next, and the command to use the adapter.

    speeds   measured tokens/s by drafter
    decoded  what the untuned and the tuned model made of held-out prompts, if the target was tuned
    task     options of ``bench`` for the test rows of the application that was learned
    """
    from anabranch.train.advice import curve_of, more_data, next_steps, scaling_of

    measured = record["measured"]
    lengths = measured.get("predicted mean acceptance length", {})
    curve = curve_of(log, lengths, record["training"]["steps"])
    shares: Mapping[str, Any] = next((each for name, each in measured.items() if name.startswith("accuracy by ")), {})
    top = shares.get("best token", [None])[0]
    trained = log[-1].get("accuracy", [None])[0] if log else None
    where = [] if model == "default" else ["--model", model]
    where += [] if lora is None else ["--lora", str(lora)]
    scaling = scaling_of(curve, record["training"])
    advice = next_steps(curve, accuracy=trained, held_out_accuracy=top, speeds=speeds) if measured else []
    return {
        "curve": [list(point) for point in curve],
        "predicted": predicted_lengths(record),
        "measured": dict(speeds),
        "quality": quality_rows(measured.get(QUALITY, {}), decoded or {}),
        "seconds_per_100k": per_100k(record["training"]),
        "scaling": None if scaling is None else {**asdict(scaling), "doubling": scaling.doubling},
        "next": [*advice, *([] if scaling is None else [more_data(scaling)])],
        "command": 'anabranch generate "..." ' + shlex.join([*where, "--adapter", str(out)]),
        "bench": shlex.join(
            ["anabranch", "bench", *task, *where, "--adapter", str(out), "--methods", "none,auto"] if task else []
        ),
    }


def quality_rows(losses: Mapping[str, Mapping[str, float]], decoded: Mapping[str, Decoded]) -> list[dict[str, Any]]:
    """The untuned and the tuned model on held-out rows, by how they decode."""
    rows = []
    for name in decoded or losses:
        who, _, drafter = name.partition(", ")
        row: dict[str, Any] = {"model": who, "drafter": drafter, **losses.get(who, {})}
        if name in decoded:
            row |= {name: value for name, value in asdict(decoded[name]).items() if value is not None}
        rows.append(row)
    return rows


def per_100k(training: Mapping[str, Any]) -> float | None:
    """Seconds that an epoch of 100,000 answer tokens takes at this run's rate, evaluations included."""
    planned = training.get("planned_steps", training["steps"])
    epochs = training.get("options", {}).get("epochs", 0.0)
    trained = training.get("answer_tokens", 0) * epochs * training["steps"] / max(1, planned)
    return round(training["seconds"] * 1e5 / trained, 1) if trained else None


def predicted_lengths(record: Mapping[str, Any]) -> dict[str, float]:
    """Predicted mean acceptance length by draft, plain decoding first; empty if nothing was held out."""
    lengths = record["measured"].get("predicted mean acceptance length", {})
    values = {name: float(value) for name, value in lengths.items() if isinstance(value, int | float)}
    return {PLAIN: 1.0, **dict(sorted(values.items(), key=lambda item: item[1]))} if values else {}


def show(record: Mapping[str, Any], summary: Mapping[str, Any], out: Path) -> None:
    """Print the result on standard output, in at most 60 columns except for paths and commands."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    say(f"{record['parameters']:,} parameters, {record['bytes'] / 2**20:.1f} MiB in {out}")
    curve: Curve = [(int(step), float(value)) for step, value in summary["curve"]]
    if summary["predicted"]:
        say(f"\nPredicted from {record['measured']['held-out answers']} held-out answers:")
        rows = [(spec, f"{length:.2f}") for spec, length in summary["predicted"].items()]
        print_tables([Table(("draft", "mean acceptance\nlength"), rows)], console)
    if own := record["measured"].get("own prompts"):
        say(f"On {own['held-out answers']} prompts of your own: mean acceptance length "
            f"{own['predicted mean acceptance length']['tree']:.2f} (16 nodes)")  # fmt: skip
    if speedup := _speedup(summary["measured"]):
        say(f"\nMeasured, one prompt at a time:\n{speedup}")
    show_quality(summary["quality"], console)
    if curve:
        say("\nHeld-out mean acceptance length (16 nodes) by step:")
        say(f"{sparkline([value for _, value in curve])}  {curve[0][1]:.2f} at step {curve[0][0]:,}, "
            f"{curve[-1][1]:.2f} at step {curve[-1][0]:,}")  # fmt: skip
    if sentence := _stopped(record["training"]):
        say(f"\n{sentence}")
    if summary["seconds_per_100k"]:
        say(f"\nAt this rate, 100,000 answer tokens take {clock(summary['seconds_per_100k'])} an epoch.")
    if peaks := record["training"].get("peak_memory_mb"):
        say("Peak memory: " + ", ".join(f"{value / 1e3:.1f} GB {kind}" for kind, value in peaks.items()))
    for sentence in summary["next"]:
        console.print(f"Next: {sentence}", width=min(console.width, 80))
    say(f"\nUse it: {summary['command']}")
    if summary["bench"]:
        say(f"Test it: {summary['bench']}")


def show_lora(record: Mapping[str, Any], decoded: Mapping[str, Decoded], out: Path, model: str) -> None:
    """Print the result of ``anabranch train lora`` on standard output."""
    from rich.console import Console

    print(f"{record['parameters']:,} parameters in {out}")
    if scores := record["held_out"]:
        losses = {"untuned": scores["before"], "tuned": scores["after"]}
        show_quality(quality_rows(losses, decoded), Console(highlight=False, markup=False))
        print(f"\nAt this rate, 100,000 answer tokens take {clock(per_100k(record) or 0.0)} an epoch.")
    where = "" if model == "default" else f"--model {model} "
    print(f"Use it: anabranch chat {where}--lora {out}")


def show_quality(rows: Sequence[Mapping[str, Any]], console: Any) -> None:
    """Print what the untuned and the tuned model make of held-out rows; nothing without rows."""
    columns = {
        "loss": ("loss", "{:.3f}"),
        "accuracy": ("accuracy", "{:.1%}"),
        "exact_match": ("exact match", "{:.0%}"),
        "tokens_per_second": ("tokens/s", "{:.1f}"),
    }
    columns = {key: column for key, column in columns.items() if any(key in row for row in rows)}
    if not columns:
        return
    shown = []
    for row in rows:
        name = f"{row['model']} model, {row['drafter']}" if row["drafter"] else f"{row['model']} model"
        cells = [form.format(row[key]) if key in row else "" for key, (_, form) in columns.items()]
        shown.append((name.replace(f", {PLAIN}", ", plain"), *cells))
    console.print()
    print_tables([Table(("held-out rows", *(title for title, _ in columns.values())), shown)], console)


def _stopped(training: Mapping[str, Any]) -> str:
    """The effect of early stopping in words; empty without it."""
    if "early_stopping" not in training:
        return ""
    best = training["early_stopping"]
    kept = f"The weights of step {best['kept_step']:,} are kept (mean acceptance length {best['held_out']:.2f})."
    if training["steps"] == training["planned_steps"]:
        return kept
    stopped = f"Stopped at step {training['steps']:,} of {training['planned_steps']:,}"
    return f"{stopped}: {best['evaluations_without_gain']} evaluations without gain.\n{kept}"


def _speedup(speeds: Mapping[str, float]) -> str:
    """Measured tokens/s in words; empty if nothing was measured."""
    drafted = [name for name in speeds if name != PLAIN]
    if not drafted or PLAIN not in speeds:
        return ""
    ratio = speeds[drafted[0]] / speeds[PLAIN]
    return f"{speeds[drafted[0]]:.1f} tokens/s ({drafted[0]}), plain {speeds[PLAIN]:.1f}: {ratio:.2f} times"


def sparkline(values: Sequence[float]) -> str:
    """The values as bars, scaled from the lowest to the highest."""
    low, high = min(values), max(values)
    places = [round((value - low) / (high - low) * (len(BARS) - 1)) if high > low else 0 for value in values]
    return "".join(BARS[place] for place in places)
