"""Training data: prompts with completions as token ids, one JSON object per line.

A line is {"prompt_ids": [...], "answer_ids": [...]}; other fields are allowed (``anabranch train answers`` writes id
and source).
"""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anabranch.errors import FileError, InputError, TrainingWarning
from anabranch.learning.examples import Batch, Example
from anabranch.model.text import encode
from anabranch.support.files import LONE_SURROGATES
from anabranch.support.jsonfiles import is_whole, read_rows, read_text

__all__ = [
    "batches",
    "digest",
    "frequent_tokens",
    "lone_surrogate",
    "read_examples",
    "read_texts",
    "split",
]


def read_examples(path: Path, *, vocab_size: int, max_tokens: int) -> list[Example]:
    """Read a file of completions; examples longer than ``max_tokens`` are cut at the end.

    Those whose prompt alone is that long are left out, with a warning. Raises FileError that names the malformed line.
    """
    if not path.is_file():
        raise FileError(f"there is no file {path}; write one with 'anabranch train answers'")
    examples: list[Example] = []
    long = 0
    for number, record in read_rows(path):
        prompt: Any = record.get("prompt_ids")
        answer: Any = record.get("answer_ids")
        for ids in (prompt, answer):
            if not isinstance(ids, list) or not all(is_whole(i) for i in ids):
                raise FileError(
                    f"line {number} of {path} is not a JSON object with lists of ids prompt_ids and answer_ids"
                )
        if any(not 0 <= i < vocab_size for i in (*prompt, *answer)):
            raise FileError(f"line {number} of {path} has token ids outside the target's vocabulary")
        long += len(prompt) > max_tokens - 2
        answer = answer[: max(0, max_tokens - len(prompt))]
        if prompt and len(answer) >= 2:
            examples.append(
                Example(tuple(prompt), tuple(answer), str(record.get("source", "")), str(record.get("id", number)))
            )
    if not examples:
        longer = f"; {long:,} prompts fill the {max_tokens:,} tokens of --max-tokens or of the target" if long else ""
        raise FileError(f"{path} has no prompt with a completion of at least 2 tokens{longer}")
    if long:
        warnings.warn(
            f"{long:,} prompts of {path} are left out, since they fill the {max_tokens:,} tokens of --max-tokens or of "
            "the target's context",
            TrainingWarning,
            stacklevel=2,
        )
    return examples


def read_texts(path: Path, tokenizer: Any, *, max_tokens: int, prompt_tokens: int = 8) -> list[Example]:
    """Read plain text: a JSONL file with a field ``text`` per line, or any other file as one text.

    Texts are cut into pieces of ``max_tokens``; the first ``prompt_tokens`` of each are its prompt. Raises FileError
    that names the malformed line.
    """
    if not path.is_file():
        raise FileError(f"there is no file {path}; give a text file or a JSONL file with a field 'text'")
    texts = []
    if path.suffix == ".jsonl":
        for number, record in read_rows(path):
            if not isinstance(record.get("text"), str):
                raise FileError(f"line {number} of {path} is not a JSON object with a field 'text'")
            if half := lone_surrogate([record["text"], record.get("source")]):
                raise FileError(
                    f"line {number} of {path} contains the unpaired surrogate {half}; correct or delete the line"
                )
            texts.append((record["text"], str(record.get("source", path.stem))))
    else:
        texts.append((read_text(path, "give a text file in UTF-8"), path.stem))
    examples = []
    for text, source in texts:
        ids = tuple(encode(tokenizer, text))
        for first in range(0, len(ids), max_tokens):
            stretch = ids[first : first + max_tokens]
            if len(stretch) >= prompt_tokens + 2:
                examples.append(Example(stretch[:prompt_tokens], stretch[prompt_tokens:], source))
    if not examples:
        raise FileError(f"{path} has no text of at least {prompt_tokens + 2} tokens")
    return examples


def lone_surrogate(value: Any) -> str:
    """The first unpaired surrogate in a JSON value, escaped, or "" if there is none; UTF-8 cannot encode one."""
    found = LONE_SURROGATES.search(json.dumps(value, ensure_ascii=False))
    return "" if found is None else ascii(found[0][0])[1:-1]


def digest(examples: Iterable[Example]) -> str:
    """The identity of an ordered training set: a SHA-256 in hex."""
    seen = hashlib.sha256()
    for example in examples:
        seen.update(np.array([len(example.prompt_ids), *example.prompt_ids, *example.answer_ids, -1]).tobytes())
    return seen.hexdigest()


def split(examples: Sequence[Example], held_out: int, seed: int = 0) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples; no prompt is in both.

    A hash of each prompt decides, so most training examples remain training examples when data are added.
    """
    if held_out < 0:
        raise InputError(f"held_out must be at least 0, got {held_out}")
    if held_out >= len(examples):
        raise InputError(f"held_out must be less than the number of examples, {len(examples)}, got {held_out}")
    order = sorted(examples, key=lambda example: _lot(example.prompt_ids, seed))
    evaluation = order[:held_out]
    prompts = {example.prompt_ids for example in evaluation}
    return [example for example in order[held_out:] if example.prompt_ids not in prompts], evaluation


def _lot(prompt_ids: tuple[int, ...], seed: int) -> bytes:
    return hashlib.sha256(np.array([seed, *prompt_ids]).tobytes()).digest()


def frequent_tokens(examples: Iterable[Example], size: int, vocab_size: int, always: Iterable[int] = ()) -> Tensor:
    """The draft vocabulary: the ``size`` most frequent completion tokens, including ``always``, sorted."""
    counts = Counter(token for example in examples for token in example.answer_ids)
    chosen = {token for token in always if 0 <= token < vocab_size}
    for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(chosen) >= size:
            break
        chosen.add(token)
    # low ids are the tokenizer's first merges and so likely to be frequent, if the sample has too few tokens
    for token in range(vocab_size):
        if len(chosen) >= size:
            break
        chosen.add(token)
    return torch.tensor(sorted(chosen))


def batches(examples: Sequence[Example], tokens: int, *, seed: int) -> Iterator[Batch]:
    """One epoch of batches of about ``tokens`` padded tokens, from examples of similar length, in random order."""
    rng = random.Random(seed)
    order = list(examples)
    rng.shuffle(order)
    order.sort(key=lambda example: (len(example.answer_ids) // 32, len(example)))
    groups: list[list[Example]] = [[]]
    widest = 0
    for example in order:
        widest = max(widest, len(example))
        if groups[-1] and widest * (len(groups[-1]) + 1) > tokens:
            groups.append([])
            widest = len(example)
        groups[-1].append(example)
    rng.shuffle(groups)
    for group in groups:
        yield Batch.of(group)
