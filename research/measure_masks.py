"""Time the masks of a grammar along draft trees, and compare them with the model's forward pass.

    python research/measure_masks.py --model qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --out result.json

The model answers under a JSON schema by plain decoding. At each of its tokens, a path of ``--nodes`` nodes follows the
answer, as in a draft tree. Timed are a mask of the whole vocabulary at each node, the most that sampling needs; one
question about the next token of each node, as in greedy decoding; and the forced tokens after the root. They are
compared with the median forward pass of plain decoding, which takes less time than one over the tree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import anabranch
from anabranch.errors import InputError
from anabranch.structure.grammar import Compiled, Source
from anabranch.structure.matcher import GrammarConstraint
from anabranch.structure.vocabulary import Vocabulary
from measured import result_options, write_measured
from serve_load import quantiles, say

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "languages": {"type": "array", "items": {"enum": ["Danish", "Greek", "Finnish"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 40}, "city": {"type": "string", "maxLength": 30}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "languages", "address"],
    "additionalProperties": False,
}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Decode the answer, then time each question along it."""
    if args.nodes < 1:
        raise InputError(f"--nodes must be at least 1, got {args.nodes}")
    with anabranch.load(args.model, drafter="none") as model:
        talk = [{"role": "user", "content": "Invent a person, as JSON."}]
        chunks = list(model.chat_stream(talk, schema=SCHEMA, max_new_tokens=args.new))
        config = model.target.config
        vocabulary = Vocabulary.of(model.tokenizer, config.vocab_size, config.eos_token_ids)
    said = [token for chunk in chunks for token in chunk.token_ids]
    pass_ms = 1e3 * statistics.median(chunk.step.timings.forward for chunk in chunks)
    began = time.perf_counter()
    grammar = Compiled(Source("schema", json.dumps(SCHEMA)), vocabulary)
    compile_ms = 1e3 * (time.perf_counter() - began)
    times = [along(grammar, said, place, args.nodes, config.vocab_size) for place in range(len(said) - args.nodes)]
    kinds = ("masks", "questions", "forced")
    found = {kind: [each[kind] for each in times] for kind in kinds}
    return {
        "vocabulary": config.vocab_size,
        "nodes": args.nodes,
        "tokens": len(said),
        "pass_ms": round(pass_ms, 3),
        "compile_ms": round(compile_ms, 2),
        **{kind: {"ms": quantiles(found[kind]), "of_a_pass": share(found[kind], pass_ms)} for kind in kinds},
    }


def along(grammar: Compiled, said: Sequence[int], place: int, nodes: int, vocabulary: int) -> dict[str, float]:
    """Milliseconds of each kind of question about the nodes that follow ``place`` tokens of a text."""
    constraint = GrammarConstraint(grammar, 0)
    paths = [said[: place + depth] for depth in range(nodes)]
    constraint.allows(paths[0], said[place])  # stand there, as after the step before
    return {
        "masks": timed(lambda: [constraint.allowed(path, vocabulary) for path in paths]),
        "questions": timed(lambda: [constraint.allows(path, said[len(path)]) for path in paths]),
        "forced": timed(lambda: constraint.forced(paths[0])),
    }


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of a call, the best of three."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def share(values: Sequence[float], pass_ms: float) -> float:
    return round(statistics.mean(values) / pass_ms, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="the model")
    parser.add_argument("--nodes", type=int, default=8, help="of a tree")
    parser.add_argument("--new", type=int, default=120, help="tokens of the answer, at most")
    result_options(parser)
    say(json.dumps(write_measured(parser.parse_args(), lambda args: {"masks": measure(args)})["masks"], indent=1))


if __name__ == "__main__":
    main()
