"""Write the prompt file that the shipped adapter's training answers were made from.

Reads permissively licensed data sets (see docs/adapter.md for the licences) from a folder of gzip'd
JSON lines and writes one JSON object a line: {"id", "source", "prompt", "chat"}. ``chat`` says whether
the prompt is wrapped in the model's chat template before it is answered.

    python scripts/build_prompts.py --data DIR --out prompts.jsonl
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INSTRUCTIONS_PASSAGE = (
    "Summarize: {text}",
    "Summarize the following passage in a few sentences.\n\n{text}",
    "{text}\n\nTL;DR:",
    "Read the passage and say who appears in it and what happens.\n\n{text}",
    "{text}\n\nAsk and answer three questions about the text above.",
    "A chat between a curious user and a helpful assistant. Answer from the document.\n\n"
    "Document: {text}\n\nQuestion: What is the document about, and what matters most in it?",
)
SQL = (
    "{context}\n\nWrite a SQL query: {question}",
    "Given the table below, answer with SQL only.\n{context}\nQuestion: {question}",
)
E2E = (
    "Write a sentence about a restaurant from these facts: {meaning_representation}",
    "Turn this data into a short description: {meaning_representation}",
)


def rows(data: Path, name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def collect(data: Path, rng: random.Random, scale: float) -> list[dict[str, Any]]:
    def pick(name: str, count: int) -> list[dict[str, Any]]:
        found = list(rows(data, name))
        rng.shuffle(found)
        return found[: max(1, round(count * scale))]

    prompts: list[tuple[str, str]] = []
    prompts += [("oasst1_en", r["prompt"]) for r in pick("oasst1_en/train", 5056)]
    prompts += [("gsm8k", r["question"]) for r in pick("gsm8k/train", 1200)]
    for r in pick("self_instruct_seed/train", 175):
        prompts.append(("self_instruct_seed", "\n\n".join(x for x in (r["instruction"], r.get("input")) if x)))
    prompts += [("e2e_nlg", rng.choice(E2E).format(**r)) for r in pick("e2e_nlg/train", 400)]
    prompts += [("sql_create_context", rng.choice(SQL).format(**r)) for r in pick("sql_create_context/train", 500)]
    for name, count in (("gutenberg", 700), ("wikitext2", 600)):
        for r in pick(f"{name}/train", count):
            text = " ".join(r["text"].replace("<unk>", "it").split())
            start = rng.randrange(max(1, len(text) - 2500))
            passage = text[start : start + rng.randint(400, 2500)]
            prompts.append((name, rng.choice(INSTRUCTIONS_PASSAGE).format(text=passage)))
    rng.shuffle(prompts)
    return [
        {"id": i, "source": source, "prompt": prompt[:4000], "chat": rng.random() < 0.88}
        for i, (source, prompt) in enumerate(prompts)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each source to take")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts = collect(args.data, random.Random(args.seed), args.scale)
    args.out.write_text("".join(json.dumps(p) + "\n" for p in prompts), encoding="utf-8")
    print(f"{len(prompts)} prompts -> {args.out}")


if __name__ == "__main__":
    main()
