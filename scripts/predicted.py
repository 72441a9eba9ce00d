"""Mean acceptance length as predicted by replay, beside the one that decoding reaches, on the same prompts.

The prompts are decoded with the shipped adapter; the completions are then replayed through the tree builder, without
decoding (``anabranch.drafting.replay``). Training reports the replayed figure, so the two must agree.

    python scripts/predicted.py --data DIR --limit 30 --out benchmarks/NAME.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from exactness import read_prompts

from anabranch.adapters.folder import find_adapters
from anabranch.bench.report import environment
from anabranch.decoding.engine import Engine, Request
from anabranch.drafting.replay import replay
from anabranch.learning.examples import Example
from anabranch.methods.streams.adapter import StreamAdapter
from anabranch.methods.streams.draft import DraftOptions, StreamDraft
from anabranch.methods.streams.drafter import StreamDrafter
from anabranch.methods.streams.objective import StreamObjective
from anabranch.model.load import load_target
from anabranch.support.files import write_atomically


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--limit", type=int, default=30, help="prompts, spread over the tasks")
    parser.add_argument("--new", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    target = load_target("default", dtype=args.dtype)
    (loaded,) = find_adapters(target)  # the package ships one for the default model
    adapter = loaded.module
    assert isinstance(adapter, StreamAdapter)
    prompts = read_prompts(target, args.data, args.limit)
    options = DraftOptions(nodes=args.nodes)
    drafter = StreamDrafter(target.decoder, adapter, options)
    engine = Engine(target.decoder, drafter, capacity=max(map(len, prompts)) + args.new)
    stop = frozenset(target.config.eos_token_ids)
    examples, tokens, steps = [], 0, 0
    for prompt in prompts:
        engine.add(Request(prompt, args.new, stop_ids=stop))
        done = list(engine.run())
        answer = [token for step in done for token in step.tokens]
        tokens, steps = tokens + len(answer), steps + len(done)
        examples.append(Example(tuple(prompt), tuple(answer)))
    objective = StreamObjective(target.decoder, adapter)
    found = replay(objective, StreamDraft(target.decoder, adapter, options), examples, rows=4)
    decoded = tokens / steps
    result = {
        "command": shlex.join("DIR" if word == str(args.data) else word for word in ("python", *sys.argv)),
        "prompts": len(prompts),
        "new_tokens": args.new,
        "nodes": args.nodes,
        "adapter": loaded.record["sha256"],
        "decoded_mean_acceptance_length": round(decoded, 4),
        "predicted_mean_acceptance_length": round(found.mean_acceptance_length, 4),
        "predicted_over_decoded": round(found.mean_acceptance_length / decoded, 4),
        "environment": environment(target.decoder.device),
    }
    write_atomically(args.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
