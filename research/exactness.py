"""Decode the same prompts by every method, in batches of 1 and 4, and compare the tokens with plain decoding's.

In float32 every method must give plain decoding's tokens, and plain decoding those of transformers' ``generate``. In
bf16 wide and narrow passes may round differently; each difference is listed with the margin between the two largest
logits, recomputed in float32, at the first token that differs.

    python research/exactness.py --data DIR --limit 100 --dtype float32 --adapters ADAPTERS --out benchmarks/NAME.json

``--adapters`` adds every trained method in a folder (``research/train_methods``). One whose training made a target of
its own is compared with that target's plain decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from anabranch.bench.report import environment
from anabranch.bench.suites import load_suite
from anabranch.decoding.engine import Request
from anabranch.decoding.scheduler import Scheduler
from anabranch.loading import LoadConfig, Loaded, load
from anabranch.methods import Spec, make_drafter
from anabranch.model.cache import Cache
from anabranch.model.inputs import Inputs
from anabranch.model.load import Target, load_target
from anabranch.prompts import chat_ids
from anabranch.sampling import SamplingParams
from anabranch.support.files import shown_command, write_atomically
from cases import adapter_cases, in_folder, opened

METHODS = (
    *("none", "prompt_lookup", "prompt_lookup:matches=3", "suffix", "lookahead"),
    *("streams", "streams:nodes=32,prune=12", "streams+suffix", "auto"),
)
PREFIX_BYTES = 2 << 30  # for the keys and values of the prompts of one chunk


@dataclass(frozen=True)
class Entry:
    """A drafter to test: its label, specification, and the target with its adapters."""

    label: str
    spec: str
    loaded: Loaded


class Decoding:
    """Decodes the prompts of one target by any method.

    Each prompt is read once for each number of rows: its keys and values are kept, as they are for requests that are
    served, and every method starts from them.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._schedulers: dict[int, Scheduler] = {}

    def __call__(self, spec: str, loaded: Loaded, prompts: list[list[int]], *, rows: int, new: int) -> list[list[int]]:
        if rows not in self._schedulers:
            self._schedulers[rows] = Scheduler(self.target.decoder, rows=rows, prefix_bytes=PREFIX_BYTES)
        scheduler, stop = self._schedulers[rows], frozenset(self.target.config.eos_token_ids)
        drafter = make_drafter(spec, self.target.decoder, *loaded.modules)
        tickets = [scheduler.submit(Request(prompt, new, SamplingParams(), stop), drafter) for prompt in prompts]
        return [[token for step in scheduler.steps(ticket) for token in step.tokens] for ticket in tickets]


@cache
def oracle_model(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def oracle(target: Target, prompts: list[list[int]], *, new: int) -> list[list[int]]:
    assert target.path is not None
    model = oracle_model(target.path, target.decoder.dtype)
    out = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            found = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                do_sample=False,
                eos_token_id=list(target.config.eos_token_ids),
                pad_token_id=0,
            )
            out.append(found[0, len(prompt) :].tolist())
    return out


@torch.inference_mode()
def margin(exact: Target, text: list[int], first: int, second: int) -> dict[str, float]:
    """Float32 logits after ``text``: how far the two tokens are apart, and how far the best two are."""
    cache = Cache(exact.config, rows=1, capacity=len(text), dtype=torch.float32, device=exact.decoder.device)
    cache.add_row()
    logits = exact.decoder.logits(exact.decoder(Inputs.of_prompt(text), cache, need="hidden").hidden_MD[-1:])[0]
    top = logits.topk(2).values
    return {
        "top2": round(float(top[0] - top[1]), 4),
        "between": round(float((logits[first] - logits[second]).abs()), 4),
    }


def differences(
    exact: Target | None, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]
) -> list[dict[str, Any]]:
    found = []
    for index, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if a == b:
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        record: dict[str, Any] = {"prompt": index, "token": at}
        if exact is not None and at < min(len(a), len(b)):
            record |= margin(exact, [*prompt, *a[:at]], a[at], b[at])
        found.append(record)
    return found


def read_prompts(target: Target, data: Path, limit: int) -> list[list[int]]:
    suite = load_suite("spec_bench", data=data, limit=limit)
    return [chat_ids(target.tokenizer, prompt.text) for prompt in suite]


def entries(args: argparse.Namespace, loaded: Loaded) -> Iterator[Entry]:
    """The drafters to test: ``--methods`` on the default model, and the trained methods in ``--adapters``."""
    for spec in args.methods:
        yield Entry(spec, spec, loaded)
    for case in [] if args.adapters is None else adapter_cases(in_folder(args.adapters)):
        target = loaded.target if case.tuned is None else load_target(str(case.tuned), dtype=args.dtype)
        yield Entry(case.name, str(Spec((case.part,))), opened(case, target))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--limit", type=int, default=100, help="prompts, spread over the tasks")
    parser.add_argument("--new", type=int, default=64, help="new tokens a prompt")
    parser.add_argument("--chunk", type=int, default=12, help="prompts after which the result is written")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--adapters", type=Path, help="test the trained methods in this folder, too")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    loaded = load(LoadConfig(dtype=args.dtype))
    target = loaded.target
    exact = None if args.dtype == "float32" else load_target("default", dtype="float32")
    prompts = read_prompts(target, args.data, args.limit)
    tested = list(entries(args, loaded))
    decoding = {id(entry.loaded.target): Decoding(entry.loaded.target) for entry in tested}
    records: dict[str, dict[str, Any]] = {}
    began = time.time()
    for first in range(0, len(prompts), args.chunk):
        part = prompts[first : first + args.chunk]
        plain = {
            key: decode("none", Loaded(decode.target, ()), part, rows=1, new=args.new)
            for key, decode in decoding.items()
        }
        pairs = {"transformers generate": (oracle(target, part, new=args.new), plain[id(target)])}
        for rows in args.batches:
            for entry in tested:
                key = id(entry.loaded.target)
                out = decoding[key](entry.spec, entry.loaded, part, rows=rows, new=args.new)
                pairs[f"{entry.label}, batch {rows}"] = out, plain[key]
        for name, (out, reference) in pairs.items():
            record = records.setdefault(name, {"prompts": 0, "equal": 0, "differences": []})
            found = differences(exact, part, out, reference)
            record["prompts"] += len(part)
            record["equal"] += len(part) - len(found)
            record["differences"] += [{**d, "prompt": first + d["prompt"]} for d in found]
        result = {
            "command": shown_command("python", "research/exactness.py", *sys.argv[1:], hidden=("--data",)),
            "what": "prompts whose new tokens equal those of our plain decoding at batch 1 (of the same target)",
            "prompts": first + len(part),
            "new_tokens": args.new,
            "dtype": args.dtype,
            "adapter": loaded.adapters[0].record.get("sha256"),
            "environment": environment(target.decoder.device),
            "methods": records,
        }
        write_atomically(args.out, json.dumps(result, indent=1) + "\n")
        done = ", ".join(f"{name}: {r['equal']}/{r['prompts']}" for name, r in records.items())
        print(f"{time.time() - began:.0f} s  {done}", flush=True)
    failed = any(record["differences"] for record in records.values())
    sys.exit(1 if failed and args.dtype == "float32" else 0)


if __name__ == "__main__":
    main()
