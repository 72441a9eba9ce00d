"""Measures how fast the trainable methods learn on this machine, and how much memory they take.

Each method trains for a few steps on the same completions of a model, in a process of its own. Rates are given twice:
by the clock, and by processor time, as what all threads would reach if nothing else ran. Evaluations, loading and the
first steps are not counted.

    python research/training_rates.py --answers answers.jsonl --out benchmarks/training-rates-MACHINE-DATE.json
    python research/training_rates.py --model 1.5b.gguf --answers answers.jsonl --method streams --no-completions
        --option stream_layers=6 --option num_streams=4
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import anabranch
from anabranch.bench.report import environment
from anabranch.model.load import load_target
from anabranch.support.files import shown_command, write_atomically
from anabranch.train import read_data, train_adapter, trainable
from anabranch.train.trainer import Progress

METHODS = (
    *("streams", "medusa", "medusa2", "hydra", "hydra:plus-plus", "eagle", "space", "space:sar-sft", "draft_model"),
)
WARM = 2  # steps that are not counted
ROWS, TOKENS = 64, 64  # of the completions that are timed


def peak_mb() -> int:
    """The most resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6)


def rates(tokens: float, seconds: float, processor_seconds: float) -> dict[str, float]:
    """Tokens or positions a second by the clock, and by processor time on all threads."""
    threads = torch.get_num_threads()
    return {"by_clock": round(tokens / seconds, 1), "by_processor_time": round(threads * tokens / processor_seconds, 1)}


def completions(model_name: str, answers: Path) -> dict[str, Any]:
    """Plain decoding of the prompts of some completions, reading the prompts included."""
    with anabranch.load(model_name, drafter="none") as model:
        lines = answers.read_text(encoding="utf-8").splitlines()[:ROWS]
        prompts = [json.loads(line)["prompt_ids"] for line in lines]
        model.generate(prompts[:4], max_new_tokens=4)
        began = time.perf_counter(), time.process_time()
        model.generate(prompts, max_new_tokens=TOKENS, ignore_eos=True, rows=ROWS)
        took = time.perf_counter() - began[0], time.process_time() - began[1]
        return {"rows": ROWS, "tokens_per_second": rates(len(prompts) * TOKENS, *took), "peak_mb": peak_mb()}


def training(
    name: str, model: str, answers: Path, steps: int, batch_tokens: int, options: dict[str, Any]
) -> dict[str, Any]:
    """A few steps of a method, ``name`` or ``name:recipe``, with these values of its recipe."""
    method = trainable(name.partition(":")[0])
    assert method.trained is not None
    given = {"batch_tokens": batch_tokens, "warmup": 1, "held_out": 8, "evaluate_every": 10**6, **options}
    plan = method.trained.training.recipe(name.partition(":")[2] or None, given)
    quantize = "auto" if method.trained.packed(plan) else "none"  # as ``anabranch train`` loads it
    target = load_target(model, quantize=quantize)
    examples = read_data(target, plan, answers=answers)
    epochs = steps * batch_tokens / sum(map(len, examples))
    plan = method.trained.training.recipe(name.partition(":")[2] or None, given | {"epochs": epochs})
    marks: list[tuple[int, float, float, float]] = []  # step, positions, clock, processor time

    def report(progress: Progress) -> None:
        if progress.step < progress.steps:  # how long it took follows from what is left
            taken = progress.seconds_left * progress.step / (progress.steps - progress.step)
            marks.append(
                (progress.step, progress.positions_per_second * taken, time.perf_counter(), time.process_time())
            )

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = train_adapter(target, method, plan, examples, Path(folder) / "adapter", report=report)
    first, last = marks[WARM - 1], marks[-1]
    return {
        "parameters": record["parameters"],
        "arithmetic": record["training"]["arithmetic"],
        "options": options,
        "steps": last[0] - first[0],
        "positions_per_second": rates(*(b - a for a, b in zip(first[1:], last[1:], strict=True))),
        "peak_mb": peak_mb(),
    }


def alone(work: Any, *arguments: Any) -> dict[str, Any]:
    """The result of a function that runs in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found: dict[str, Any] = pool.submit(work, *arguments).result()
    print(json.dumps({getattr(work, "__name__", ""): arguments[0] if work is training else "", **found}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="default", help="the target")
    parser.add_argument("--answers", type=Path, required=True, help="completions of the model")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="a value of the recipes; may be repeated"
    )
    parser.add_argument("--no-completions", action="store_true", help="do not time completions")
    parser.add_argument("--method", action="append", help="NAME or NAME:RECIPE; may be repeated (default: all)")
    parser.add_argument("--steps", type=int, default=8, help="steps of each training")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="write the result as JSON; measurements in it are kept")
    args = parser.parse_args()
    earlier = json.loads(args.out.read_text(encoding="utf-8")) if args.out is not None and args.out.is_file() else {}
    methods: dict[str, Any] = earlier.get("methods", {})
    written = earlier.get("completions")
    if written is None and not args.no_completions:
        written = alone(completions, args.model, args.answers)
    options = {name: int(value) if value.isdecimal() else value for name, value in (o.split("=") for o in args.option)}
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "batch_tokens": args.batch_tokens,
        "completions": written,
        "methods": methods,
        "environment": environment(torch.device("cpu")),
        "command": shown_command(
            *("python", "research/training_rates.py", "--model", Path(args.model).name, "--answers", args.answers.name),
            *("--steps", str(args.steps), *(word for option in args.option for word in ("--option", option))),
        ),
    }
    for name in args.method or METHODS:
        if name not in methods:
            methods[name] = alone(training, name, args.model, args.answers, args.steps, args.batch_tokens, options)
        if args.out is not None:
            write_atomically(args.out, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
