"""Fit the tables of ``methods.streams.copying`` to drafts of the default model.

Prompts of four suites are decoded greedily with wide trees of the streams alone. Wherever such a tree covers the text
that follows, two numbers are recorded for each of its tokens: the probability q that the stream gave it, and its share
c of the continuations of the longest match. For each length of a match, expectation maximisation finds the weight w
under which (1 - w) q + w c makes the tokens most probable; the mean of c is the probability below the last stream.

    python research/fit_copying.py --data DIR --out benchmarks/copying-DATE.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from acceptance_by_kind import kinds
from anabranch.bench.report import environment
from anabranch.decoding.engine import Engine, Request
from anabranch.loading import LoadConfig, load
from anabranch.methods import make_drafter
from anabranch.methods.streams.copying import LONGEST, continuations
from anabranch.prompts import chat_ids
from anabranch.support.files import shown_command, write_atomically
from anabranch.tree import DraftTree

SPEC = "streams:tree=48"
KINDS = ("spec_bench", "mt_bench", "humaneval", "alpaca_subset")
TAIL = 2000  # tokens that share what the drafted children of a node leave over
ROUNDS = 60  # of expectation maximisation


def along(text: Sequence[int], start: int, tree: DraftTree) -> Iterator[tuple[int, float, float]]:
    """The length of the match, q and c of each token of ``text`` that a tree after ``start`` tokens covers."""
    assert tree.log_probs is not None
    joint, node = [math.exp(value) for value in tree.log_probs.tolist()], 0
    for at in range(start, len(text)):
        children = {int(tree.tokens[child]): child for child in tree.children(node)}
        if not children:
            return
        length, shares = continuations(text[:start], text[start:at])
        left = max(1e-6, joint[node] - sum(joint[child] for child in children.values())) / TAIL
        child = children.get(text[at])
        if length:
            yield length, (left if child is None else joint[child]) / joint[node], shares.get(text[at], 0.0)
        if child is None:
            return
        node = child


def fitted(seen: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The weight of c under which the tokens are most probable, and the mean of c."""
    weight = 0.2
    for _ in range(ROUNDS):
        weight = sum(weight * c / ((1 - weight) * q + weight * c) for q, c in seen) / len(seen)
    mean = sum(c for _, c in seen) / len(seen)
    return {"positions": len(seen), "mixed": round(weight, 3), "alone": round(mean, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each suite")
    parser.add_argument("--new", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    loaded = load(LoadConfig("default"))
    target = loaded.target
    drafter = make_drafter(SPEC, target.decoder, *loaded.modules)
    engine, stop = Engine(target.decoder, drafter), frozenset(target.config.eos_token_ids)
    seen: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for kind, texts in kinds(args.data, args.limit, 0):
        for prompt in texts if kind in KINDS else ():
            text = list(chat_ids(target.tokenizer, prompt, model="default"))
            engine.add(Request(tuple(text), args.new, stop_ids=stop))
            drafts = []
            for step in engine.run():
                drafts.append((len(text), step.tree))
                text += step.tokens
            for start, tree in drafts:
                for length, own, copied in along(text, start, tree):
                    seen[length].append((own, copied))
    result = {
        "command": shown_command("python", "research/fit_copying.py", *sys.argv[1:]),
        "by_length_of_match": {str(n): fitted(seen[n]) for n in range(1, LONGEST + 1) if seen[n]},
        "environment": environment(torch.device("cpu")),
    }
    print(json.dumps(result, indent=1))
    if args.out is not None:
        write_atomically(args.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
