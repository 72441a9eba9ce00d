"""Short trainings from fresh weights that differ in one option each, evaluated on the same held-out completions.

Shows what limits an adapter early on, with little data; a long run may rank similar variants differently. Finished
variants are kept in --out, so the same command resumes where it was stopped.

    python scripts/search.py --answers answers.jsonl --examples 700 --out benchmarks/NAME.json
    python scripts/search.py --answers answers.jsonl --variant stream_layers=8,soft=1 --out benchmarks/NAME.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from anabranch.bench.report import environment
from anabranch.errors import InputError
from anabranch.model.load import load_target
from anabranch.support.files import shown_command, write_atomically
from anabranch.train import Recipe, read_data, train_adapter, trainable

VARIANTS = (
    "base",
    "stream_layers=4",
    "stream_layers=8",
    "stream_layers=16",
    "soft=0",
    "soft=1",
    "decay=0.6",
    "decay=1",
    "root_width=0",
    "conditioning_rank=256",
    "attention_rank=16,adapter_rank=16",
    "lr=0.003",
)
BASE = {"epochs": 1.0, "warmup": 10, "keep_states": False}
METHOD = trainable("streams")


def plan(variant: str, base: dict[str, Any]) -> Recipe:
    """The recipe of a variant: "base", or NAME=VALUE,... with the options of 'anabranch train streams'."""
    assert METHOD.trained is not None
    pairs = [] if variant == "base" else [change.partition("=") for change in variant.split(",")]
    return METHOD.trained.recipe("default-adapter", base | {name: json.loads(value) for name, _, value in pairs})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--answers", type=Path, required=True, help="JSONL that 'anabranch train answers' wrote")
    parser.add_argument("--examples", type=int, default=700, help="completions to train on, besides the held-out ones")
    parser.add_argument("--held-out", type=int, default=48)
    parser.add_argument("--variant", action="append", help="NAME=VALUE,...; repeatable (default: a list)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    target = load_target("default")
    base = {**BASE, "held_out": args.held_out}
    try:
        plans = {variant: plan(variant, base) for variant in args.variant or VARIANTS}
    except (InputError, ValueError) as error:
        sys.exit(f"--variant: {error}")
    examples = read_data(target, plan("base", base), answers=args.answers)
    random.Random(0).shuffle(examples)
    examples = examples[: args.examples + args.held_out]
    result: dict[str, Any] = {
        "environment": environment(target.decoder.device),
        "answer_tokens": sum(len(example.answer_ids) for example in examples),
        "variants": {},
    }
    if args.out.is_file():
        before = json.loads(args.out.read_text(encoding="utf-8"))
        if before["answer_tokens"] != result["answer_tokens"]:
            sys.exit(f"{args.out} was written with other completions; give those, or another --out")
        result["variants"] = before["variants"]
    for variant, recipe in plans.items():
        if variant in result["variants"]:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            record = train_adapter(target, METHOD, recipe, examples, Path(folder), report=lambda now: None)
        measured = record["measured"]
        lengths = measured["predicted mean acceptance length"]
        result["variants"][variant] = {
            "command": shown_command("python", *sys.argv),
            "commit": result["environment"]["commit"],
            "parameters": record["parameters"],
            "steps": record["training"]["steps"],
            "seconds": round(time.monotonic() - began),
            **{name: lengths[name] for name in ("tree", "chain", "tree without conditioning")},
            "top 1": measured["accuracy by stream"]["best token"],
            "at least": measured["share of drafted steps that accept at least 1, 2, ... tokens"],
        }
        write_atomically(args.out, json.dumps(result, indent=1) + "\n")
        print(variant, json.dumps(result["variants"][variant]), flush=True)


if __name__ == "__main__":
    main()
