"""Cost and acceptance of a step by the length of the context.

Passages of a plain-text file, cut to each context length, are followed by a request to sum them up. Every passage goes
through all drafters in turn, at the same number of new tokens.

    python research/long_context.py --text BOOK.txt --lengths 512 2048 8000 --out benchmarks/NAME.json

``--prompts`` measures nothing and writes the prompts of another text instead, to train an adapter on:

    python research/long_context.py --text BOOKS.jsonl.gz --lengths 2048 --passages 120 --prompts prompts.jsonl
    anabranch train answers --prompts prompts.jsonl --longest-prompt 2048 --max-new-tokens 128 --out answers.jsonl
    anabranch train streams --answers answers.jsonl --init default --max-tokens 2304 --held-out 12 --epochs 1 \\
        --out ADAPTER
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from anabranch.bench.report import environment
from anabranch.decoding.engine import Engine, Request
from anabranch.loading import LoadConfig, load
from anabranch.methods import make_drafter
from anabranch.model.load import Target
from anabranch.prompts import chat_ids
from anabranch.support.files import shown_command, write_atomically
from anabranch.support.jsonfiles import read_rows

SLACK = 8  # tokens that a passage may gain where it is cut and put together again
ASK = "Sum up the following passage in a few sentences.\n\n"


def read(path: Path) -> str:
    """A plain text, or the texts of a .jsonl.gz file one behind the other."""
    if path.name.endswith(".jsonl.gz"):
        return "\n\n".join(row["text"] for _, row in read_rows(path))
    return path.read_text(encoding="utf-8")


def passages(target: Target, text: str, length: int, count: int) -> list[list[int]]:
    """``count`` passages, from places spread over the text, whose prompts have about ``length`` tokens and no more."""
    ids = target.tokenizer.encode(text, add_special_tokens=False)
    room = length - len(_asked(target, "")) - SLACK
    if len(ids) < room:
        raise SystemExit(f"the text has {len(ids)} tokens, too few for a context of {length}; give a longer one")
    places = [(len(ids) - room) * i // max(1, count - 1) for i in range(count)]
    return [target.tokenizer.decode(ids[place : place + room]) for place in places]


def _asked(target: Target, passage: str) -> list[int]:
    return chat_ids(target.tokenizer, ASK + passage)


def write_prompts(target: Target, args: argparse.Namespace) -> None:
    """The prompts of all lengths, as 'anabranch train answers' reads them."""
    lines = [
        {"id": f"{length}-{number}", "source": args.text.name, "prompt": ASK + passage}
        for length in args.lengths
        for number, passage in enumerate(passages(target, read(args.text), length, args.passages))
    ]
    write_atomically(args.prompts, "".join(json.dumps(line) + "\n" for line in lines))


def decode(engine: Engine, prompt: list[int], new: int) -> dict[str, Any]:
    """One prompt: prefill seconds, steps, and milliseconds of each step but the first."""
    began = time.perf_counter()
    engine.add(Request(prompt, new))
    prefilled = time.perf_counter()
    tokens, steps, clocks = 0, 0, []
    for step in engine.run():
        tokens, steps = tokens + len(step.tokens), steps + 1
        clocks.append(time.perf_counter())
    step_ms = [1e3 * (b - a) for a, b in itertools.pairwise(clocks)]
    return {"prefill": prefilled - began, "tokens": tokens, "steps": steps, "step_ms": statistics.median(step_ms)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="a long plain text, or a .jsonl.gz with a field text")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8000], help="tokens of the prompts")
    parser.add_argument("--passages", type=int, default=3, help="prompts of each length")
    parser.add_argument("--new", type=int, default=96, help="new tokens a prompt")
    parser.add_argument("--method", nargs="+", default=["none", "prompt_lookup", "streams:tree=8+prompt_lookup"])
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--adapter", type=Path, help="in place of the one that ships")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path)
    where.add_argument("--prompts", type=Path, help="write the prompts to this JSONL file, and measure nothing")
    args = parser.parse_args()
    if not args.text.is_file():
        parser.error(f"there is no file {args.text}; give a plain text or a .jsonl.gz with a field text")
    adapters = () if args.adapter is None else (args.adapter,)
    loaded = load(LoadConfig(args.model, adapters, dtype=args.dtype, quantize=args.quantize))
    target = loaded.target
    if args.prompts is not None:
        write_prompts(target, args)
        return
    longest = target.config.max_positions - args.new
    if over := [length for length in args.lengths if length > longest]:
        raise SystemExit(
            f"a context of {over[0]} and {args.new} new tokens is more than the model's limit of {longest}"
        )
    text = read(args.text)
    capacity = max(args.lengths) + args.new
    engines = {
        name: Engine(target.decoder, make_drafter(name, target.decoder, *loaded.modules), capacity=capacity)
        for name in args.method
    }
    rows = []
    for length in args.lengths:
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        for index, passage in enumerate(passages(target, text, length, args.passages)):
            prompt = _asked(target, passage)
            names = list(engines)
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                runs[name].append(decode(engines[name], prompt, args.new))
        for name, found in runs.items():
            row = {
                "context": length,
                "method": name,
                "prefill_s": round(statistics.median(run["prefill"] for run in found), 3),
                "step_ms": round(statistics.median(run["step_ms"] for run in found), 3),
                "step_ms_range": [round(f(run["step_ms"] for run in found), 3) for f in (min, max)],
                "tokens_per_step": round(sum(r["tokens"] for r in found) / sum(r["steps"] for r in found), 3),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    result = {
        "command": shown_command("python", *sys.argv),
        "environment": environment(target.decoder.device),
        "dtype": str(target.decoder.dtype).removeprefix("torch."),
        "quantize": args.quantize,
        "passages": args.passages,
        "new_tokens": args.new,
        "rows": rows,
    }
    write_atomically(args.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
