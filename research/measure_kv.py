"""Keys and values in int8: perplexity, time of a step after long texts, and memory of the cache.

Perplexity is that of the first tokens of articles of wikitext2. Steps of plain decoding with both caches alternate; the
caches hold noise in place of a text's keys and values, which a step takes as long to read.

    python research/measure_kv.py MODEL ... --data DIR --contexts 4000 16000 --out benchmarks/NAME.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from anabranch.bench.report import environment
from anabranch.decoding.engine import Engine, Request
from anabranch.decoding.scheduler import Scheduler
from anabranch.decoding.scoring import perplexity, score
from anabranch.loading import LoadConfig, load
from anabranch.methods.none import NoDrafter
from anabranch.model.cache import GROUP, KINDS, Cache
from anabranch.model.decoder import Decoder
from anabranch.model.load import Target, base_name
from anabranch.support.files import shown_command, write_atomically


def articles(data: Path, count: int) -> list[str]:
    """The first articles of the test split of wikitext2."""
    with gzip.open(data / "wikitext2" / "test.jsonl.gz", "rt", encoding="utf-8") as rows:
        return [json.loads(row)["text"] for row, _ in zip(rows, range(count), strict=False)]


def use(decoder: Decoder, kv: str) -> None:
    """Choose the kind of the caches made from now on."""
    decoder.quantized_cache = False
    if kv == "int8":
        decoder.quantize_cache()


def perplexities(target: Target, texts: list[str], tokens: int) -> dict[str, Any]:
    """Perplexity with each cache, over ``tokens`` of each text."""
    passages = [target.tokenizer.encode(text)[:tokens] for text in texts]
    found: dict[str, Any] = {"predicted_tokens": sum(len(passage) - 1 for passage in passages)}
    for kv in KINDS:
        use(target.decoder, kv)
        scheduler = Scheduler(target.decoder)
        found[kv] = round(perplexity([score(scheduler, passage) for passage in passages]), 4)
        scheduler.close()
    return found


def fill(cache: Cache) -> None:
    """Write noise to all keys and values."""
    for store in (cache.keys, cache.values):
        if cache.quantized:
            e = cache.config.head_dim
            store.random_(0, 256)
            store[..., e:] = (torch.rand(*store.shape[:-1], e // GROUP) / 64).view(torch.uint8)
        else:
            store.normal_()


def steps(decoder: Decoder, context: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of steps after ``context`` tokens with each cache, in turn: median and quartiles."""
    engines, clocks = {}, {kv: list[float]() for kv in KINDS}
    text = [(7 * i) % decoder.config.vocab_size for i in range(context)]
    for kv in KINDS:
        use(decoder, kv)
        engines[kv] = Engine(decoder, NoDrafter(), capacity=context + rounds + 8)
        fill(engines[kv].cache)
        engines[kv].join(Request(text, rounds + 4), known=context - 1)
        engines[kv].step()
    for turn in range(rounds):
        for kv in KINDS if turn % 2 else reversed(KINDS):
            began = time.perf_counter()
            engines[kv].step()
            clocks[kv].append(1e3 * (time.perf_counter() - began))
    row: dict[str, Any] = {"context": context, "steps": rounds}
    for kv, engine in engines.items():
        quartiles = statistics.quantiles(clocks[kv], n=4)
        row[kv] = {
            "step_ms": round(quartiles[1], 3),
            "step_ms_quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
            "tokens_per_second": round(1e3 / quartiles[1], 2),
            "cache_mb": round(context * engine.cache.token_bytes / 1e6, 1),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="+", help="default, folders or .gguf files")
    parser.add_argument("--data", type=Path, required=True, help="the folder with wikitext2")
    parser.add_argument("--articles", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of each article")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4000, 16000])
    parser.add_argument("--rounds", type=int, default=40, help="steps of each cache and context")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    models = []
    for name in args.models:
        target = load(LoadConfig(name), adapters=False).target
        limit = target.config.max_positions - args.rounds - 8
        with target.decoder.inference():
            row = {
                "model": base_name(target),
                "weights": target.quantize,
                "dtype": str(target.decoder.dtype).removeprefix("torch."),
                "perplexity": perplexities(target, articles(args.data, args.articles), args.tokens),
                "steps": [steps(target.decoder, min(n, limit), args.rounds) for n in args.contexts],
            }
        print(json.dumps(row), flush=True)
        models.append(row)
    result = {
        "command": shown_command("python", *sys.argv),
        "environment": environment(target.decoder.device),
        "tokens_of_an_article": args.tokens,
        "models": models,
    }
    write_atomically(args.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
