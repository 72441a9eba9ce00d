"""The JSON Schema Test Suite under ``schema=``: which schemas are refused, and which instances could be written.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python research/json_schema_suite.py JSON-Schema-Test-Suite --out benchmarks/json-schema-suite-2026-11-29.json

An instance can be written if the constraint accepts its JSON as ``json.dumps`` writes it, letter by letter. No model is
needed. Instances that a schema forbids must not be written (``unsound``); of those that it allows, some are not written
(``narrower``): properties in another order than the schema's, ``1.0`` as an integer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from anabranch.bench.report import environment
from anabranch.errors import InputError
from anabranch.structure.grammar import compiled, source_of
from anabranch.structure.matcher import GrammarConstraint
from anabranch.structure.vocabulary import Vocabulary
from anabranch.support.files import shown_command, write_atomically

DRAFTS = ("draft7", "draft2020-12")
END = "<end>"


def letters() -> Any:
    """A tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*alphabet, END])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)


def written(constraint: GrammarConstraint, tokens: list[int], end: int) -> bool:
    """Return whether a text of these tokens can be written to its end."""
    for place, token in enumerate(tokens):
        if not constraint.allows(tokens[:place], token):
            return False
    return constraint.allows(tokens, end)


def of_draft(folder: Path, tokenizer: Any, vocabulary: Vocabulary) -> dict[str, Any]:
    """The counts of a draft's required tests, the reasons of refusals, and the unsound tests by name."""
    counts, reasons, unsound = Counter[str](), Counter[str](), list[str]()
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            counts["schemas"] += 1
            try:
                source = source_of({"schema": json.dumps(group["schema"])})
                assert source is not None
                grammar = compiled(source, vocabulary)
            except InputError as error:
                counts["refused"] += 1
                reasons[str(error).split(" is not supported: ")[-1][:80]] += 1
                continue
            for test in group["tests"]:
                tokens = tokenizer.encode(json.dumps(test["data"], ensure_ascii=False))
                try:
                    found = written(GrammarConstraint(grammar, 0), tokens, tokenizer.eos_token_id)
                except InputError:
                    found = False
                kind = "sound" if test["valid"] == found else "narrower" if test["valid"] else "unsound"
                counts[kind] += 1
                if kind == "unsound":
                    unsound.append(f"{path.stem}: {group['description']}: {test['description']}")
    return {"counts": dict(counts), "refusals": dict(reasons.most_common()), "unsound": unsound}


def main() -> None:
    """Print the counts of each draft, and write everything to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path, help="a checkout of the suite")
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    options = parser.parse_args()
    tokenizer = letters()
    vocabulary = Vocabulary.of(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    drafts = {name: of_draft(options.suite / "tests" / name, tokenizer, vocabulary) for name in DRAFTS}
    record = {
        "command": shown_command("python", *sys.argv),
        "llguidance": version("llguidance"),
        "drafts": drafts,
        "environment": environment(torch.device("cpu")),
    }
    write_atomically(options.out, json.dumps(record, indent=1) + "\n")
    for name, found in drafts.items():
        print(name, found["counts"])


if __name__ == "__main__":
    main()
