"""Training data: prompts with completions as token ids, one JSON object per line.

A line is {"prompt_ids": [...], "answer_ids": [...]}; other fields are allowed (``anabranch train answers`` writes id
and source).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from anabranch.errors import FileError, InputError, TrainingWarning
from anabranch.learning.examples import Batch, Example
from anabranch.model.encoder import Source
from anabranch.model.text import encode
from anabranch.support.files import LONE_SURROGATES
from anabranch.support.jsonfiles import has_rows, is_whole, read_rows, read_whole, rows_made

__all__ = [
    "Sourced",
    "batches",
    "check_first",
    "completion_of",
    "digest",
    "frequent_tokens",
    "left_out",
    "lone_surrogate",
    "read_examples",
    "read_texts",
    "split",
    "text_of",
    "warn_of_dropped",
]

LEAST = 2  # tokens of a completion: a drafter predicts the token after the next one


# (a row, its prompt, where it stands) -> what the decoder begins with, and what the encoder reads
Sourced: TypeAlias = Callable[[Mapping[str, Any], Sequence[int], str], tuple[Sequence[int], Source | None]]


def _no_source(record: Mapping[str, Any], prompt: Sequence[int], where: str) -> tuple[Sequence[int], Source | None]:
    return prompt, None


def read_examples(path: Path, *, vocab_size: int, max_tokens: int, sourced: Sourced = _no_source) -> list[Example]:
    """Read a file of completions; examples longer than ``max_tokens`` are cut at the end.

    sourced  for an encoder-decoder target

    A warning counts those that are left out, by reason (``left_out``). Raises FileError that names the malformed line.
    """
    if not path.is_file():
        raise FileError(f"there is no file {path}; write one with 'anabranch train answers'")
    examples: list[Example] = []
    dropped: Counter[str] = Counter()

    def made(number: int, record: Mapping[str, Any]) -> tuple[Any, ...]:
        prompt, *rest = completion_of(number, record, path, vocab_size)
        return *sourced(record, prompt, f"line {number} of {path}"), *rest

    for prompt, encoded, answer, source, name in rows_made(path, made):
        if reason := left_out(len(prompt), len(answer), max_tokens):
            dropped[reason] += 1
            continue
        examples.append(Example(tuple(prompt), tuple(answer[: max_tokens - len(prompt)]), source, name, encoded))
    if not examples:
        raise FileError(f"{path} has no prompt with a completion of at least {LEAST} tokens{_counted(dropped)}")
    warn_of_dropped(dropped, len(examples) + dropped.total(), f"rows of {path}")
    return examples


def completion_of(
    number: int, record: Mapping[str, Any], path: Path, vocab_size: int | None = None
) -> tuple[list[int], list[int], str, str]:
    """Prompt, answer, source and name of a row of completions, with ids below ``vocab_size``. Raises FileError."""
    pair: list[Any] = [record.get(name) for name in ("prompt_ids", "answer_ids")]
    if not all(isinstance(ids, list) and all(map(is_whole, ids)) for ids in pair):
        raise FileError(
            f"line {number} of {path} is not a JSON object with lists of ids prompt_ids and answer_ids"
            f"{_as_task(record, path)}"
        )
    if vocab_size is not None and not all(0 <= i < vocab_size for ids in pair for i in ids):
        raise FileError(f"line {number} of {path} has token ids outside the target's vocabulary")
    return *pair, str(record.get("source", "")), str(record.get("id", number))


def check_first(path: Path, *, completions: bool) -> None:
    """Check the first row of a file of completions or of text, before a model is loaded. Raises FileError."""
    if not completions and not has_rows(path):
        return
    for number, record in itertools.islice(read_rows(path), 1):
        _ = completion_of(number, record, path) if completions else text_of(number, record, path)


def left_out(prompt: int, answer: int, max_tokens: int) -> str:
    """Why an example with so many tokens is not trained on; empty if it is."""
    if not prompt:
        return "without a prompt"
    if answer < LEAST:
        return f"with a completion of fewer than {LEAST} tokens"
    if prompt > max_tokens - LEAST:
        return f"whose prompt fills the {max_tokens:,} tokens of --max-tokens or of the target's context"
    return ""


def warn_of_dropped(dropped: Counter[str], of: int, what: str) -> None:
    """Warn of examples that are left out, with the number for each reason."""
    if dropped:
        warnings.warn(
            f"{dropped.total():,} of {of:,} {what} are left out{_counted(dropped)}", TrainingWarning, stacklevel=3
        )


def _counted(dropped: Counter[str]) -> str:
    return ": " + ", ".join(f"{count:,} {why}" for why, count in sorted(dropped.items())) if dropped else ""


def _as_task(record: Mapping[str, Any], path: Path) -> str:
    """Message for a row of text where token ids are expected."""
    text = [name for name in ("prompt", "messages", "completion") if name in record]
    return f"; it has {' and '.join(text)}: give rows of text as --task {path}" if text else ""


def read_texts(path: Path, tokenizer: Any, *, max_tokens: int, prompt_tokens: int = 8) -> list[Example]:
    """Read plain text: a file of rows with a field ``text`` each, or any other file as one text.

    Texts are cut into pieces of ``max_tokens``; the first ``prompt_tokens`` of each are its prompt. Shorter pieces are
    left out, and a warning counts the rows without any other. Raises FileError that names the malformed line.
    """
    if not path.is_file():
        raise FileError(f"there is no file {path}; give a text file or a JSONL file with a field 'text'")
    examples: list[Example] = []
    least, short, rows = prompt_tokens + LEAST, 0, 0
    for text, source in _texts(path):
        ids = tuple(encode(tokenizer, text))
        before = len(examples)
        for first in range(0, len(ids), max_tokens):
            piece = ids[first : first + max_tokens]
            if len(piece) >= least:
                examples.append(Example(piece[:prompt_tokens], piece[prompt_tokens:], source))
        rows, short = rows + 1, short + (len(examples) == before)
    if not examples:
        raise FileError(f"{path} has no text of at least {least} tokens")
    dropped = Counter({f"with a text of fewer than {least} tokens": short} if short else {})
    warn_of_dropped(dropped, rows, f"rows of {path}")
    return examples


def _texts(path: Path) -> list[tuple[str, str]]:
    """The texts of a file with their sources."""
    if not has_rows(path):
        return [(read_whole(path), _name(path))]
    return rows_made(path, lambda number, record: text_of(number, record, path))


def _name(path: Path) -> str:
    return path.name.split(".")[0]


def text_of(number: int, record: Mapping[str, Any], path: Path) -> tuple[str, str]:
    """The text of a row and its source. Raises FileError."""
    if not isinstance(record.get("text"), str):
        fields = ", ".join(record) or "none"
        raise FileError(
            f"line {number} of {path} is not a JSON object with a field 'text'; its fields are {fields}"
            f"{_as_task(record, path)}"
        )
    if half := lone_surrogate([record["text"], record.get("source")]):
        raise FileError(f"line {number} of {path} contains the unpaired surrogate {half}; correct or delete the line")
    return record["text"], str(record.get("source", _name(path)))


def lone_surrogate(value: Any) -> str:
    """The first unpaired surrogate in a JSON value, escaped, or "" if there is none; UTF-8 cannot encode one."""
    match = LONE_SURROGATES.search(json.dumps(value, ensure_ascii=False))
    return "" if match is None else ascii(match[0][0])[1:-1]


def digest(examples: Iterable[Example]) -> str:
    """The identity of an ordered training set: a SHA-256 in hex."""
    seen = hashlib.sha256()
    for example in examples:
        asked = example.question
        seen.update(np.array([len(asked), *asked, *example.answer_ids, -1]).tobytes())
    return seen.hexdigest()


def split(examples: Sequence[Example], held_out: int, seed: int = 0) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples; no prompt is in both.

    A hash of each prompt decides, so most training examples remain training examples when data are added.
    """
    if held_out < 0:
        raise InputError(f"held_out must be at least 0, got {held_out}")
    if held_out >= len(examples):
        raise InputError(f"held_out must be less than the number of examples, {len(examples)}, got {held_out}")
    order = sorted(examples, key=lambda example: _lot(example.question, seed))
    evaluation = order[:held_out]
    prompts = {example.question for example in evaluation}
    return [example for example in order[held_out:] if example.question not in prompts], evaluation


def _lot(question: tuple[int, ...], seed: int) -> bytes:
    return hashlib.sha256(np.array([seed, *question]).tobytes()).digest()


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
