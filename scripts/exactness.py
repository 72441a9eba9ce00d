"""Decode the same prompts by every method, in batches of 1 and 4, and compare the tokens with plain decoding's.

In float32 every method must give plain decoding's tokens, and plain decoding those of transformers' ``generate``. In
bf16 wide and narrow passes may round differently; each difference is listed with the margin between the two largest
logits, recomputed in float32, at the first token that differs.

    python scripts/exactness.py --data DIR --limit 100 --dtype float32 --out benchmarks/NAME.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from anabranch.bench.report import environment
from anabranch.bench.suites import load_suite
from anabranch.decoding.engine import Engine, Request
from anabranch.loading import LoadConfig, load
from anabranch.methods import make_drafter
from anabranch.model.cache import Cache
from anabranch.model.inputs import Inputs
from anabranch.model.load import Target, load_target
from anabranch.prompts import chat_ids
from anabranch.sampling import SamplingParams
from anabranch.support.files import write_atomically

METHODS = ("none", "prompt_lookup", "streams", "streams:nodes=32,prune=12")


def decode(
    target: Target, spec: str, modules: Sequence[Any], prompts: list[list[int]], *, rows: int, new: int
) -> list[list[int]]:
    drafter = make_drafter(spec, target.decoder, *modules)
    engine = Engine(target.decoder, drafter, rows=rows, capacity=max(map(len, prompts)) + new)
    stop = frozenset(target.config.eos_token_ids)
    waiting = list(enumerate(prompts))
    owner: dict[int, int] = {}
    out: list[list[int]] = [[] for _ in prompts]
    while waiting or engine.active:
        while waiting and engine.active < rows:
            index, prompt = waiting.pop(0)
            owner[engine.add(Request(prompt, new, SamplingParams(), stop))] = index
        for step in engine.step():
            out[owner[step.row]].extend(step.tokens)
    return out


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--limit", type=int, default=100, help="prompts, spread over the tasks")
    parser.add_argument("--new", type=int, default=64, help="new tokens a prompt")
    parser.add_argument("--chunk", type=int, default=12, help="prompts after which the result is written")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    loaded = load(LoadConfig(dtype=args.dtype))
    target = loaded.target
    exact = None if args.dtype == "float32" else load_target("default", dtype="float32")
    prompts = read_prompts(target, args.data, args.limit)
    records: dict[str, dict[str, Any]] = {}
    began = time.time()
    for first in range(0, len(prompts), args.chunk):
        part = prompts[first : first + args.chunk]
        outputs = {"transformers generate": oracle(target, part, new=args.new)}
        for rows in args.batches:
            for spec in args.methods:
                outputs[f"{spec}, batch {rows}"] = decode(target, spec, loaded.modules, part, rows=rows, new=args.new)
        plain = outputs[f"none, batch {args.batches[0]}"]
        for name, out in outputs.items():
            record = records.setdefault(name, {"prompts": 0, "equal": 0, "differences": []})
            found = differences(exact, part, out, plain)
            record["prompts"] += len(part)
            record["equal"] += len(part) - len(found)
            record["differences"] += [{**d, "prompt": first + d["prompt"]} for d in found]
        result = {
            "command": shlex.join("DIR" if word == str(args.data) else word for word in ("python", *sys.argv)),
            "what": "prompts whose new tokens equal those of our plain decoding at batch 1",
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
