"""Short trainings from fresh weights that differ in one option each, evaluated on the same held-out answers.

Shows what limits an adapter early on, with little data; a long run may order near neighbours otherwise. Finished
variants are kept in --out, so the same command goes on where it was stopped.

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
from anabranch.files import shown_command, write_atomically
from anabranch.model.load import load_target
from anabranch.train import OPTIONS, recipe_with
from anabranch.train.job import read_data, train_streams

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


def options(variant: str) -> dict[str, Any]:
    """Those that ``variant`` changes: NAME=VALUE,... as 'anabranch train streams' calls them, or base."""
    pairs = [] if variant == "base" else [change.partition("=") for change in variant.split(",")]
    if wrong := [name for name, _, _ in pairs if name not in OPTIONS]:
        sys.exit(f"there is no option {wrong[0]!r}; options are {', '.join(OPTIONS)}")
    return {name: json.loads(value) for name, _, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--answers", type=Path, required=True, help="JSONL that 'anabranch train answers' wrote")
    parser.add_argument("--examples", type=int, default=700, help="answers to train on, held-out ones besides")
    parser.add_argument("--held-out", type=int, default=48)
    parser.add_argument("--variant", action="append", help="NAME=VALUE,...; repeatable (default: a list)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    target = load_target("default")
    base = {**BASE, "held_out": args.held_out}
    plans = {variant: recipe_with("default-adapter", base | options(variant)) for variant in args.variant or VARIANTS}
    examples = read_data(target, recipe_with("default-adapter", base), answers=args.answers)
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
            sys.exit(f"{args.out} was written with other answers; give those, or another --out")
        result["variants"] = before["variants"]
    for variant, plan in plans.items():
        if variant in result["variants"]:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            record = train_streams(target, plan, examples, Path(folder), report=lambda now: None)
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
