"""Prompts to measure on: a suite of a data folder, a JSONL file of the user's, or the few in the package."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.errors import FileError, InputError

__all__ = ["SUITES", "Prompt", "load_suite"]


@dataclass(frozen=True)
class Prompt:
    """One prompt and the task it belongs to."""

    name: str
    task: str
    text: str


# field that holds the prompt, field that names the task
SUITES: dict[str, tuple[str, str, str]] = {
    "spec_bench": ("spec_bench/test", "turns", "task"),
    "mt_bench": ("mt_bench/test", "turns", "category"),
    "humaneval": ("humaneval/test", "prompt", ""),
    "gsm8k": ("gsm8k/test", "question", ""),
}

OWN = (
    ("explain", "Explain why the sky is blue."),
    ("list", "List five things to check before a long bicycle tour."),
    ("code", "Write a Python function that returns the n-th Fibonacci number, and explain how it works."),
    ("math", "A tank holds 240 litres and drains 8 litres a minute. When is it three quarters empty? Show the steps."),
    ("rewrite", "Rewrite politely: 'You sent me the wrong file again, send the right one now.'"),
    ("story", "Tell a short story about a river that splits in two and meets again."),
)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise FileError(f"line {number} of {path} is not JSON") from error
            if not isinstance(row, dict):
                raise FileError(f"line {number} of {path} is not a JSON object")
            yield number, row


def load_suite(
    suite: str, *, data: Path | None = None, limit: int | None = None, field: str = "prompt"
) -> list[Prompt]:
    """The prompts of ``suite``: a name of ``SUITES`` (needs ``data``), "own", or the path of a JSONL file.

    ``limit`` takes that many, spread evenly over the tasks in file order. Of several turns the first is used.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1, not {limit}")
    found = [Prompt(name, "own", text) for name, text in OWN] if suite == "own" else list(_read(suite, data, field))
    if not found:
        raise FileError(f"the suite {suite!r} has no prompts")
    return found if limit is None else _spread(found, limit)


def _read(suite: str, data: Path | None, field: str) -> Iterator[Prompt]:
    task_field = "task"
    if suite in SUITES:
        if data is None:
            raise InputError(f"the suite {suite!r} is not part of the package; say where it lies with --data FOLDER")
        stem, field, task_field = SUITES[suite]
        path = data / f"{stem}.jsonl.gz"
        if not path.is_file():
            path = data / f"{stem}.jsonl"
    else:
        path = Path(suite)
    if not path.is_file():
        known = ", ".join(["own", *SUITES])
        raise FileError(f"there is no suite or file {str(path)!r}; suites are {known}, or give a JSONL file")
    for number, row in _rows(path):
        text = row.get(field)
        if isinstance(text, list) and text:
            text = text[0]
        if not isinstance(text, str) or not text:
            raise FileError(f"line {number} of {path} has no text in the field {field!r}; name the field with --field")
        yield Prompt(str(row.get("question_id", row.get("id", number))), str(row.get(task_field, path.stem)), text)


def _spread(prompts: list[Prompt], limit: int) -> list[Prompt]:
    tasks: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, []).append(prompt)
    turns = max(len(group) for group in tasks.values())
    order = [group[turn] for turn in range(turns) for group in tasks.values() if turn < len(group)]
    return order[:limit]
