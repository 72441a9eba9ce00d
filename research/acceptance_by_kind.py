"""Mean acceptance length on prompts of several kinds, predicted for adapters or decoded by drafters.

The default model completes the prompts greedily. The completions are replayed through each adapter's tree builder
(``anabranch.drafting.replay``), so all adapters are measured on the same texts; a replay knows the streams only, not
what leads them. With ``--drafter``, the prompts are decoded one at a time by these drafters instead. Kinds are the
suites spec_bench, mt_bench (conversation) and humaneval (code), the instructions of alpaca_subset, and the test rows of
the tasks sql, e2e and dialogsum. The adapter that ships comes first.

    python research/acceptance_by_kind.py --data DIR --adapter FOLDER --out benchmarks/acceptance-by-kind-DATE.json
    python research/acceptance_by_kind.py --data DIR --drafter streams:tree=8 --drafter streams:tree=8+quantized_draft \
        --out benchmarks/decoded-by-kind-DATE.json
    python research/acceptance_by_kind.py --data DIR --model qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --quantize int4 \
        --drafter streams:tree=8 --limit 20 --new 96 --out benchmarks/decoded-by-kind-qwen2.5-coder-0.5b-DATE.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import anabranch
from anabranch.adapters.folder import find_adapters, load_adapter
from anabranch.bench.report import environment
from anabranch.bench.suites import load_suite
from anabranch.learning.examples import Example
from anabranch.model.load import Target, load_target
from anabranch.prompts import chat_ids
from anabranch.support.files import shown_command, write_atomically
from anabranch.support.jsonfiles import read_rows
from anabranch.tasks.catalogue import TASKS
from anabranch.tasks.rows import rows_of, sample
from anabranch.train.arithmetic import learner_of
from anabranch.train.fit import packed_copy

SUITES = ("spec_bench", "mt_bench", "humaneval")


def kinds(data: Path, limit: int, seed: int) -> Iterator[tuple[str, list[str]]]:
    """Each kind's name and prompts."""
    for suite in SUITES:
        yield suite, [prompt.text for prompt in load_suite(suite, data=data, limit=limit)]
    rows = [row for _, row in read_rows(data / "alpaca_subset" / "train.jsonl.gz")]
    texts = ["\n\n".join(part for part in (row["instruction"], row.get("input")) if part) for row in rows]
    yield "alpaca_subset", random.Random(seed).sample(texts, limit)
    for task in TASKS.values():
        yield (
            task.name,
            [task.template.render(row.fields, row.name) for row in sample(rows_of(task, "test", data), limit)],
        )


def completed(data: Path, limit: int, new: int, seed: int) -> dict[str, list[Example]]:
    """The default model's own completions of each kind's prompts."""
    found = {}
    with anabranch.load("default") as model:
        for kind, texts in kinds(data, limit, seed):
            prompts = [chat_ids(model.tokenizer, text, model="default") for text in texts]
            done = model.generate(prompts, max_new_tokens=new, rows=min(32, len(prompts)))
            found[kind] = [
                Example(tuple(prompt), tuple(result.token_ids), kind, place)
                for place, (prompt, result) in enumerate(zip(prompts, done, strict=True))
            ]
            print(f"{kind}: {sum(len(example.answer_ids) for example in found[kind]):,} tokens", flush=True)
    return found


def decoded(args: argparse.Namespace) -> list[dict[str, Any]]:
    """By drafter and kind: mean acceptance length, and on how many prompts the tokens are those of plain decoding."""
    drafters: list[str] = args.drafter
    counts: dict[str, dict[str, list[int]]] = {drafter: {} for drafter in drafters}
    with anabranch.load(args.model, quantize=args.quantize) as model:
        for kind, texts in kinds(args.data, args.limit, args.seed):
            for text in texts:
                prompt = chat_ids(model.tokenizer, text, model=args.model)
                plain = model.generate(prompt, max_new_tokens=args.new, drafter="none")
                for drafter in drafters:
                    found = model.generate(prompt, max_new_tokens=args.new, drafter=drafter)
                    seen = counts[drafter].setdefault(kind, [0, 0, 0])
                    for place, value in enumerate(
                        (len(found.token_ids), found.stats.steps, found.token_ids == plain.token_ids)
                    ):
                        seen[place] += value
            for drafter in drafters:
                tokens, steps, equal = counts[drafter][kind]
                print(f"{drafter} {kind}: {tokens / steps:.3f}, equal {equal} of {len(texts)}", flush=True)
    return [
        {
            "drafter": drafter,
            "tokens_per_pass": {kind: round(tokens / steps, 4) for kind, (tokens, steps, _) in by_kind.items()},
            "equal_to_plain": {kind: equal for kind, (_, _, equal) in by_kind.items()},
        }
        for drafter, by_kind in counts.items()
    ]


def lengths(target: Target, adapter: Any, examples: dict[str, list[Example]], nodes: list[int]) -> dict[str, Any]:
    """By kind: mean acceptance length for trees of each size, and for a chain."""
    trained = adapter.method.trained
    decoder = learner_of(target.decoder, "stored", torch.float32)
    recipe, frozen = trained.training.recipe(), packed_copy(target)
    objective = trained.learn(decoder, adapter.module.float(), recipe, frozen=frozen)
    found = {}
    for kind, rows in examples.items():
        evaluation = objective.evaluate(rows, nodes=nodes)
        found[kind] = {name: round(evaluation[name], 4) for name in ("chain", *(f"{n} nodes" for n in nodes))}
        print(f"{adapter.method.name} {adapter.record['sha256'][:8]} {kind}: {found[kind]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--adapter", type=Path, action="append", default=[], help="an adapter folder; may be repeated")
    parser.add_argument("--drafter", action="append", help="decode with this drafter instead; may be repeated")
    parser.add_argument("--model", default="default", help="of --drafter")
    parser.add_argument("--quantize", default="none", help="of --drafter")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each kind")
    parser.add_argument("--new", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--nodes", type=int, action="append", help="nodes of a tree (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of instructions")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    nodes = args.nodes or [8]
    result: dict[str, Any] = {
        "command": shown_command("python", "research/acceptance_by_kind.py", *sys.argv[1:]),
        "prompts_of_a_kind": args.limit,
        "new_tokens": args.new,
    }
    if args.drafter:
        result["decoded"] = decoded(args)
    else:
        result |= predicted(args, nodes)
    result["environment"] = environment(torch.device("cpu"))
    print(json.dumps(result, indent=1))
    if args.out is not None:
        write_atomically(args.out, json.dumps(result, indent=1) + "\n")


def predicted(args: argparse.Namespace, nodes: list[int]) -> dict[str, Any]:
    """The part of a result that says what adapters are predicted to reach."""
    examples = completed(args.data, args.limit, args.new, args.seed)
    target = load_target("default")
    adapters = [*find_adapters(target), *(load_adapter(folder, target) for folder in args.adapter)]
    measured = [
        {
            "adapter": "shipped" if place == 0 else args.adapter[place - 1].name,
            "method": adapter.method.name,
            "sha256": adapter.record["sha256"],
            "tokens_per_pass": lengths(target, adapter, examples, nodes),
        }
        for place, adapter in enumerate(adapters)
    ]
    return {
        "answer_tokens": {kind: sum(len(row.answer_ids) for row in rows) for kind, rows in examples.items()},
        "adapters": measured,
    }


if __name__ == "__main__":
    main()
