"""What a finished training is worth and what to do with it: the end of ``anabranch train streams``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.cli.screen import Screen

if TYPE_CHECKING:
    from anabranch.model.load import Target
    from anabranch.train import Example
    from anabranch.train.advice import Curve

__all__ = ["predicted_speeds", "show", "sparkline", "summary", "timing_pays"]

BARS = "▁▂▃▄▅▆▇█"
CONTEXT = 128  # prompt tokens in the cache while steps are timed
ROUNDS, STEPS = 2, 2  # of timing: some seconds for the default model
TIMED = 500e6  # parameters; larger models are not timed on a CPU unless asked to

Rows = dict[str, dict[str, float]]


def timing_pays(target: Target) -> bool:
    """Whether timing steps takes seconds and not minutes."""
    on_gpu = target.decoder.device.type != "cpu"
    return on_gpu or sum(weight.numel() for weight in target.decoder.parameters()) < TIMED


def summary(
    record: Mapping[str, Any], log: Sequence[Mapping[str, Any]], speeds: Mapping[str, float], *, model: str, out: Path
) -> dict[str, Any]:
    """What ``show`` shows and --json carries: the curve, the table, what to try next, the command to use it."""
    from anabranch.train.advice import curve_of, next_steps

    measured = record["measured"]
    lengths = measured.get("predicted mean acceptance length", {})
    curve = curve_of(log, lengths, record["training"]["steps"])
    top = measured.get("accuracy by stream", {}).get("best token", [None])[0]
    trained = log[-1].get("accuracy", [None])[0] if log else None
    rows: Rows = {}
    for spec, length in tokens_a_pass(record).items():
        rows[spec] = {"tokens_per_pass": length} | ({"tokens_per_second": speeds[spec]} if spec in speeds else {})
    where = [] if model == "default" else ["--model", model]
    return {
        "curve": [list(point) for point in curve],
        "predicted": rows,
        "next": next_steps(curve, accuracy=trained, held_out_accuracy=top, speeds=speeds) if measured else [],
        "command": 'anabranch generate "..." ' + shlex.join([*where, "--adapter", str(out)]),
    }


def tokens_a_pass(record: Mapping[str, Any]) -> dict[str, float]:
    """Predicted mean acceptance length by drafter, plain decoding first; empty where nothing was held out."""
    lengths = record["measured"].get("predicted mean acceptance length", {})
    names = {"streams:tree=chain": "chain", "streams:tree=4": "4 nodes", "streams:tree=8": "8 nodes"}
    names["streams:tree=16"] = "tree"
    found = {spec: lengths[name] for spec, name in names.items() if name in lengths}
    return {"none": 1.0, **found} if found else {}


def predicted_speeds(
    target: Target, record: Mapping[str, Any], out: Path, examples: Sequence[Example], screen: Screen
) -> dict[str, float]:
    """Tokens/s while decoding by drafter: tokens a pass over the time of a step, which is measured here."""
    from anabranch.adapters.folder import load_adapter
    from anabranch.model.pack import pack_decoder
    from anabranch.tune.latency import measure_steps

    adapter = load_adapter(out, target).adapter
    pack_decoder(target.decoder)
    prompts = sorted((example.prompt_ids for example in examples), key=len)
    prompt = prompts[len(prompts) // 2][-CONTEXT:]

    def report(what: str, done: int, total: int) -> None:
        line = f"timing steps for the predicted tokens/s, round {done + 1} of {total}"
        screen.show(line, "(--no-timing skips this)", plain=line)

    measured = measure_steps(target, adapter, prompt, rounds=ROUNDS, steps=STEPS, report=report)
    speeds = {}
    for spec, length in tokens_a_pass(record).items():
        tree = spec.rpartition("=")[2]
        nodes = int(tree) if tree.isdigit() else adapter.config.num_streams + 1  # a chain: the root and its streams
        streams = spec != "none"
        ms = measured.table("streams" if streams else "none", nodes if streams else None)(nodes if streams else 1)
        if ms is not None:
            speeds[spec] = round(1e3 * length / ms, 1)
    return speeds


def show(record: Mapping[str, Any], found: Mapping[str, Any], out: Path) -> None:
    """Print the result on standard output; at most 60 columns but for paths and commands."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    say(f"{record['parameters']:,} parameters, {record['bytes'] / 2**20:.1f} MiB in {out}")
    curve: Curve = [(int(step), float(value)) for step, value in found["curve"]]
    if found["predicted"]:
        say(f"\nPredicted from {record['measured']['held-out answers']} held-out answers:")
        console.print(_table(found["predicted"]))
    if curve:
        say("\nHeld-out tokens per pass (16 nodes) by step:")
        say(f"{sparkline([value for _, value in curve])}  {curve[0][1]:.2f} at step {curve[0][0]:,}, "
            f"{curve[-1][1]:.2f} at step {curve[-1][0]:,}")  # fmt: skip
    for sentence in found["next"]:
        console.print(f"Next: {sentence}", width=min(console.width, 80))
    say(f"\nUse it: {found['command']}")


def _table(rows: Rows) -> Any:
    from rich.table import Table

    timed = any("tokens_per_second" in row for row in rows.values())
    best = max(rows, key=lambda spec: rows[spec].get("tokens_per_second", 0.0)) if timed else None
    table = Table("drafter", box=None, pad_edge=False)
    table.add_column("tokens/pass", justify="right")
    if timed:
        table.add_column("tokens/s here", justify="right")
        table.add_column("")
    for spec, row in rows.items():
        cells = [spec, f"{row['tokens_per_pass']:.2f}"]
        if timed:
            speed = row.get("tokens_per_second")
            cells += ["" if speed is None else f"{speed:.1f}", "fastest" if spec == best else ""]
        table.add_row(*cells)
    return table


def sparkline(values: Sequence[float]) -> str:
    """The values as bars, the lowest to the highest."""
    low, high = min(values), max(values)
    places = [round((value - low) / (high - low) * (len(BARS) - 1)) if high > low else 0 for value in values]
    return "".join(BARS[place] for place in places)
