"""Measures what segment attention saves in the training of streams: peak memory and positions/s by gamma and length.

The naive layout puts the streams of all positions into one attention, in which every stream row scores the whole text
and all stream keys, and a mask hides those of other positions. Segments (ACL appendix I) take a few positions at a
time, and each node's streams only meet their own. Both compute the same loss and gradients, which a test compares.

Peak memory is what one step of loss and gradients adds to the resident memory of a process of its own; the target's
frozen pass, which is the same for both, is not part of it. Naive layouts whose mask alone exceeds --limit-gb are not
run. The model is a small one with random weights: what is compared depends on shapes only.

    python research/segment_memory.py --out benchmarks/segment-MACHINE-DATE.json --figure docs/pictures/segment-memory
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from anabranch.bench.report import environment
from anabranch.learning.examples import Batch, Example
from anabranch.methods.streams import attention
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.objective import Frozen, LossOptions, StreamObjective
from anabranch.methods.streams.recipes import StreamConfig
from anabranch.model.config import ModelConfig, RopeConfig
from anabranch.model.weights import build_decoder
from anabranch.support import plots
from anabranch.support.files import shown_command, write_atomically
from anabranch.support.memory import forget_peak, peak_memory_mb

CPU = torch.device("cpu")
PROMPT = 16  # tokens of the text that have no streams
MODEL = ModelConfig(
    family="llama",
    vocab_size=512,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=256,
    max_positions=8192,
    rope=RopeConfig(dim=32, max_positions=8192),
)
GAMMAS, LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8), (256, 512, 1024, 2048, 4096)
QUICK_GAMMAS, QUICK_LENGTHS = (2, 4), (256, 512)
ROUNDS = 2  # timed steps; the faster counts


@contextmanager
def naive_layout() -> Iterator[None]:
    """Let all stream rows attend in one masked call, as the few rows of a decoding step do."""
    with mock.patch.object(attention, "FUSED_ROWS", sys.maxsize):
        yield


def mask_bytes(gamma: int, length: int) -> int:
    """The size of the naive layout's mask: boolean, as float32, and repeated for the query heads of a key head."""
    rows = gamma * (length - PROMPT - 1)
    groups = MODEL.num_heads // MODEL.num_kv_heads
    return rows * (length + rows) * (1 + 4 + 4 * groups)


def step(objective: StreamObjective, batch: Batch, frozen: Frozen) -> float:
    """Loss and gradients of a batch, as the trainer computes them."""
    objective.adapter.zero_grad(set_to_none=True)
    total = 0.0
    for segment in objective.segments(batch):
        loss = objective.loss(batch, frozen, segment).loss
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def measured(gamma: int, length: int, layout: str, segment: int) -> dict[str, Any]:
    """Peak memory and speed of one layout; runs in a process of its own."""
    torch.manual_seed(0)
    target = build_decoder(MODEL, device="cpu")
    adapter = StreamAdapter(MODEL, StreamConfig(num_streams=gamma, num_stream_layers=2), None)
    size = length if layout == "naive" else segment
    objective = StreamObjective(target, adapter, LossOptions(), segment=size)
    tokens = torch.randint(MODEL.vocab_size, (length,)).tolist()
    batch = Batch.of([Example(tuple(tokens[:PROMPT]), tuple(tokens[PROMPT:]))])
    small = Batch.of([Example(tuple(tokens[:PROMPT]), tuple(tokens[PROMPT : 4 * PROMPT]))])
    step(objective, small, objective.freeze(small))  # loads what the first step would
    frozen = objective.freeze(batch)
    gc.collect()
    with naive_layout() if layout == "naive" else nullcontext():
        forget_peak(CPU)
        before = peak_memory_mb(CPU)["resident"]
        loss = step(objective, batch, frozen)
        peak = peak_memory_mb(CPU)["resident"] - before
        seconds = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            step(objective, batch, frozen)
            seconds.append(time.perf_counter() - began)
    positions = objective.predictions(batch) / gamma
    return {"peak_mb": round(peak, 1), "positions_per_second": round(positions / min(seconds), 1), "loss": loss}


def alone(*arguments: Any) -> dict[str, Any]:
    """``measured`` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, *arguments).result()


def compared(gammas: Sequence[int], lengths: Sequence[int], segment: int, limit: float) -> list[dict[str, Any]]:
    """A row for each gamma, length and layout, printed as it is measured."""
    rows = []
    print("| gamma | length | layout | peak MB | positions/s |\n|---:|---:|---|---:|---:|")
    for gamma in gammas:
        for length in lengths:
            for layout in ("segments", "naive"):
                row: dict[str, Any] = {"gamma": gamma, "length": length, "layout": layout}
                needed = mask_bytes(gamma, length) / 1e9
                if layout == "naive" and needed > limit:
                    row["not_run"] = f"its mask alone takes {needed:.1f} GB"
                    cells = f"{row['not_run']} | "
                else:
                    row |= alone(gamma, length, layout, segment)
                    cells = f"{row['peak_mb']:,.0f} | {row['positions_per_second']:,.0f}"
                rows.append(row)
                print(f"| {gamma} | {length} | {layout} | {cells} |", flush=True)
    return rows


def draw(rows: Sequence[dict[str, Any]], stem: Path) -> None:
    """Peak memory and positions/s by length, for the least, a middle and the largest gamma."""
    gammas = sorted({row["gamma"] for row in rows})
    chosen = sorted({gammas[0], gammas[len(gammas) // 2], gammas[-1]})
    with plots.styled():
        figure = plots.new_figure(8.4, 3.6)
        panels = figure.subplots(1, 2)
        for axes, field, name in zip(
            panels, ("peak_mb", "positions_per_second"), ("peak memory, MB", "positions/s"), strict=True
        ):
            for gamma, (colour, marker) in zip(chosen, plots.LINES, strict=False):
                for layout, line in (("naive", ":"), ("segments", "-")):
                    points = [
                        (row["length"], row[field])
                        for row in rows
                        if (row["gamma"], row["layout"]) == (gamma, layout) and field in row
                    ]
                    if points:
                        label = f"{layout}, gamma {gamma}"
                        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linestyle=line, label=label)
            axes.set(xlabel="tokens of the text", ylabel=name, xscale="log", yscale="log")
            lengths = sorted({row["length"] for row in rows})
            axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
            axes.minorticks_off()
            plots.grid(axes)
        panels[0].legend(fontsize=8)
    plots.save_both(figure, stem)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two values of gamma and two short lengths only")
    parser.add_argument("--segment", type=int, default=128, help="positions of a segment")
    parser.add_argument("--limit-gb", type=float, default=6.0, help="do not run naive layouts with a larger mask")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--figure", type=Path, metavar="STEM", help="draw the result as STEM.png and STEM.svg")
    args = parser.parse_args()
    gammas, lengths = (QUICK_GAMMAS, QUICK_LENGTHS) if args.quick else (GAMMAS, LENGTHS)
    result = {
        "command": shown_command("python", *sys.argv),
        "environment": environment(CPU),
        "model": {name: getattr(MODEL, name) for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads")},
        "segment": args.segment,
        "rows": compared(gammas, lengths, args.segment, args.limit_gb),
    }
    if args.out is not None:
        write_atomically(args.out, json.dumps(result, indent=1) + "\n")
    if args.figure is not None:
        draw(result["rows"], args.figure)


if __name__ == "__main__":
    main()
