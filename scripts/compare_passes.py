"""Compare the speed of forward passes in two checkouts, in turns, each checkout in a process of its own.

A pass takes a batch of B sequences with N nodes each, written BxN, through a model of the default model's sizes with
random weights, in the native kernels. Both checkouts take the same pass one after the other, in the opposite order next
time, so that drift of the machine affects both. Reports the median time, the median and quartiles of the pairwise
ratios of time (this checkout over the other one), and whether hidden states and tokens are the same to the bit. Run
nothing else at the same time.

    python scripts/compare_passes.py --before ../base --out benchmarks/NAME.json
    python scripts/compare_passes.py --before . --kernels avx512_vnni --out benchmarks/NAME.json
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from checkouts import HERE, Worker, in_turns

FORMATS = ("bf16", "compact", "float32", "int8", "int4")
SHAPES = ("1x1", "1x8", "1x32", "8x1", "32x1")


def model_of(kind: str) -> Any:
    """The default model's architecture with random weights, packed; or the model of a GGUF file, as it is stored."""
    if kind not in FORMATS:
        import anabranch

        return anabranch.load(kind).target.decoder
    from anabranch.model.config import ModelConfig, RopeConfig
    from anabranch.model.decoder import Decoder
    from anabranch.model.pack import pack_decoder
    from anabranch.model.quantize import quantize_decoder

    config = ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        max_positions=8192,
        rope=RopeConfig(dim=64, max_positions=8192),
        tied_head=True,
    )
    torch.manual_seed(0)
    model = Decoder(config).to(torch.float32 if kind == "float32" else torch.bfloat16).eval().requires_grad_(False)
    if kind == "compact":
        for block in model.blocks:
            for module, name in block.linears():
                linear = getattr(module, name)
                linear.weight.copy_(four_bits(linear.weight))
    if kind in ("int8", "int4"):
        quantize_decoder(model, kind)
    if not pack_decoder(model):
        raise SystemExit("the native kernels do not run here")
    return model


def four_bits(weight: torch.Tensor) -> torch.Tensor:
    """The weights rounded to 16 values in each group of 32, which the kernels keep in four bits."""
    groups = weight.float().unflatten(-1, (-1, 32))
    least = groups.amin(-1, keepdim=True).half().float()
    step = ((groups.amax(-1, keepdim=True) - least) / 15).half().float()
    values = ((groups - least) / step).round().clamp(0, 15)
    return (values * step + least).flatten(-2).to(weight.dtype)


def stack_in(model: Any) -> Any:
    """The native layers of a model; in older checkouts they are an attribute of the model itself."""
    return model.stack if hasattr(model, "stack") else model.backend.stack


def pass_of(model: Any, cache: Any, batch: int, nodes: int) -> Callable[[], tuple[Any, ...]]:
    """A pass of chains; older checkouts take rows of one width in place of each row's count."""
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, nodes))
    stack = stack_in(model)
    ragged = "counts" in inspect.signature(stack.step).parameters
    lengths, feed = cache.lengths[:batch], tokens.reshape(-1) if ragged else tokens
    tokens_needed = {"need": "tokens"} if "need" in inspect.signature(stack.through).parameters else {"choose": True}

    def run() -> tuple[Any, ...]:
        step = stack.step(lengths, [nodes] * batch if ragged else nodes, None, 8192)
        return stack.through(feed, step, cache, 0, **tokens_needed)  # type: ignore[no-any-return]

    return run


def passes_of(kind: str, shapes: list[str], context: int) -> dict[str, tuple[Callable[[], object], Callable[[], str]]]:
    """Passes by their shape in one format: a function that runs one, and a digest of its results."""
    from anabranch.model.cache import Cache

    model = model_of(kind)
    sizes = {name: tuple(map(int, name.split("x"))) for name in shapes}
    rows = max(batch for batch, _ in sizes.values())
    capacity = context + max(nodes for _, nodes in sizes.values())
    cache = Cache(model.config, rows=rows, capacity=capacity, dtype=model.dtype, device=model.device)
    for store in (cache.keys, cache.values):
        store.copy_(torch.randn(store.shape, generator=torch.Generator().manual_seed(1)))
    for _ in range(rows):
        cache.lengths[cache.add_row()] = context

    def both(batch: int, nodes: int) -> tuple[Callable[[], object], Callable[[], str]]:
        run = pass_of(model, cache, batch, nodes)

        def decoding() -> object:
            with model.decoding():
                return run()

        def digest() -> str:
            hidden, chosen, _ = run()
            return hashlib.sha256(hidden.float().numpy().tobytes() + np.asarray(chosen).tobytes()).hexdigest()

        return decoding, digest

    return {name: both(*size) for name, size in sizes.items()}


def serve() -> None:
    """Time the passes that standard input names, with the package on the path: what a worker process does."""
    settings = json.loads(sys.stdin.readline())
    passes = passes_of(settings["format"], settings["shapes"], settings["context"])
    from anabranch.native import library as native

    print(json.dumps({"kernels": native.library().instruction_set}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            (run, digest), times = passes[line.strip()], []
            same = digest()
            for _ in range(settings["passes"]):
                started = time.perf_counter()
                run()
                times.append(time.perf_counter() - started)
            print(json.dumps({"ms": statistics.median(times) * 1e3, "digest": same}), flush=True)


def compare(kind: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All shapes of passes in one format."""
    settings = {"format": kind, "shapes": args.shape, "context": args.context, "passes": args.passes}
    kernels = {"ANABRANCH_KERNELS": args.kernels} if args.kernels else None
    workers = {
        "now": Worker(__file__, HERE, settings),
        "before": Worker(__file__, args.before.resolve(), settings, kernels),
    }
    found = []
    for shape in args.shape:
        found.append({"format": kind, "pass": shape} | in_turns(workers, shape, args.repeats))
        print(json.dumps(found[-1]), flush=True)
    for worker in workers.values():
        worker.close()
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path, metavar="DIR", help="the other checkout")
    parser.add_argument("--kernels", metavar="NAME", help="the instruction set that the other checkout uses")
    parser.add_argument(
        "--format", action="append", metavar="F", help="bf16, compact, float32, int8, int4, or a GGUF file; repeatable"
    )
    parser.add_argument("--shape", action="append", metavar="BxN", help="sequences and nodes of a pass; repeatable")
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache")
    parser.add_argument("--passes", type=int, default=10, help="timed passes in a turn, of which the median counts")
    parser.add_argument("--repeats", type=int, default=30, help="turns of each shape")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    if args.before is None:
        parser.error("give the other checkout with --before")
    from anabranch.bench.report import environment
    from anabranch.support.files import shown_command, write_atomically
    from compare_commits import commit_of

    args.shape = args.shape or list(SHAPES)
    found = [result for kind in args.format or FORMATS for result in compare(kind, args)]
    if args.out is not None:
        record = {
            "command": shown_command("python", "scripts/compare_passes.py", *sys.argv[1:], hidden=("--before",)),
            "commits": {"before": commit_of(args.before), "now": commit_of(HERE)},
            "environment": environment(torch.device("cpu")),
            "context": args.context,
            "passes": args.passes,
            "repeats": args.repeats,
            "cases": found,
        }
        write_atomically(args.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
