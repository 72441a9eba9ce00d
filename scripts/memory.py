"""How much memory decoding takes beside the weights and the cache, from an empty process to the last token.

The interpreter with its libraries is counted apart: it costs the same whatever the model.

    python scripts/memory.py --drafter streams:tree=8+prompt_lookup --out benchmarks/NAME.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast  # noqa: F401 - what loading would import: a library, not the model

from anabranch.adapters.folder import find_adapters
from anabranch.bench.machine import peak_memory_mb
from anabranch.bench.report import environment
from anabranch.decoding.engine import Engine, Request
from anabranch.methods import make_drafter
from anabranch.model.load import load_target
from anabranch.model.pack import pack_decoder
from anabranch.support.files import shown_command, write_atomically

TEXT = "Explain in a few paragraphs how a river carves its valley, and why some rivers split and join again."


def resident() -> float:
    """The most that this process held so far, in 10^6 bytes."""
    return peak_memory_mb(torch.device("cpu"))["resident"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--drafter", default="streams:tree=8+prompt_lookup")
    parser.add_argument("--capacity", type=int, default=2048, help="tokens that the cache has room for")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    empty = resident()
    target = load_target(args.model, dtype=args.dtype, device="cpu", quantize=args.quantize)
    weights = {p.data_ptr(): p.numel() * p.element_size() for p in target.decoder.parameters()}
    weights |= {b.data_ptr(): b.numel() * b.element_size() for b in target.decoder.buffers()}
    loaded = resident()
    modules = [found.module for found in find_adapters(target)]
    pack_decoder(target.decoder)
    drafter = make_drafter(args.drafter, target.decoder, *modules)
    engine = Engine(target.decoder, drafter, capacity=args.capacity)
    cache = engine.cache.keys.nbytes + engine.cache.values.nbytes
    engine.add(Request(target.tokenizer.encode(TEXT), args.new))
    tokens = sum(len(step.tokens) for step in engine.run())
    peak = resident()
    needed = (sum(weights.values()) + cache) / 1e6
    result = {
        "command": shown_command("python", *sys.argv),
        "environment": environment(target.decoder.device),
        "tokens": tokens,
        "weights_mb": round(sum(weights.values()) / 1e6, 1),
        "cache_mb": round(cache / 1e6, 1),
        "peak_mb": {"interpreter and libraries": empty, "loaded": loaded, "decoded": peak},
        "peak_over_weights_and_cache": round(peak / needed, 3),
        "the_same_without_interpreter_and_libraries": round((peak - empty) / needed, 3),
    }
    print(json.dumps(result, indent=1))
    if args.out is not None:
        write_atomically(args.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
